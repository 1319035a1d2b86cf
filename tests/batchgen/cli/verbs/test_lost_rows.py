"""Every verb says of a complete job that it has lost rows: no reader has a door of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.__main__ import run_command
from batchgen.cli.verb_table import VERBS
from tests.support.jobs.hub_server import logged_in
from tests.support.jobs.real_job import ROWS, overrides, run

POST = (
    "post=[{_target_: batchgen.grading.extract.Extract, methods: [whole]},"
    "{_target_: batchgen.grading.grade.Grade, method: exact, target: q}]"
)
OTHERS = {
    "init": "writes a job file",
    "batch": "runs its job first, which computes what is missing",
    "clean": "is for pipelines, and reads no rows",
    "rebuild": "compares what it has computed itself",
}
"""The verbs that read no rows of a job that is complete, and why."""
READERS: dict[str, list[str]] = {
    "plan": ["plan.like={out}", "{config}", "output.dir={new}"],
    "status": ["{out}"],
    "show": ["{out}", "--json"],
    "view": ["{out}"],
    "export": ["{out}"],
    "select": ["{out}", "--out", "{new}"],
    "push": ["{out}", "me/answers"],
    "grade": ["{out}", "score.subset=q"],
    "score": ["{out}", "score.subset=q"],
    "compare": ["{whole}", "{out}"],
    "report": ["{out}"],
    "trace": ["{out}", "r5"],
    "audit": ["{out}", "--rows", "99"],
    "lock": ["{out}"],
    "validate": ["{out}"],
}
READ_NO_ROWS = {"status", "plan", "view"}
"""Verbs that look at no byte of the rows themselves; the pages of `view` do, one by one."""


def lose(out: Path) -> None:
    (out / "data/part-00001.parquet").unlink()


def lose_the_last(out: Path) -> None:
    (out / "data/part-00002.parquet").unlink()


def cut(out: Path) -> None:
    shard = out / "data/part-00001.parquet"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def empty(out: Path) -> None:
    (out / "data/part-00000.parquet").write_bytes(b"")


def exchange(out: Path) -> None:
    """The place of a shard is taken by one with fewer rows."""
    shutil.copy(out / "data/part-00002.parquet", out / "data/part-00001.parquet")


def other_format(out: Path) -> None:
    path = out / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))


FAULTS: dict[Callable[[Path], None], str] = {
    lose: "of 3 shards 1 is missing",
    lose_the_last: "of 3 shards 2 is missing",
    cut: "part-00001.parquet is damaged",
    empty: "part-00000.parquet is damaged",
    exchange: "hold 20 rows, and metrics.json says 22",
    other_format: "format version 99",
}


def flip(shard: Path) -> None:
    """Change a byte of each column."""
    meta, content = pq.read_metadata(shard), bytearray(shard.read_bytes())
    for group in range(meta.num_row_groups):
        for column in range(meta.num_columns):
            chunk = meta.row_group(group).column(column)
            content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    shard.write_bytes(content)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graded job with three shards, whose rows have a constraint."""
    top = tmp_path_factory.mktemp("lost")
    (top / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    more = "constraint=regex", "constraint.pattern='[a-z]+'", POST
    run(overrides(model, top / "rows.jsonl", top / "job", *more))
    return top / "job"


@pytest.fixture
def call(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str, Path], tuple[int, str]]]:
    """Runs a verb over a folder; returns its exit code and what it has said."""
    monkeypatch.setattr("batchgen.pages.viewer.server.ViewServer.serve_forever", lambda *_: None)

    def called(verb: str, out: Path) -> tuple[int, str]:
        names = {"out": out, "whole": made, "new": tmp_path / "new", "config": made / "config.yaml"}
        code = run_command([verb, *(part.format(**names) for part in READERS[verb])])
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        return code, "".join(capsys.readouterr())

    with logged_in(monkeypatch):
        yield called


def test_every_verb_is_tried() -> None:
    assert READERS.keys() | OTHERS.keys() == VERBS.keys()


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_job_that_lost_rows_is_refused(
    made: Path, tmp_path: Path, call: Callable[[str, Path], tuple[int, str]],
    fault: Callable[[Path], None],
) -> None:  # fmt: skip
    out = Path(shutil.copytree(made, tmp_path / "job"))
    fault(out)
    for verb in READERS:
        code, said = call(verb, out)
        assert code not in (0, 3) and FAULTS[fault] in said, (verb, code, said)


def test_flipped_bytes_are_refused_where_rows_are_read(
    made: Path, tmp_path: Path, call: Callable[[str, Path], tuple[int, str]]
) -> None:
    out = Path(shutil.copytree(made, tmp_path / "job"))
    flip(out / "data/part-00001.parquet")
    for verb in sorted(READERS.keys() - READ_NO_ROWS):
        code, said = call(verb, out)
        is_told = "damaged" in said or "other rows" in said.replace("\n", " ")
        assert code not in (0, 3) and is_told, (verb, code, said)


@pytest.mark.thorough
def test_a_whole_job_is_read(
    made: Path, tmp_path: Path, call: Callable[[str, Path], tuple[int, str]]
) -> None:
    out = Path(shutil.copytree(made, tmp_path / "job"))
    for verb in READERS:
        code, said = call(verb, out)
        assert code == 0, (verb, said)
