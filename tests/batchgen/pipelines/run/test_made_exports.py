"""Exports of a pipeline are what its record says, whatever happens to the files and the process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from batchgen.pipelines.run import make_sets
from batchgen.storage.folder.export_record import ExportEntry, ExportRecord, content_digest
from batchgen.storage.folder.step_folders import find_record
from batchgen.storage.stores.whole_file import publish_file
from batchgen.util.errors import JobError
from tests.support.jobs.forked import Forked
from tests.support.jobs.pipeline_job import folders, run, values, written
from tests.support.jobs.real_job import ROWS

NAMES = ("draft.sft.jsonl", "rows.csv", "set")


def pipeline(model: Path, rows: Path, tmp_path: Path) -> str:
    """A pipeline of two steps with three exports."""
    given = values(model, rows, tmp_path / "out")
    given["steps"] = {name: given["steps"][name] for name in ("draft", "judge")}
    given["export"] = [
        {"from": "draft", "to": "sft"},
        {"from": "judge", "out": NAMES[1], "columns": ["row_id", "text"]},
        {"from": "judge", "to": "sft", "out": NAMES[2]},
    ]
    return written(tmp_path / "pipeline.yaml", given)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a pipeline, which is complete, beside its file."""
    top = tmp_path_factory.mktemp("exports")
    rows = top / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    assert run(pipeline(model, rows, top)) == 0
    return top


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder, which a test may change."""
    shutil.copytree(made / "out", tmp_path / "out")
    return tmp_path / "out"


def again(made: Path, out: Path, *more: str) -> int:
    return run(str(made / "pipeline.yaml"), f"output.dir={out}", *more)


def digests(out: Path) -> dict[str, str | None]:
    return {name: content_digest(out / "export" / name) for name in NAMES}


def contents(out: Path) -> list[str]:
    """The rows of the exports; the card of the set names the folder."""
    texts = [(out / "export" / name).read_text() for name in NAMES[:2]]
    return [*texts, str(pq.read_table(out / "export/set/data/part-00000.parquet").to_pylist())]


def as_recorded(out: Path) -> bool:
    """Whether each export is what the record says, and nothing else is in the folder."""
    known = ExportRecord.read(out / "export").exports
    names = {path.name for path in (out / "export").iterdir()}
    found = {name: one.digests[0] for name, one in known.items()}
    return found == digests(out) and names == {*NAMES, "exports.json"}


def test_what_is_missing_or_empty_is_written_again(made: Path, copy: Path) -> None:
    before = contents(copy)
    (copy / "export" / NAMES[0]).write_text("")
    (copy / "export" / NAMES[1]).unlink()
    shutil.rmtree(copy / "export" / NAMES[2])
    assert again(made, copy) == 0
    assert contents(copy) == before and as_recorded(copy)


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "mine\n")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.quick(2)
@pytest.mark.parametrize("change", [edit, cut])
@pytest.mark.parametrize("name", [*NAMES[:2], "set/data/part-00000.parquet", "set/selection.json"])
def test_what_is_not_as_it_was_written_is_not_believed(
    made: Path, copy: Path, capsys: pytest.CaptureFixture[str], name: str,
    change: Callable[[Path], None],
) -> None:  # fmt: skip
    path = copy / "export" / name
    if path.suffix == ".parquet":
        path.write_bytes(path.read_bytes()[: -9 if change is cut else -1])
    else:
        change(path)
    content = path.read_bytes()
    for more in ((), ("judge.sampling.seed=5", "draft.sampling.seed=5")):
        assert again(made, copy, *more) == 2
        assert "was not written by this pipeline" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_a_file_of_somebody_else_is_refused_before_the_first_step(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out/export").mkdir(parents=True)
    (tmp_path / "out/pipeline.yaml").touch()
    (tmp_path / "out/export/rows.csv").write_text("mine")
    for more in ((), ("--dry-run",)):
        assert again(made, tmp_path / "out", *more) == 2
        assert "was not written by this pipeline" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*/manifest.json"))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("after", "is_renamed", "more"),
    [
        (0, False, []),
        (2, True, []),
        (0, True, ["judge.sampling.seed=5", "draft.sampling.seed=5"]),
        (2, False, ["judge.sampling.seed=5", "draft.sampling.seed=5"]),
    ],
)
def test_a_kill_between_record_and_file_ends_well(
    made: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, after: int, is_renamed: bool,
    more: list[str],
) -> None:  # fmt: skip
    """At each export, before and after it gets its name; then the same pipeline, or another."""
    calls: list[Path] = []

    def killed(new: Path, path: Path) -> None:
        calls.append(path)
        if len(calls) <= after or is_renamed:
            publish_file(new, path)
        if len(calls) > after:
            raise SystemExit(137)

    monkeypatch.setattr(make_sets, "publish_file", killed)
    with pytest.raises(SystemExit):
        again(made, copy, "judge.sampling.seed=4", "draft.sampling.seed=4")
    monkeypatch.undo()
    assert again(made, copy, *more) == 0 and as_recorded(copy)
    if not more:
        assert contents(copy) == contents(made / "out")


@pytest.mark.thorough
def test_a_kill_while_an_earlier_folder_is_deleted_ends_well(
    made: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        next(folder.rglob("*.parquet")).unlink()
        raise SystemExit(137)

    monkeypatch.setattr(make_sets, "shutil", SimpleNamespace(rmtree=killed))
    with pytest.raises(SystemExit):
        again(made, copy, "judge.sampling.seed=4", "draft.sampling.seed=4")
    monkeypatch.undo()
    assert again(made, copy) == 0 and as_recorded(copy)
    assert contents(copy) == contents(made / "out")


@pytest.mark.thorough
def test_records_of_other_versions(made: Path, copy: Path) -> None:
    """That of the oldest version goes on, and a newer one is refused."""
    path = copy / "export/exports.json"
    values = json.loads(path.read_text())
    old = {name: one["request"] for name, one in values["exports"].items()}
    path.write_text(json.dumps(old))
    assert ExportRecord.read(path.parent).exports == {n: ExportEntry(r) for n, r in old.items()}
    before = contents(copy)
    assert again(made, copy) == 0
    assert contents(copy) == before and as_recorded(copy)
    path.write_text(json.dumps({**values, "format_version": 3}))
    with pytest.raises(JobError, match="format version 3"):
        ExportRecord.read(path.parent)


@pytest.mark.thorough
def test_two_configurations_at_once(made: Path, tmp_path: Path) -> None:
    """Real processes in one folder: nothing in the record vanishes, and the exports are of the one
    that is current at the end; the other one is told."""
    path, out = str(made / "pipeline.yaml"), tmp_path / "out"
    seeds = ((), ("judge.sampling.seed=1",), ("draft.sampling.seed=2",))
    own = f"output.dir={out}"
    workers = [Forked("batchgen", [path, own, *seed], tmp_path) for seed in seeds]
    said = [worker.communicate(timeout=300)[1] for worker in workers]
    codes = [worker.returncode for worker in workers]
    assert set(codes) <= {0, 1} and 0 in codes, said
    for code, text in zip(codes, said, strict=True):
        assert code == 0 or "another configuration was started in this folder" in text, text
    record = find_record(str(out))
    assert record is not None
    assert {name: len(step.versions) for name, step in record.steps.items()} == {
        "draft": 2, "judge": 3,
    }  # fmt: skip
    assert as_recorded(out)
    current = {name: at.name for name, at in folders(out).items()}
    of = {one.of for one in ExportRecord.read(out / "export").exports.values()}
    assert of == set(current.values())
    assert again(made, out) == 0
    assert contents(out) == contents(made / "out") and as_recorded(out)
