"""What rows cost is written beside them, whatever becomes of the job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchgen.storage.costs.chain_costs import JobCost, all_steps, cost_line
from batchgen.storage.costs.cost_files import (
    SCHEMA,
    Costs,
    cost_files,
    cost_path,
    read_costs,
    shard_costs,
)
from batchgen.storage.costs.cost_recorder import CostRecorder
from batchgen.storage.shards.shard_files import read_columns
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.util.request_id import RequestId
from tests.support.jobs.fake_job import STEP_COST, FakeEngine, FakeJob


def measured(out: Path) -> Costs:
    """The seconds of all rows of a job."""
    storage = FolderStorage(out)
    shards = {shard for shard, _ in cost_files(storage)}
    return {key: s for shard in shards for key, s in shard_costs(storage, shard).items()}


def metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


@contextmanager
def counted_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each step of the engine computes."""
    found: list[int] = []
    step = FakeEngine.step

    def counted(engine: FakeEngine) -> Any:
        found.append(engine.num_running)
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "step", counted)
        yield found


def test_every_row_has_its_seconds_and_data_are_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(str(tmp_path / "a"), rows=40)
    with counted_steps(monkeypatch) as steps:
        assert job.run().exit_code == 3
    rows = [
        (row["row_index"], row["sample_index"])
        for path in sorted((tmp_path / "a" / "data").iterdir())
        for row in read_columns(path, [*SCHEMA.names[:2], "num_prompt_tokens"]).to_pylist()
        if row["num_prompt_tokens"] is not None
    ]
    found = measured(tmp_path / "a")
    assert set(found) == set(rows)
    assert sum(found.values()) == pytest.approx(STEP_COST * sum(steps), abs=1e-6)
    assert metrics(tmp_path / "a")["device_s"] == pytest.approx(sum(found.values()))
    shutil.rmtree(tmp_path / "a" / "cost")  # whoever does without them finds all else
    assert "complete already" in job.run().message


def test_a_job_that_was_stopped_counts_all_that_was_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that fails loses no seconds but those since the last save."""
    job = FakeJob(str(tmp_path), rows=40, fail_at_step=9)
    monkeypatch.setattr(CostRecorder, "due", lambda self: True)
    with counted_steps(monkeypatch) as steps:
        with pytest.raises(RuntimeError, match="bus"):
            job.run()
        steps.pop()
        first = sum(measured(tmp_path).values())
        assert first == pytest.approx(STEP_COST * sum(steps))
        FakeJob(str(tmp_path), rows=40).run()
    assert sum(measured(tmp_path).values()) == pytest.approx(STEP_COST * sum(steps))


def test_what_is_beside_a_row_counts_for_it_and_workers_add_up(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    first, second = (CostRecorder(storage, 10, worker) for worker in (1, 2))
    first.add(
        [(RequestId("", 3, 0), 1.0), (RequestId("", 3, 0, 0), 0.5), (RequestId("", 12, 1), 2.0)]
    )
    first.save()
    first.add([(RequestId("", 3, 0, 1), 0.25)])
    second.add([(RequestId("", 3, 0), 4.0)])
    first.save()
    second.save()
    first.save()  # nothing has changed
    first.add([(RequestId("", 3, 0), 1.0)])  # the file is read again
    first.save()
    assert shard_costs(storage, 0) == {(3, 0): 6.75}
    assert read_costs(storage, cost_path(tmp_path, 1, 1)) == {(12, 1): 2.0}
    assert (first.seconds, second.seconds) == (4.75, 4.0)


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    recorder = CostRecorder(FolderStorage(tmp_path), 10, 1)
    recorder.add([(RequestId("", 3, 0), 1.0)])
    shutil.rmtree(tmp_path / "cost")
    recorder.save()
    assert not (tmp_path / "cost").exists()


def test_costs_of_a_chain_are_those_of_its_jobs_for_each_row_at_the_end() -> None:
    draft = {"device_s": 60.0, "rows": 200}
    steps = all_steps(draft, "draft")
    assert steps == [JobCost("draft", 60.0, 200)]
    read = [{"job": "draft", "device_s": 60.0, "rows": 200}] * 2
    steps = all_steps({"device_s": 3600.0, "rows": 100, "read_jobs": read}, "judge")
    assert cost_line(steps, 50) == "draft 60 s + judge 1:00:00 = 1:01:00; 73.2 s per kept row"
    line = cost_line(steps, 50, 2.0)
    assert line.endswith("= 1:01:00 (2.03); 73.2 s per kept row (40.67 for 1,000)")
    assert all_steps({"rows": 5}, "old") == []
