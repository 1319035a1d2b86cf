"""Which of vLLM's keyword arguments mean the same here, and what to write instead of the others.

The names are those of vLLM's `SamplingParams`, of its `LLM` with the engine's arguments, and of
`LLM.generate` and `LLM.chat`, in the versions up to November 2026, with some that older versions
had.
"""

from __future__ import annotations

_CONSTRAINT = (
    'use constraint={"json_schema": …}, {"regex": …}, {"choice": […]}, {"grammar": …}, '
    '{"structural_tag": …} or {"json": True}'
)
_NO_BEAMS = "batchgen has no beam search: draw n samples, and choose by the sum of output.logprobs"
_PROMPT_LOGPROBS = "batchgen returns log-probabilities of generated tokens only (logprobs)"
_NO_LOGIT_CHANGES = "batchgen does not change single logits: a constraint says what may be written"
_ONE_GPU = "an LLM divides layers only between GPUs (tensor_parallel): leave it out"
_OWN_TOKENIZER = "the tokenizer is the one that comes with the model: leave it out"
_NO_LORA = "batchgen has no LoRA adapters: merge the adapter into a checkpoint"
_MODEL_RULES = "the checkpoint alone decides that: leave it out"
_FINISHED = "leave it out: generate returns finished outputs, and stream yields each as it finishes"

SAMPLING_SAME = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
SAMPLING_REFUSED = {
    "best_of": "draw n samples, and choose by the sum of output.logprobs",
    "use_beam_search": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "prompt_logprob_token_ids": _PROMPT_LOGPROBS,
    "prompt_logprob_start": _PROMPT_LOGPROBS,
    "logprob_token_ids": "only the most likely tokens have log-probabilities: use top_logprobs",
    "flat_logprobs": "log-probabilities are arrays anyway (output.logprobs): leave it out",
    "detokenize": "every output has its text and its token_ids: leave it out",
    "skip_special_tokens": (
        "output.text leaves special tokens out; llm.tokenizer.decode(output.token_ids) has them"
    ),
    "spaces_between_special_tokens": "output.text has no special tokens: leave it out",
    "include_stop_str_in_output": "write output.text + output.stop",
    "output_kind": _FINISHED,
    "stream_interval": _FINISHED,
    "skip_clone": "leave it out",
    "output_text_buffer_length": "leave it out",
    "structured_outputs": _CONSTRAINT,
    "guided_decoding": _CONSTRAINT,
    "guided_json": _CONSTRAINT,
    "guided_regex": _CONSTRAINT,
    "guided_choice": _CONSTRAINT,
    "guided_grammar": _CONSTRAINT,
    "response_format": _CONSTRAINT,
    "logit_bias": _NO_LOGIT_CHANGES,
    "allowed_token_ids": _NO_LOGIT_CHANGES,
    "bad_words": _NO_LOGIT_CHANGES,
    "logits_processors": _NO_LOGIT_CHANGES,
    "extra_args": "there is nothing that would read them: leave it out",
    "skip_reading_prefix_cache": "use LLM(prefix_caching=False)",
    "thinking_token_budget": "batchgen has none; max_new_tokens bounds the whole output",
    "repetition_detection": "use frequency_penalty or repetition_penalty, and max_new_tokens",
    "routed_experts_prompt_start": "columns of the model always begin with the prompt: cut there",
    "trace_decode_token_ids": "batchgen forces no tokens: leave it out",
    "truncate_prompt_tokens": "shorten the prompt; one that is too long gives an output with error",
}
SAMPLING_HARMLESS = {
    "best_of": (None, 1),
    "length_penalty": (None, 1.0),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "skip_clone": (True, False),
    "output_text_buffer_length": (0,),
    "routed_experts_prompt_start": (0,),
    "truncate_prompt_tokens": (None, -1),
}

