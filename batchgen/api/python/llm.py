"""The Python interface `LLM`: generates from a list of prompts, without files or configuration.

Three quarters of this file are signatures and docstrings, which are the reference of `LLM`. Its
methods convert their arguments and call the modules of this folder: `call_prompts` reads prompts,
`generated` and `scored` run them, and `streams` shares one engine among several calls.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack, overload

import torch
from transformers import PreTrainedTokenizerBase

from batchgen.api.python.call_prompts import (
    Conversation,
    Prompt,
    PromptIds,
    images_of,
    read_prompts,
)
from batchgen.api.python.generated import generate_outputs, stream_outputs
from batchgen.api.python.llm_arguments import (
    AdapterName,
    CallArguments,
    Params,
    arguments_of,
    dtype_name,
    engine_config,
)
from batchgen.api.python.output import Output
from batchgen.api.python.params import SamplingOptions, SamplingParams
from batchgen.api.python.scored import Answer, Score, pairs_of, read_answers, score_answers
from batchgen.api.python.streams import Streams
from batchgen.config.groups.adapter_names import LoRA, LoRATemplate
from batchgen.engine.device.transfer import release_cached_memory
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.hidden_columns import (
    CLASS_SCORES,
    EMBEDDING,
    HIDDEN_STATES,
    Pooling,
)
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import LoadFormat
from batchgen.engine.loading.loader import Quantization
from batchgen.engine.models.model_config import KVCacheDtype
from batchgen.engine.strategy import Strategy
from batchgen.inputs.model.engine_recipe import EngineRecipe
from batchgen.inputs.model.model_adapters import with_adapters
from batchgen.inputs.model.open_model import DeviceName, DtypeName, open_model
from batchgen.inputs.model.other_models import open_others
from batchgen.strategies.ar.strategy import ARStrategy


class LLM:
    """A model with an engine that generates from prompts.

        with LLM("Qwen/Qwen3-0.6B", max_model_len=4096) as llm:
            for output in llm.generate("The capital of France is", SamplingParams(n=2)):
                print(output.text)

    Args:
        model: a hub name, a folder with safetensors and tokenizer, a `.gguf` file, or
            `package://PACKAGE/PATH` for a path inside an installed Python package.
        revision: the commit, branch or tag of a hub model.
        dtype: the dtype of the weights and activations; `auto` is the checkpoint's dtype on a GPU
            and float32 on a CPU.
        device: where the model runs; `auto` is a GPU if there is one.
        load_format: `auto` reads the files at the path, `gguf` requires a GGUF file, and `dummy`
            makes random weights from the configuration alone.
        quantization: `fp8` rounds the weights of the layers to FP8 while they load; None takes them
            as the checkpoint has them, which may be FP8.
        kv_cache_dtype: `fp8` keeps keys and values in FP8, in half of bfloat16's memory; `auto` in
            the dtype of the model.
        strategy: the decoding paradigm; None means `ARStrategy()`. A strategy holds the state of
            its rows, so the LLM works with a copy, and several LLMs can share one object.
        config: batch and memory sizes; None means the defaults.
        context_columns: the columns of context scope, with a value for each token that the model
            reads, that requests may ask for (`SamplingParams(columns=…)`); each takes memory of the
            paged cache.
        images: whether a model that reads images is loaded with its vision tower.
        max_pixels: the maximum number of pixels of an image; larger images are scaled down. None
            allows as many as make 1,280 tokens, or fewer if the model says so.
        lora: LoRA adapters in PEFT's format. One folder or hub name applies to all prompts. With a
            list, or a mapping of names to folders, each prompt uses the adapter that its parameters
            name (`lora`), or none.
        lora_fold: whether the only adapter is added to the weights, which costs no speed but rounds
            differently.
        lora_template: `base` takes the tokenizer and the chat template of the model, `adapter`
            those in the folder of the only adapter.
        hidden_layers: the layers after which `SamplingParams(columns=["hidden_states"])` gives the
            hidden states: 0 is the embedding of tokens, -1 the last layer with the norm.
        **engine: single keys of `EngineConfig`, such as `max_model_len`, `max_num_seqs` and
            `gpu_memory_utilization`; they override those of `config`. vLLM's names for them work
            too; its other arguments are refused with a hint.

    Attributes:
        tokenizer: the model's tokenizer; None if it has none.
        labels: the names of a classifier's classes; None for other models.

    Raises:
        ValueError: the model cannot be found, is not supported, or does not fit, or an argument is
            unknown or wrong; the message says what to do.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: DtypeName | torch.dtype = "auto",
        device: DeviceName = "auto",
        load_format: LoadFormat = "auto",
        quantization: Quantization | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        strategy: Strategy | None = None,
        config: EngineConfig | None = None,
        context_columns: Sequence[str] = (),
        images: bool = True,
        max_pixels: int | None = None,
        lora: LoRA = None,
        lora_fold: bool = False,
        lora_template: LoRATemplate = "base",
        hidden_layers: Sequence[int] = (),
        **engine: Any,
    ) -> None:
        config = engine_config(config, engine)
        dtype_text = dtype_name(dtype)
        if quantization not in (None, "fp8"):
            raise ValueError(f"quantization must be 'fp8' or None, got {quantization!r}")
        if kv_cache_dtype not in ("auto", "fp8"):
            raise ValueError(f"kv_cache_dtype must be 'auto' or 'fp8', got {kv_cache_dtype!r}")
        opened = open_model(model, revision, load_format, quantization, kv_cache_dtype)
        self._images = images_of(opened, max_pixels) if images else None
        opened = replace(opened, with_vision=self._images is not None)
        opened = with_adapters(opened, lora, fold=lora_fold, template=lora_template)
        opened = opened.with_hidden_layers(hidden_layers)
        strategy = ARStrategy() if strategy is None else copy.deepcopy(strategy)
        longest = config.model_len(opened.config.max_position_embeddings)
        max_model_len = strategy.model_len(longest, opened.config)
        others = open_others(strategy, opened, max_model_len)
        hidden = (HIDDEN_STATES,) if hidden_layers else ()
        columns = tuple(dict.fromkeys((*context_columns, *hidden)))
        recipe = EngineRecipe(opened, others, strategy, config, dtype_text, device, columns)
        weights, engine_of_model = recipe.start().build()
        self._model = model
        self._device, self._dtype = weights.device, weights.dtype
        self.tokenizer: PreTrainedTokenizerBase | None = opened.tokenizer
        self.labels = opened.config.labels
        self._streams = Streams(engine_of_model)

    @property
    def engine(self) -> LLMEngine:
        """The engine that runs the requests of all calls.

        Raises:
            ValueError: this LLM was closed.
        """
        return self._streams.engine

    @overload
    def generate(
        self,
        prompts: str | Sequence[int] | Conversation,
        params: SamplingParams | None = None,
        n: int | None = None,
        *,
        lora: AdapterName = None,
        progress: bool | None = None,
        **others: Any,
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = None,
        n: int | None = None,
        *,
        lora: AdapterName = None,
        progress: bool | None = None,
        **others: Any,
    ) -> list[list[Output]]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        n: int | None = None,
        *,
        lora: AdapterName = None,
        progress: bool | None = None,
        **others: Any,
    ) -> list[Output] | list[list[Output]]:
        """Generate n outputs for one prompt, or for each of many, and return them at the end.

        A text, a list of integers (token ids) and a list of messages are one prompt each. Any other
        list holds prompts, which may be of different kinds.

            llm.generate("Hi", n=2)           → [Output, Output]
            llm.generate(["Hi", "Ho"], n=2)   → [[Output, Output], [Output, Output]]
            llm.generate(["Hi"])              → [[Output]]
            llm.generate([])                  → []

        A prompt that cannot be served, because it is too long, empty or no prompt at all, has
        outputs with an `error` in its place, and the others run. A conversation is written with the
        model's chat template, and the model answers its last message.

        Args:
            prompts: one prompt, or many.
            params: the parameters for all prompts, or one for each.
            n: the number of outputs of each prompt; None takes it from the parameters.
            lora: the name of the adapter of all prompts, or vLLM's `LoRARequest`; `base` is the
                model without one, and None leaves it to the parameters.
            progress: whether to show a bar on stderr; None shows it in a terminal.
            **others: the names `sampling_params`, `lora_request` and `use_tqdm` of vLLM.

        Returns:
            The outputs of one prompt in the order of its samples; of many prompts a list of such
            lists, in the order of the prompts.

        Raises:
            ValueError: the parameters cannot be honoured, or an argument is wrong.
        """
        options = {"params": params, "n": n, "lora": lora, "progress": progress}
        return self._generate(prompts, arguments_of("LLM.generate", options, others))

    @overload
    def chat(
        self,
        messages: str | Conversation,
        params: SamplingParams | None = None,
        n: int | None = None,
        *,
        lora: AdapterName = None,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **others: Any,
    ) -> list[Output]: ...

    @overload
    def chat(
        self,
        messages: Iterable[str | Conversation],
        params: Params = None,
        n: int | None = None,
        *,
        lora: AdapterName = None,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **others: Any,
    ) -> list[list[Output]]: ...

    def chat(
        self,
        messages: str | Conversation | Iterable[str | Conversation],
        params: Params = None,
        n: int | None = None,
        *,
        lora: AdapterName = None,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **others: Any,
    ) -> list[Output] | list[list[Output]]:
        """Generate answers to one conversation, or to each of many.

        This is `generate` for conversations, with options for the chat template.

            llm.chat("Hi", template_kwargs={"enable_thinking": False})
            llm.chat([{"role": "user", "content": "Hi"}])

        Args:
            messages: a conversation, which is a list of {"role", "content"}, or a list of those. A
                text stands for a conversation of one message of the user.
            params: as for `generate`.
            n: as for `generate`.
            lora: as for `generate`.
            template_kwargs: options of the model's chat template.
            progress: as for `generate`.
            **others: the names `sampling_params`, `lora_request`, `use_tqdm` and
                `chat_template_kwargs` of vLLM.

        Returns:
            The outputs, nested as those of `generate`.

        Raises:
            ValueError: the parameters cannot be honoured, the model has no chat template, or that
                does not know an option.
        """
        call = arguments_of(
            "LLM.chat",
            {
                "params": params,
                "n": n,
                "lora": lora,
                "progress": progress,
                "template_kwargs": template_kwargs,
            },
            others,
        )
        if isinstance(messages, str):
            return self._generate(_one_message(messages), call)
        if isinstance(messages, Mapping):  # refused, like one message in `generate`
            return self._generate(messages, call)
        # The items are messages of one conversation, or texts and conversations; `read_prompts`
        # finds out which.
        items = [_one_message(item) if isinstance(item, str) else item for item in messages]
        return self._generate(items, call)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        n: int | None = None,
        *,
        lora: AdapterName = None,
        **others: Any,
    ) -> Iterator[Output]:
        """Generate n outputs for each prompt and yield them as they finish.

        An output knows its `prompt_index` and `sample_index`; a single prompt has the index 0. Its
        tokens depend on its prompt, its parameters and these two numbers: each output's seed is
        derived from the seed in `params` and from them.

        One LLM can serve several iterators at a time, also in several threads, and none changes the
        tokens of another. If an iterator is abandoned, its unfinished outputs are dropped.

        Args:
            prompts: as for `generate`.
            params: as for `generate`.
            n: as for `generate`.
            lora: as for `generate`.
            **others: the names `sampling_params` and `lora_request` of vLLM.

        Raises:
            ValueError: as `generate`, at once if an argument is wrong, and at the first output if
                the engine cannot honour the parameters.
        """
        call = arguments_of("LLM.stream", {"params": params, "n": n, "lora": lora}, others)
        read, _ = read_prompts(prompts)
        ids = PromptIds(self.tokenizer, {}, self._images)
        return stream_outputs(self._streams, read, call.params_of(len(read)), ids)

    @overload
    def score(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompts: str | Sequence[int] | Conversation,
        answers: str | Sequence[int],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Score: ...

    @overload
    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        answers: Iterable[Answer],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Score]: ...

    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        answers: Answer | Iterable[Answer],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Score | list[Score]:
        """Say how likely each token of given answers is after their prompts; nothing is generated.

            llm.score("The capital of France is", " Paris")              → Score
            llm.score("The capital of France is", [" Paris", " Rome"])   → [Score, Score]
            llm.score(["1 + 1 =", "1 + 2 ="], [" 2", " 3"])              → [Score, Score]

        Prompt and answer are tokenised apart, and the answer without special tokens: its ids follow
        those of the prompt. So begin an answer with the space that belongs to it, and write an end
        of turn where one is wanted. A prompt with many answers is computed once.

        Args:
            prompts: one prompt, or one for each answer, as for `generate`.
            answers: one answer, as a text or as token ids, or many.
            template_kwargs: options of the model's chat template.
            progress: whether to show a bar on stderr; None shows it in a terminal.
            **options: `top_logprobs=K` returns the K most likely tokens at each position, up to
                256; `logprobs_mode="processed"` is of the distribution that `temperature` and the
                other options of `SamplingParams` make; `columns` are those of context scope.

        Returns:
            The score of one answer, or a list in the order of many. An answer that cannot be
            scored has an `error`.

        Raises:
            ValueError: an option cannot be honoured, or there is not one answer for each prompt.
        """
        if "max_new_tokens" in options or "n" in options:
            raise ValueError("score generates nothing: leave out n and max_new_tokens")
        options["max_new_tokens"] = 0
        params = SamplingParams(**options)
        prompt_list, answer_list = read_prompts(prompts), read_answers(answers)
        pairs = pairs_of(prompt_list, answer_list)
        self.engine  # noqa: B018  (raises an error if it was closed)
        ids = PromptIds(self.tokenizer, template_kwargs or {}, self._images)
        ids.check(prompt_list[0])
        show_progress = sys.stderr.isatty() if progress is None else progress
        scores = score_answers(self._streams, ids, pairs, params.request, show_progress)
        return scores[0] if prompt_list[1] and answer_list[1] else scores

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling: Pooling = "last",
        normalise: bool = False,
        lora: AdapterName = None,
        progress: bool | None = None,
    ) -> Output | list[Output]:
        """Read prompts and give the `embedding` of each; nothing is generated.

            llm.embed("Hi").embedding                     → float32 [hidden_size]
            llm.embed(["Hi", "Ho"], normalise=True)       → [Output, Output]

        Args:
            prompts: as for `generate`; nothing follows the last message of a conversation if it is
                the assistant's.
            pooling: which hidden states after the last norm make it: that of the `last` token, the
                `mean` of all, or that of the first token (`cls`).
            normalise: whether embeddings are divided by their length.
            lora: as for `generate`.
            progress: as for `generate`.

        Returns:
            The output of one prompt, or a list in the order of many. A prompt that cannot be read
            has an `error`.

        Raises:
            ValueError: the strategy is block diffusion, or an argument is wrong.
        """
        params = SamplingParams(
            max_new_tokens=0, pooling=pooling, normalise=normalise, columns=[EMBEDDING]
        )
        return self._read(prompts, CallArguments(params, lora=lora, progress=progress))

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        lora: AdapterName = None,
        progress: bool | None = None,
    ) -> Output | list[Output]:
        """Read prompts with a classifier or reward model (…ForSequenceClassification), and give the
        `class_scores` of each: the logits of the classes `labels`. Arguments and result are
        otherwise those of `embed`.

        Raises:
            ValueError: the model is not a classifier.
        """
        params = SamplingParams(max_new_tokens=0, pooling="last", columns=[CLASS_SCORES])
        return self._read(prompts, CallArguments(params, lora=lora, progress=progress))

    def _read(self, prompts: Any, call: CallArguments) -> Output | list[Output]:
        """Read prompts for `embed` and `classify`: return the output of one prompt, or a list of
        outputs."""
        read: list[Output] = []
        for samples in self._generate(prompts, call):
            if isinstance(samples, Output):  # of one prompt
                return samples
            read += samples
        return read

    def close(self) -> None:
        """Free the device's memory. The LLM cannot be used afterwards."""
        usable = self._streams.closed or self.engine.is_usable
        self._streams.close()
        if self._images is not None:
            self._images.close()
        if usable:
            release_cached_memory(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._streams.closed:
            return f"LLM({self._model!r}, closed)"
        engine = self.engine
        dtype = str(self._dtype).removeprefix("torch.")
        what = f"{engine.strategy.name}, {self._device}, {dtype}"
        return (
            f"LLM({self._model!r}, {what}, max_model_len {engine.max_model_len:,}: {engine.memory})"
        )

    def _generate(self, prompts: Any, call: CallArguments) -> list[Output] | list[list[Output]]:
        """Run `generate` and `chat` with converted arguments."""
        read, is_one = read_prompts(prompts)
        params = call.params_of(len(read))
        # Embeddings and classes only read prompts, so no start of an answer is appended.
        is_read = all(prompt_params.pooling is not None for prompt_params in params)
        ids = PromptIds(self.tokenizer, call.template_kwargs or {}, self._images, is_read)
        show_progress = sys.stderr.isatty() if call.progress is None else call.progress
        outputs = generate_outputs(self._streams, read, params, ids, with_bar=show_progress)
        return outputs[0] if is_one else outputs


def _one_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
