# ruff: noqa: E402
"""lighteval's own `accelerate` backend is the oracle."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import pytest

from batchgen.plugins import harness_requests
from batchgen.util.errors import ConfigError

if importlib.util.find_spec("lighteval") is None:
    pytest.skip("lighteval is not installed", allow_module_level=True)

# It parses LaTeX with an antlr4 that Hydra, and so these tests, cannot have.
for name in ("", ".latex2sympy2", ".math_normalization", ".sets"):
    sys.modules.setdefault(f"latex2sympy2_extended{name}", mock.MagicMock())

from lighteval.models.abstract_model import LightevalModel
from lighteval.models.custom.custom_model import CustomModelConfig
from lighteval.models.model_loader import load_custom_model
from lighteval.models.transformers.transformers_model import (
    TransformersModel,
    TransformersModelConfig,
)
from lighteval.tasks.requests import Doc

FILE = Path(harness_requests.__file__).with_name("lighteval_model.py")


def load(model: Path, keys: str, cache: Path) -> LightevalModel:
    """The model as `lighteval custom` loads it."""
    config = CustomModelConfig(
        model_name=f"{model},device=cpu,use_chat_template=false,{keys}",
        model_definition_file_path=str(FILE),
        cache_dir=str(cache),
    )
    return load_custom_model(config)


def docs(number: int = 12, samples: int = 1) -> list[Doc]:
    """Documents with choices of unequal lengths."""
    choices = [" one", " a longer choice", "x"]
    return [
        Doc(
            query=f"Q: what is {i} and {i * 7}? ",
            choices=choices,
            gold_index=0,
            id=str(i),
            task_name="t",
            generation_size=8,
            stop_sequences=[" "],
            num_samples=samples,
        )
        for i in range(number)
    ]


def test_results_are_those_of_the_accelerate_backend(model: Path, tmp_path: Path) -> None:
    ours = load(model, "max_model_len=200", tmp_path)
    theirs = TransformersModel(
        TransformersModelConfig(
            model_name=str(model), dtype="float32", device="cpu", batch_size=8,
            override_chat_template=False, max_length=200, cache_dir=str(tmp_path),
        )
    )  # fmt: skip
    theirs._cache = None  # the cache wants a registry of tasks
    for one, other in zip(ours.loglikelihood(docs()), theirs.loglikelihood(docs()), strict=True):
        assert one.logprobs == pytest.approx([float(value) for value in other.logprobs], abs=1e-4)
        assert one.argmax_logits_eq_gold == [bool(same) for same in other.argmax_logits_eq_gold]
        assert one.input_tokens == list(other.input_tokens)
    for one, other in zip(ours.greedy_until(docs()), theirs.greedy_until(docs()), strict=True):
        assert one.text == other.text


def test_a_prompt_is_scored_in_windows(model: Path, tmp_path: Path) -> None:
    whole, cut = (load(model, f"max_model_len={most}", tmp_path) for most in (200, 9))
    for one, other in zip(*(lm.loglikelihood_rolling(docs(3)) for lm in (whole, cut)), strict=True):
        assert (len(one.logprobs), len(other.logprobs)) == (1, 3 + (len(other.input) > 24))
        assert sum(map(len, one.output_tokens)) == sum(map(len, other.output_tokens))


def test_samples_need_a_temperature(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="t/0 asks for 3 samples, which are equal"):
        load(model, "max_model_len=200", tmp_path).greedy_until(docs(1, 3))
    (response,) = load(model, "temperature=1.0", tmp_path).greedy_until(docs(1, 3))
    assert len(response.text) == 3 and len(set(response.text)) > 1
    with pytest.raises(ConfigError, match="'fast' behind the model's name must be KEY=VALUE"):
        load(model, "fast", tmp_path)
