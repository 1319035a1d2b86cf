"""The list of families that tests try is that of the registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.engine.models.model_registry import MODELS
from tests.support.engine.families import ARCHITECTURES, CHUNKED, UNTRIED, family_folder


def test_each_registered_architecture_is_tried() -> None:
    assert {*ARCHITECTURES.values(), *UNTRIED} == MODELS.keys()
    assert ARCHITECTURES.keys() > {*CHUNKED}


@pytest.mark.thorough
def test_each_kind_is_a_model_of_its_architecture(tiny_model: Callable[..., Path]) -> None:
    made = {
        kind: json.loads((family_folder(kind, tiny_model) / "config.json").read_text())
        for kind in ARCHITECTURES
    }
    assert {kind: config["architectures"] for kind, config in made.items()} == {
        kind: [architecture] for kind, architecture in ARCHITECTURES.items()
    }
