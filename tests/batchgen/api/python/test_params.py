"""What users write as sampling parameters, and what the engine makes of it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from batchgen import Constraint, SamplingParams
from batchgen.api.python.llm_arguments import engine_config
from batchgen.api.python.params import NO_LIMIT, SamplingOptions
from batchgen.api.python.unknown_names import SAME
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.sampling.sampling_params import RequestParams


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
    assert set(SamplingOptions.__annotations__) == own | SAME["SamplingParams"].keys()


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
        ({"use_beam_search": True}, "no argument 'use_beam_search': choose among columns,"),
        ({"best_of": None}, "no argument 'best_of': choose among"),
        ({"prompt_logprobs": 1}, "no argument 'prompt_logprobs': did you mean top_logprobs?"),
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
        ({"enforce_eager": False, "tensor_parallel_size": 2},
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
        ({"pipeline_parallel_size": 2}, "LLM has no argument 'pipeline_parallel_size': did you"),
        ({"tensor_parallel": 0}, "tensor_parallel must be 1 to 64, got 0"),
        ({"max_model_length": 5}, "no argument 'max_model_length': did you mean max_model_len?"),
        ({"seed": 3}, "LLM has no argument 'seed'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1 to 65,536"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be an integer, got 'many'"),
    ],
)
def test_other_engine_keywords_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        engine_config(None, given)
    assert says in str(error.value)
