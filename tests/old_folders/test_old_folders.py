"""Folders that 3411184e has written, and what later versions make of them: nothing is computed
again, nothing reads as changed. `make.py` says how they were made."""

from __future__ import annotations

import math
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchgen.__main__ import run_command as run
from batchgen.engine.llm_engine import LLMEngine
from batchgen.pipelines.proof.audit import audited_job
from batchgen.pipelines.proof.audit.first_difference import first_difference

HERE = Path(__file__).parent
COMMANDS: dict[str, list[str]] = yaml.safe_load((HERE / "commands.yaml").read_text())
JOBS = [name for name, command in COMMANDS.items() if command[-1] == f"output.dir={name}"]
JOBS_HERE = [name for name in JOBS if name != "launched"]
LAUNCHED = pytest.param("launched", marks=pytest.mark.slow)  # starts a process
BAD_ROWS = ("graded",)
"""Jobs with error rows: the command ends with 3."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders, and the data sets that they read."""
    folder = tmp_path_factory.mktemp("old_folders")
    with tarfile.open(HERE / "folders.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in HERE.glob("*.jsonl"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def folder(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: what is in it, later tests read as well."""
    monkeypatch.chdir(unpacked)
    return unpacked


@pytest.fixture
def no_request(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where the engine gets a row to compute."""

    def refuse(self: LLMEngine, request_id: object, *arguments: object, **more: object) -> None:
        raise AssertionError(f"{request_id} is computed")

    monkeypatch.setattr(LLMEngine, "add_request", refuse)
    yield


def rows_of(folder: Path) -> dict[str, object]:
    """The shards below a folder, of rows, of grades and of indices, and its exports. Grades are
    tables without metadata, which hold the versions of the steps that made them."""
    kept = [*folder.rglob("part-*.parquet"), *folder.rglob("export/*.jsonl")]
    return {
        str(path.relative_to(folder)): (
            pq.read_table(path).replace_schema_metadata()
            if path.parent.name == "grades"
            else path.read_bytes()
        )
        for path in sorted(kept)
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [*JOBS_HERE, "again", LAUNCHED])
def test_the_same_command_computes_nothing(
    name: str, folder: Path, no_request: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before, names = rows_of(folder / name), {path.name for path in (folder / name).iterdir()}
    assert before
    assert run(COMMANDS[name]) == (3 if name in BAD_ROWS else 0), capsys.readouterr()
    assert rows_of(folder / name) == before
    left = {path.name for path in (folder / name).iterdir()}
    assert left - {".lock"} == names - {".lock"}, "pipelines had none"


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [name for name in JOBS_HERE if name != "demo"])
def test_the_folder_s_own_configuration_computes_nothing(
    name: str, folder: Path, no_request: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows_of(folder / name)
    config = str(folder / name / "config.yaml")
    assert run([config]) == (3 if name in BAD_ROWS else 0), capsys.readouterr()
    assert rows_of(folder / name) == before


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["choices", "graded", "until", "nano_sdar"])
def test_grades_made_again_are_equal(name: str, folder: Path, no_request: None) -> None:
    parts = sorted((folder / name / "grades").glob("part-*.parquet"))
    before = [pq.read_table(path).replace_schema_metadata() for path in parts]
    assert run(["grade", name]) == 0  # the steps may have other versions now
    stamps = [path.stat().st_mtime_ns for path in parts]
    assert run(["grade", name]) == 0
    assert [path.stat().st_mtime_ns for path in parts] == stamps, "graded again by the same steps"
    for path in parts:
        path.unlink()
    assert run(["grade", name]) == 0
    assert [pq.read_table(path).replace_schema_metadata() for path in parts] == before


def close(one: object, other: object) -> bool:
    """Whether two values are equal, and log-probabilities in them up to what a CPU of another make
    rounds differently: 3.4e-5 at most was seen, since logits reach 30 and are sums in float32."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-4)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other


def first_difference_on_any_cpu(
    again: pa.Table, stored: pa.Table, names: Sequence[str]
) -> str | None:
    """What `first_difference` says of the columns that are not close."""

    def is_close(name: str) -> bool:
        here, there = again[name], stored[name]
        return here.type == there.type and close(here.to_pylist(), there.to_pylist())

    return first_difference(again, stored, [name for name in names if not is_close(name)])


@pytest.fixture
def audit_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited_job, "first_difference", first_difference_on_any_cpu)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["choices", "graded", "until", "reader"])
def test_rows_computed_again_are_equal(
    name: str, folder: Path, audit_on_any_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", name, "--rows", "1", "--seed", "1"]) == 0, capsys.readouterr()
    assert "1 of 1 row" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_all_rows_computed_again_are_equal(
    name: str, folder: Path, audit_on_any_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", name, "--rows", "100"]) == 0, capsys.readouterr()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["demo", "choices"])
def test_a_lock_made_now_says_the_same(name: str, folder: Path, tmp_path: Path) -> None:
    old, new = folder / f"{name}.lock", tmp_path / f"{name}.lock"
    assert run(["lock", name, "-o", str(new)]) == 0
    proofs = [yaml.safe_load(path.read_text())["proof"] for path in (old, new)]
    assert proofs[0] == proofs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"), [("demo", ["solve", "second", "rate"]), ("choices", [""])]
)
def test_a_lock_is_rebuilt(
    name: str, steps: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows are those of the old folder, and the comparison says which steps equal it to the
    bit: on a CPU of the make that wrote the folder, all of them."""
    code = run(["rebuild", f"{name}.lock", f"output.dir={tmp_path}", "--yes"])
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    differ = []
    for step in steps:
        parts = [(folder / name).glob(f"{step}*/data/*.parquet" if step else "data/*.parquet")]
        parts.append((tmp_path / step / "data").glob("*.parquet"))
        there, here = (pq.read_table(sorted(paths)) for paths in parts)
        assert here.schema.names == there.schema.names
        names = [column for column in here.schema.names if column != "seconds"]
        assert first_difference_on_any_cpu(here, there, names) is None
        is_equal = first_difference(here, there, names) is None
        differ += [] if is_equal else [step]
        assert said[step or name].startswith("equal" if is_equal else "different: 1 of 1 shard")
    assert code == (1 if differ else 0)


@pytest.mark.thorough
def test_a_pipeline_takes_rows_from_versions_of_its_steps(
    folder: Path, tmp_path: Path, no_request: None
) -> None:
    """A step with shards of another length has another address, as those behind it have, and its
    rows have the same keys."""
    out = tmp_path / "demo"
    shutil.copytree(folder / "demo", out)
    before = {path.name for path in out.iterdir()}
    command = [*COMMANDS["demo"][:-1], f"output.dir={out}"]
    assert run([*command, "second.output.rows_per_shard=5"]) == 0
    new = {path.name for path in out.iterdir()} - before - {".lock"}
    assert sorted(name.split(".")[0] for name in new) == ["rate", "second"]
