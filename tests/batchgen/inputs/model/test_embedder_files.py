"""What the files of sentence-transformers say of embeddings, and those that cannot be honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.inputs.model.embedder_files import (
    check_modules,
    checkpoint_pooling,
    normalises,
    pooling_file,
)
from tests.support.engine.pooled_rows import embedder_files


@pytest.mark.parametrize(
    ("values", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, "cls"),
        ({"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"word_embedding_dimension": 64}, "mean"),
    ],
)
def test_old_and_new_files_say_how_to_pool(
    values: dict[str, Any], pooling: str, tmp_path: Path
) -> None:
    folder = embedder_files(tmp_path, values, "Normalize")
    check_modules(folder)
    assert (checkpoint_pooling(folder), normalises(folder)) == (pooling, True)
    assert normalises(embedder_files(tmp_path, values)) is False


def test_other_folders_say_nothing(tmp_path: Path) -> None:
    for content in (None, "[]"):
        if content is not None:
            (tmp_path / "modules.json").write_text(content)
        check_modules(tmp_path)
        assert (checkpoint_pooling(tmp_path), normalises(tmp_path)) == (None, None)
        assert pooling_file(tmp_path) is None


@pytest.mark.parametrize(
    ("message", "values"),
    [
        (r"pools by max, .* only one of lasttoken, mean, cls", {"pooling_mode": "max"}),
        ("pools by weightedmean", {"pooling_mode_weightedmean_tokens": True}),
        ("pools by cls, mean, but", {"pooling_mode": ["cls", "mean"]}),
        ("pools by nothing", {"pooling_mode": []}),
        ("pools by {'a': 1}", {"pooling_mode": {"a": 1}}),
        ("include_prompt=false, which leaves out", {"include_prompt": False}),
        ("does not hold a JSON object", [1]),
        ("which says how the model pools: fetch it, or set", None),
    ],
)
def test_other_ways_are_refused_by_name(message: str, values: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        checkpoint_pooling(embedder_files(tmp_path, values))


@pytest.mark.parametrize("place", ["", "..", "../1_Pooling", "/etc", "a/b", "1_Pooling/.."])
def test_only_folders_of_the_model_are_read(place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must name a folder next to it"):
        checkpoint_pooling(embedder_files(tmp_path, {}, place=place))


def test_other_modules_and_damaged_lists_are_refused(tmp_path: Path) -> None:
    embedder_files(tmp_path, {}, "Dense", "Normalize")
    message = "lists the modules Transformer, Pooling, Dense, Normalize, and batchgen supports only"
    with pytest.raises(ValueError, match=message):
        check_modules(tmp_path)
    for content, message in (
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("7", "must hold a list of modules"),
        ('[{"type": "a.Pooling"}]', "each with a type and a path"),
    ):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            check_modules(tmp_path)
