"""Steps that run beside each other in one engine, against the same steps one after the other."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest

from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.jobs.run.shared_engine import EnginePort, SharedEngine
from batchgen.pipelines.run.open_pipeline import OpenPipeline
from batchgen.pipelines.run.step_groups import StepGroups
from batchgen.storage.stores.manifest import ROWS, Manifest
from batchgen.util.errors import ConfigError
from tests.support.jobs.pipeline_job import EXTRACT, STEPS, composed, folders, run, values, written


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps in the order of their requests, and `engine` where an engine is made."""
    found: list[str] = []
    add, build = EnginePort.add_request, OpenedJob.load

    def added(self: EnginePort, *args: Any, **more: Any) -> None:
        found.append(self.name)
        add(self, *args, **more)

    def built(self: OpenedJob) -> Any:
        found.append("engine")
        return build(self)

    def slow(self: SharedEngine) -> None:  # so that shards are there before all rows are
        time.sleep(0.02)
        step(self)

    step = SharedEngine.step
    monkeypatch.setattr(SharedEngine, "step", slow)
    monkeypatch.setattr("batchgen.evals.grades.grading_queue._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("batchgen.inputs.upstream.job_source._LOOK_SECONDS", 0.0)
    monkeypatch.setattr(EnginePort, "add_request", added)
    monkeypatch.setattr(OpenedJob, "load", built)
    return found


def given(model: Path, rows: Path, out: Path, **steps: dict[str, Any]) -> dict[str, Any]:
    """The three steps, the last of which joins its rows with those of the first one."""
    found = values(model, rows, out)
    join = {"Join": {"from": "draft", "on": "q", "columns": {"text": "again"}}}
    found["steps"]["draft"]["sampling.n"] = 1
    found["steps"]["draft"]["post"] = [{**EXTRACT, "methods": ["last_number"], "pattern": None}]
    found["steps"]["judge"]["dataset"]["where"] = "answer is none or row_id != 'r3'"
    found["steps"]["last"] = {**copy.deepcopy(STEPS["last"]), "rows": [join]}
    found["output"]["rows_per_shard"] = 2
    found["engine"]["max_num_seqs"] = 2
    for name, more in steps.items():
        found["steps"][name] |= more
    return found


def files(out: Path) -> dict[str, bytes]:
    """The shards and grades of the current folders, by step and name."""
    return {
        f"{name}/{kind}/{path.name}": path.read_bytes()
        for name, folder in folders(out).items()
        for kind in ("data", "grades")
        for path in sorted((folder / kind).glob("*.parquet"))
    }


@pytest.mark.thorough
def test_steps_with_one_model_share_an_engine_and_their_rows_are_those_of_steps_in_turn(
    model: Path,
    rows: Path,
    tmp_path: Path,
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    wait = {"after": "complete"}
    streamed = given(model, rows, tmp_path / "streamed")
    capsys.readouterr()
    assert run(written(tmp_path / "streamed.yaml", streamed)) == 0
    assert capsys.readouterr().err.count("memory: ") == 1  # of the one engine
    together = asked[:]
    asked.clear()
    in_turn = given(model, rows, tmp_path / "turn", judge=wait, last=wait)
    assert run(written(tmp_path / "turn.yaml", in_turn)) == 0
    assert [together.count("engine"), asked.count("engine")] == [1, 1]
    assert sorted(together) == sorted(asked)
    assert together.index("judge") < len(together) - together[::-1].index("draft")
    names = [name for name in asked if name != "engine"]
    assert names == sorted(names, key=["draft", "judge", "last"].index)
    found = files(tmp_path / "streamed")
    assert found == files(tmp_path / "turn") and len(found) > 9
    # What was run is a pipeline file with the same barriers.
    assert (tmp_path / "turn/pipeline.yaml").read_text().count("after: complete") == 2


@pytest.mark.slow
def test_other_models_and_engines_run_in_turn(
    model: Path, rows: Path, tmp_path: Path, asked: list[str]
) -> None:
    other = {"engine.max_num_seqs": 3}
    pipeline = given(model, rows, tmp_path / "out", judge=other, last={"sampling.seed": 3})
    assert run(written(tmp_path / "pipeline.yaml", pipeline)) == 0
    order = list(dict.fromkeys(asked))
    assert order == ["engine", "draft", "judge", "last"]
    assert [name for name in asked if name == "engine"] == ["engine"] * 3


def test_which_steps_follow_and_which_group_comes_next(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    other: dict[str, Any] = {"engine.max_num_seqs": 3, "sampling.n": 2}
    pipeline = given(model, rows, tmp_path / "out", last={"rows": []})
    pipeline["steps"]["aside"] = other
    pipeline["steps"]["both"] = {
        "from": ["draft", "judge"],
        "dataset.columns": ["q"],
        "prompt.user": "{{ q }}",
    }
    with OpenPipeline(composed(pipeline)) as opened:
        groups = StepGroups(opened)
        mine, others = groups.steps
        assert [groups.follows(name) for name in ("draft", "judge", "last", "both")] == [
            False, True, True, False,
        ]  # fmt: skip
        assert groups.is_followed("draft") and not groups.is_followed("last")
        assert groups.ready(mine, ()) == ["draft", "judge", "last"]
        assert groups.ready(mine, ("draft",)) == ["judge", "last"]
        assert groups.ready(mine, ("draft", "judge")) == ["last", "both"]
        assert groups.next(()) == mine and groups.next(("aside",)) == mine
        assert groups.next(("draft", "judge", "last", "both")) == others
        assert groups.next(("draft", "judge", "last", "both", "aside")) is None
        # A worker that comes takes the group of which others have begun less.
        manifest = Manifest.build({}, {}, growing={ROWS: 11}).text()
        for name in opened.pipeline.steps:
            folder = Path(opened.folder(name))
            (folder / "data").mkdir(parents=True)
            (folder / "leases").mkdir()
            (folder / "manifest.json").write_text(manifest)
            for shard in range(5):
                (folder / f"data/part-{shard:05d}.parquet").touch()
            if name != "aside":
                (folder / "leases/00005.e001.json").touch()
        assert groups.next(()) == others


def test_only_complete_is_a_barrier(model: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="after must be complete, got 'draft'"):
        composed(given(model, rows, tmp_path / "out", judge={"after": "draft"}))
    with pytest.raises(ConfigError, match="reads no other step"):
        composed(given(model, rows, tmp_path / "out", draft={"after": "complete"}))
    with pytest.raises(ConfigError, match="pipeline file"):
        composed(given(model, rows, tmp_path / "out"), ["judge.after=complete"])
