"""Addresses of steps: what may grow does not move them, whatever else changes moves them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.pipelines.run.addresses import addresses
from batchgen.pipelines.run.pipeline import Pipeline
from batchgen.storage.folder.pipeline_record import (
    PipelineRecord,
    StepVersions,
    Version,
    step_folder_name,
    step_of,
)
from batchgen.util.errors import JobError
from tests.support.jobs.pipeline_job import EXTRACT, composed, values

NAMES = ("draft", "judge", "last")
PRINTS = {"model": "abc", "dtype": "float32"}
GROWING = {
    "draft": ["sampling.n", "dataset.limit"],
    "judge": ["dataset.limit"],
    "last": ["sampling.n", "dataset.limit"],
}
FREE = [
    "engine.max_num_seqs", "workers.stale_after", "progress.show", "model.name",
    "output.report", "output.retry_errors",
]  # fmt: skip
VALUE: dict[str, Any] = {
    "sampling.n": 5, "dataset.limit": 7, "engine.max_num_seqs": 3, "workers.stale_after": 90,
    "progress.show": 9, "model.name": "other", "output.report": True, "output.retry_errors": True,
    "sampling.seed": 4, "sampling.temperature": 0.3, "sampling.max_new_tokens": 9,
    "prompt.user": "{{ q }}?", "prompt.system": "x", "sampling.stream": "s",
    "output.columns": ["logprobs"], "engine.max_model_len": 99, "rows": [{"Keep": {"rows": 3}}],
    "constraint": {"choice": "regex", "pattern": "a"}, "output.rows_per_shard": 8,
}  # fmt: skip
DECIDING = [
    "sampling.seed", "sampling.temperature", "sampling.max_new_tokens", "prompt.user",
    "prompt.system", "sampling.stream", "output.columns", "engine.max_model_len", "rows",
    "constraint", "output.rows_per_shard",
]  # fmt: skip


def pipeline(**steps: Mapping[str, Any]) -> Pipeline:
    given = values(Path("model"), Path("rows.jsonl"), Path("out"))
    for name, keys in steps.items():
        given["steps"][name] |= keys
    return composed(given)


def found(one: Pipeline, prints: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, str]:
    made = addresses(one.steps, prints or dict.fromkeys(NAMES, PRINTS))
    return {name: address for name, (address, _) in made.items()}


@cache
def unchanged() -> dict[str, str]:
    return found(pipeline())


def moved(**steps: Mapping[str, Any]) -> set[str]:
    """The steps whose addresses are others with some changes."""
    before, after = unchanged(), found(pipeline(**steps))
    return {name for name in NAMES if before[name] != after[name]}


def behind(name: str) -> set[str]:
    """The steps that read a step, directly or not."""
    return set(NAMES[NAMES.index(name) + 1 :])


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_a_change_moves_the_step_and_what_is_behind_it(name: str, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(DECIDING + FREE), min_size=1, unique=True))
    changes = {key: VALUE[key] for key in keys}
    decides = any(key in DECIDING for key in keys)
    assert moved(**{name: changes}) == ({name} | behind(name) if decides else set())


@pytest.mark.parametrize(("name", "key"), [(n, k) for n, keys in GROWING.items() for k in keys])
def test_what_may_grow_does_not_move_a_step(name: str, key: str) -> None:
    """More rows are appended in every step; more samples come between the rows of readers."""
    expected = behind(name) if key == "sampling.n" else set()
    assert moved(**{name: {key: VALUE[key]}}) == expected


def test_other_grades_move_what_reads_them() -> None:
    assert moved(draft={"post": []}) == {"judge", "last"}
    assert moved(judge={"post": [EXTRACT]}) == {"last"}


def test_other_models_move_a_step() -> None:
    one = pipeline()
    prints = dict.fromkeys(NAMES, PRINTS) | {"judge": {**PRINTS, "model": "other"}}
    before, after = found(one), found(one, prints)
    assert {name for name in NAMES if before[name] != after[name]} == {"judge", "last"}


def test_where_files_lie_does_not_move_a_step() -> None:
    given = values(Path("elsewhere/model"), Path("other.jsonl"), Path("/else/out"))
    assert found(composed(given)) == found(pipeline())


def test_an_edition_has_an_address_of_its_own() -> None:
    steps = pipeline().steps
    prints = dict.fromkeys(NAMES, PRINTS)
    first = addresses(steps, prints)
    second = addresses(steps, prints, lambda name, base: int(name == "judge"))
    assert first["draft"] == second["draft"]
    assert first["judge"][1].base == second["judge"][1].base
    assert {first[name][0] for name in NAMES}.isdisjoint({second["judge"][0], second["last"][0]})


def test_a_record_is_read_as_it_was_written() -> None:
    steps = {
        "a": StepVersions("0123456789", {"0123456789": Version("0123456789")}),
        "b": StepVersions(None, {"abcdef0123": Version("0123456789", 1, {"a": "0123456789"})}),
    }
    record = PipelineRecord(steps)
    assert PipelineRecord.parse(record.text().encode(), "x") == record
    assert record.current == {"a": "a.0123456789"} and record.steps["b"].older == ["abcdef0123"]
    assert step_of(step_folder_name("a-b", "0123456789")) == "a-b"
    assert step_of("a.b") is step_of("data") is None


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b'{"format_version": 2, "steps": {}}',
        b'{"format_version": 1, "steps": {"../x": {"current": null, "versions": {}}}}',
        b'{"format_version": 1, "steps": {"x": {"current": "../../y", "versions": {}}}}',
        b'{"format_version": 1, "steps": {"x": {"current": null, "versions": {"..": {}}}}}',
    ],
)  # fmt: skip
def test_a_strangers_record_leads_nowhere(content: bytes) -> None:
    with pytest.raises(JobError, match="is not a record of batchgen"):
        PipelineRecord.parse(content, "out/pipeline.json")