ENGINE_SAME = {
    "max_num_batched_tokens": "max_batched_tokens",
    "enable_prefix_caching": "prefix_caching",
    "async_scheduling": "overlap",
    "tensor_parallel_size": "tensor_parallel",
}
ENGINE_REFUSED = {
    "pipeline_parallel_size": _ONE_GPU,
    "data_parallel_size": _ONE_GPU,
    "decode_context_parallel_size": _ONE_GPU,
    "prefill_context_parallel_size": _ONE_GPU,
    "enable_expert_parallel": _ONE_GPU,
    "distributed_executor_backend": _ONE_GPU,
    "disable_custom_all_reduce": _ONE_GPU,
    "max_parallel_loading_workers": "leave it out",
    "tokenizer": _OWN_TOKENIZER,
    "tokenizer_mode": _OWN_TOKENIZER,
    "tokenizer_revision": _OWN_TOKENIZER,
    "skip_tokenizer_init": "prompts may be token ids in any case: leave it out",
    "trust_remote_code": "batchgen never runs code of a model; those it knows need none",
    "hf_overrides": _MODEL_RULES,
    "rope_scaling": _MODEL_RULES,
    "rope_theta": _MODEL_RULES,
    "config_format": _MODEL_RULES,
    "model_impl": "batchgen has its own models: leave it out",
    "runner": "batchgen generates: leave it out",
    "task": "batchgen generates: leave it out",
    "convert": "batchgen generates: leave it out",
    "seed": "the seed belongs to the outputs: SamplingParams(seed=…)",
    "generation_config": "give the values that you want to SamplingParams",
    "override_generation_config": "give the values that you want to SamplingParams",
    "logprobs_mode": "SamplingParams(logprobs_mode='raw') or 'processed'",
    "max_logprobs": "top_logprobs of SamplingParams may be up to 100: leave it out",
    "logits_processors": _NO_LOGIT_CHANGES,
    "chat_template": "llm.chat(…, template_kwargs={'chat_template': …})",
    "speculative_config": (
        "strategy=ARSpecStrategy(…) of batchgen.strategies.ar_spec.strategy; see the README"
    ),
    "structured_outputs_config": _CONSTRAINT + " of SamplingParams",
    "guided_decoding_backend": _CONSTRAINT + " of SamplingParams",
    "enable_chunked_prefill": "use chunk_tokens: 0 reads prompts only in steps of their own",
    "kv_cache_dtype": "the KV cache has the dtype of the model: leave it out",
    "num_gpu_blocks_override": "use kv_cache_gib",
    "swap_space": "batchgen computes a row again when memory is short: leave it out",
    "cpu_offload_gb": "weights stay on the device: take a smaller model, or device='cpu'",
    "compilation_config": "use cuda_graph",
    "attention_backend": "batchgen has its own kernels: leave it out",
    "attention_config": "batchgen has its own kernels: leave it out",
    "max_seq_len_to_capture": "leave it out: CUDA graphs work at any length",
    "scheduling_policy": "leave it out",
    "enable_sleep_mode": "llm.close() frees the device",
    "enable_return_routed_experts": "name the columns that you want: context_columns",
    "enable_lora": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "limit_mm_per_prompt": "prompts are text: leave it out",
    "mm_processor_kwargs": "prompts are text: leave it out",
    "hf_token": "set the environment variable HF_TOKEN",
    "download_dir": "set the environment variable HF_HOME",
    "served_model_name": "leave it out",
    "disable_log_stats": "batchgen writes no log: leave it out",
}
ENGINE_HARMLESS = {
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        (None, 1),
    ),
    "disable_custom_all_reduce": (True, False),
    "tokenizer_mode": (None, "auto"),
    "config_format": (None, "auto"),
    "model_impl": (None, "auto"),
    "runner": (None, "auto", "generate"),
    "task": (None, "auto", "generate"),
    "convert": (None, "auto", "none"),
    "seed": (None, 0),
    "generation_config": (None, "vllm"),
    "logprobs_mode": (None, "raw_logprobs"),
    "guided_decoding_backend": (None, "auto", "xgrammar"),
    "enable_chunked_prefill": (None, True),
    "kv_cache_dtype": (None, "auto"),
    "swap_space": (None, 0, 0.0, 4, 4.0),
    "cpu_offload_gb": (None, 0, 0.0),
    "scheduling_policy": (None, "fcfs"),
    "disable_log_stats": (None, True, False),
}

CALL_SAME = {
    "sampling_params": "params",
    "use_tqdm": "progress",
    "chat_template_kwargs": "template_kwargs",
}
CALL_REFUSED = {
    "lora_request": _NO_LORA,
    "priority": "leave it out",
    "prompt_token_ids": "token ids are prompts like others: give them as the first argument",
    "tokenization_kwargs": "tokenize the prompt yourself, and give its token ids",
    "tools": "pass them to the chat template: template_kwargs={'tools': […]}",
    "chat_template": "pass it to the tokenizer: template_kwargs={'chat_template': …}",
    "chat_template_content_format": "the content of a message is a text: leave it out",
    "add_generation_prompt": "the answer always begins after the last message: leave it out",
    "continue_final_message": "use llm.generate with a text that ends where the model goes on",
    "mm_processor_kwargs": "prompts are text: leave it out",
}
CALL_HARMLESS = {
    "chat_template_content_format": (None, "auto", "string"),
    "add_generation_prompt": (True,),
}
