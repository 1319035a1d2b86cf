"""Sampling values that a model recommends."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.config.compose.config_identity import config_identity
from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.model_sampling import (
    OFF,
    recommendation,
    recommended,
    sampling_text,
    sampling_values,
)
from batchgen.util.errors import ConfigError


def _job(folder: Path, content: Any, *overrides: str) -> dict[str, Any]:
    """The group sampling of a job whose model recommends this."""
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    config = compose({}, [f"model.path={folder}", "sampling=model", *overrides])
    assert compose(resolved(config)) == config
    return {key: resolved(config)["sampling"][key] for key in OFF}


def test_values_of_the_model(tmp_path: Path) -> None:
    content = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 9}
    assert _job(tmp_path, content) == {
        **{"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        **{"min_p": 0.0, "repetition_penalty": 1.0},
    }
    config = compose({}, [f"model.path={tmp_path}", "sampling=model"])
    same = ["sampling.temperature=0.6", "sampling.top_p=0.9", "sampling.top_k=20"]
    assert config_identity(config) == config_identity(
        compose({}, [f"model.path={tmp_path}", *same])
    )
    assert config.sampling.max_new_tokens == 256 and config.sampling.n == 1


def test_typed_keys_go_first(tmp_path: Path) -> None:
    content = {"temperature": 0.6, "min_p": 0.1}
    found = _job(tmp_path, content, "sampling.temperature=1.2", "sampling.top_k=3")
    assert (found["temperature"], found["min_p"], found["top_k"]) == (1.2, 0.1, 3)


def test_one_key_of_another_choice(tmp_path: Path) -> None:
    found = _job(tmp_path, {"temperature": 0.6, "top_p": 0.5}, "sampling=sample")
    assert (found["temperature"], found["top_p"]) == (0.7, 0.95)
    found = _job(tmp_path, {"top_p": 0.5}, "sampling=sample", "sampling.top_p=null")
    assert (found["temperature"], found["top_p"]) == (0.7, 0.5)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_k": -1, "temperature": 1}, {"top_k": 0, "temperature": 1.0}),
        ({"eos_token_id": 2, "temperature": None}, {}),
    ],
)
def test_what_a_model_recommends(
    tmp_path: Path, content: dict[str, Any], found: dict[str, float]
) -> None:
    assert recommended(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert recommended(tmp_path) == found


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"eos_token_id": 2}, "recommends none"),
        ({"temperature": 0.6, "typical_p": 0.3}, "recommends typical_p=0.3"),
        ({"temperature": 0.6, "num_beams": 4}, "recommends num_beams=4"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": True}, "top_p must be a number"),
        ({"temperature": 0.6, "top_p": 7}, r"top_p must be above 0 and at most 1"),
        ("[]", "must hold an object"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_what_cannot_be_taken(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _job(tmp_path, content)


def test_a_model_without_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.temperature is null.* recommends none"):
        compose({}, ["model.path=nowhere", "sampling=model"])


def test_what_people_read() -> None:
    job = {**OFF, "temperature": 0.6, "top_p": 1.0}
    of_model = {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
    values = sampling_values(job, of_model)
    assert values == {
        "temperature": {"value": 0.6, "model": 0.6},
        "top_p": {"value": 1.0, "model": 0.95},
    }
    said = "temperature=0.6 (the model's), top_p=1.0 (the model recommends 0.95)"
    assert sampling_text(values) == said
    assert recommendation(job, of_model) == (
        "the model recommends top_p=0.95; this job has top_p=1.0 (sampling=model takes the model's)"
    )
    assert recommendation(job, {"temperature": 0.6}) is None
    assert sampling_text(sampling_values(OFF, {})) == "temperature=1.0"
