"""What users write as sampling parameters, and what the engine makes of it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from batchgen import Constraint, SamplingParams
from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.sampling.sampling_params import SamplingParams as RequestParams
from batchgen.python import vllm_names
from batchgen.python.llm_arguments import engine_config
from batchgen.python.params import NO_LIMIT, SamplingOptions

VLLM_FIELDS = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
    skip_reading_prefix_cache thinking_token_budget repetition_detection
    routed_experts_prompt_start trace_decode_token_ids
""".split()


class Person:
    """What pydantic's models have."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


PERSON = Constraint.make("json_schema", Person.model_json_schema())


def test_defaults_are_those_of_the_engine() -> None:
    assert SamplingParams().request == RequestParams()
    assert SamplingParams().n == 1
    assert repr(SamplingParams()) == "SamplingParams()"


def test_options_are_all_that_the_engine_takes_and_more() -> None:
    own = {f.name for f in fields(RequestParams)} | {"n"}
    assert set(SamplingOptions.__annotations__) == own | vllm_names.SAMPLING_SAME.keys()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_tokens": 5, "min_tokens": 2}, {"max_new_tokens": 5, "min_new_tokens": 2}),
        ({"max_tokens": 5, "max_new_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_tokens": None}, {"max_new_tokens": NO_LIMIT}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": None, "stop_token_ids": None}, {}),
        ({"stop": ["a", "b"], "stop_token_ids": (3, np.int64(4))},
         {"stop": ("a", "b"), "stop_token_ids": (3, 4)}),
        ({"columns": "step_map"}, {"columns": ("step_map",)}),
        ({"logprobs": 5}, {"logprobs": True, "top_logprobs": 5}),
        ({"logprobs": 0}, {"logprobs": True}),
        ({"logprobs": None}, {}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"top_k": -1}, {}),
        ({"temperature": np.float32(0.5), "top_k": np.int32(7)}, {"temperature": 0.5, "top_k": 7}),
        ({"best_of": 1, "use_beam_search": False, "skip_special_tokens": True, "bad_words": None,
          "prompt_logprobs": None, "detokenize": True}, {}),
        ({"constraint": {"json_schema": Person.model_json_schema()}}, {"constraint": PERSON}),
        ({"constraint": {"json_schema": Person}}, {"constraint": PERSON}),
        ({"constraint": Person}, {"constraint": PERSON}),
        ({"constraint": PERSON}, {"constraint": PERSON}),
        ({"constraint": {"json": True}}, {"constraint": Constraint.make("json")}),
        ({"constraint": {"choice": ("yes", "no")}},
         {"constraint": Constraint.make("choice", ["yes", "no"])}),
        ({"constraint": {"regex": "a+", "start_after": "</think>"}},
         {"constraint": Constraint.make("regex", "a+", start_after="</think>")}),
        ({"constraint": {"grammar": 'root ::= "a"'}},
         {"constraint": Constraint.make("grammar", 'root ::= "a"')}),
    ],
)  # fmt: skip
def test_what_is_given_means(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert SamplingParams(**given).request == RequestParams(**meant)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temprature": 1}, "no argument 'temprature': did you mean temperature?"),
        ({"wibble": 1}, "no argument 'wibble': choose among columns, constraint,"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens and max_new_tokens mean the same"),
        ({"logprobs": 5, "top_logprobs": 3}, "logprobs=5 and top_logprobs=3 differ"),
        ({"logprobs": -1}, "top_logprobs must be between 0 and 256"),
        ({"use_beam_search": True}, "no beam search: draw n samples"),
        ({"best_of": 4}, "best_of=4: draw n samples"),
        ({"guided_decoding": {"json": {}}}, 'use constraint={"json_schema": …}'),
        ({"structured_outputs": object()}, 'use constraint={"json_schema": …}'),
        ({"prompt_logprobs": 1}, "generated tokens only"),
        ({"include_stop_str_in_output": True}, "output.text + output.stop"),
        ({"skip_special_tokens": False}, "llm.tokenizer.decode(output.token_ids)"),
        ({"temperature": "0.7"}, "temperature must be a number, got '0.7'"),
        ({"top_p": 2}, "top_p must be above 0 and at most 1"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 1.5}, "n must be an integer"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"stop": [1]}, "stop[0] must be a string"),
        ({"constraint": "json"}, '{"json": True}'),
        ({"constraint": {"json": Person.model_json_schema()}}, "for a schema write {'json_schema'"),
        ({"constraint": {"type": "object"}}, "a JSON Schema is written as {'json_schema': schema}"),
        ({"constraint": {"regex": "a", "choice": ["a"]}}, "'regex' and 'choice' together"),
        ({"constraint": {"regx": "a"}}, "got the keys 'regx'"),
        ({"constraint": {"regex": "("}}, "("),
        ({"constraint": {"choice": "yes"}}, "choices must be a non-empty list of strings"),
        ({"constraint": {"json": True}, "ignore_eos": True}, "ignore_eos must be false"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**given)
    assert says in str(error.value)


@pytest.mark.parametrize("name", VLLM_FIELDS)
def test_every_field_of_vllm_is_taken_or_refused_with_a_word(name: str) -> None:
    taken = name in SamplingOptions.__annotations__
    assert taken != (name in vllm_names.SAMPLING_REFUSED)
    if not taken:
        given: dict[str, Any] = {name: "something else"}
        with pytest.raises(ValueError, match=f"SamplingParams: {name}="):
            SamplingParams(**given)


def test_a_seed_of_none_is_drawn_and_can_be_read() -> None:
    seeds = [SamplingParams(seed=None).seed for _ in range(4)]
    assert len(set(seeds)) > 1
    assert SamplingParams(seed=seeds[0]).seed == seeds[0]


def test_parameters_are_values() -> None:
    params = SamplingParams(n=2, max_tokens=None, logprobs=3, constraint=Person, top_p=0.5)
    assert params.replace() == params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert hash(params.replace()) == hash(params)
    assert (params.replace(n=3).n, params.replace(n=3).request) == (3, params.request)
    assert params.replace(max_tokens=7).max_new_tokens == 7
    assert params.top_logprobs == 3
    assert "n=2, top_p=0.5, max_new_tokens=None" in repr(params)
    with pytest.raises(AttributeError):
        params.n = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="no attribute 'tempo'"):
        _ = params.tempo


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_model_len": 99, "max_num_seqs": 4}, EngineConfig(max_model_len=99, max_num_seqs=4)),
        ({"max_num_batched_tokens": 64, "enable_prefix_caching": False},
         EngineConfig(max_batched_tokens=64, prefix_caching=False)),
        ({"enforce_eager": True}, EngineConfig(cuda_graph=False)),
        ({"enforce_eager": False, "tensor_parallel_size": 2, "seed": 0},
         EngineConfig(tensor_parallel=2)),
        ({"kv_cache_memory_bytes": 2**29}, EngineConfig(kv_cache_gib=0.5)),
        ({"gpu_memory_utilization": 1}, EngineConfig(gpu_memory_utilization=1.0)),
    ],
)  # fmt: skip
def test_engine_keys_as_keywords(given: dict[str, Any], meant: EngineConfig) -> None:
    assert engine_config(None, given) == meant


def test_engine_keywords_go_before_the_config() -> None:
    config = EngineConfig(max_num_seqs=3, block_size=32)
    assert engine_config(config, {"max_num_seqs": 5}) == EngineConfig(max_num_seqs=5, block_size=32)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"pipeline_parallel_size": 2},
            "LLM: pipeline_parallel_size=2: an LLM divides layers only",
        ),
        ({"tensor_parallel": 0}, "tensor_parallel must be 1 to 64, got 0"),
        ({"max_model_length": 5}, "no argument 'max_model_length': did you mean max_model_len?"),
        ({"speculative_config": {"model": "x"}}, "strategy=ARSpecStrategy"),
        ({"seed": 3}, "SamplingParams(seed=…)"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1 to 65,536"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be an integer, got 'many'"),
    ],
)
def test_other_engine_keywords_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        engine_config(None, given)
    assert says in str(error.value)
