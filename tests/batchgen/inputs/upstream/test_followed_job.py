"""Jobs that read a job which still runs, against the same jobs over the complete one."""

from __future__ import annotations

import itertools
import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.upstream.open_source import open_source
from batchgen.jobs.run.run_job import execute_job, job_turns
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.signals import JobStopped, StopSignals
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.following_job import EXTRACT, STEPS, FollowingJob, Unfolding, written

CHOICES: dict[str, dict[str, Any]] = {
    "samples": {},
    "where": {"where": "num_generated_tokens > 7", "errors": "keep"},
    "best": {"rows": "best", "best": "answer|length", "where": "answer is not none"},
    "rows": {"rows": "rows", "where": "grades.answer != '3'"},
    "limit": {"limit": 33},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete graded job of 45 rows with two samples each, in shards of six rows."""
    out = tmp_path_factory.mktemp("whole") / "draft"
    job = FakeJob(str(out), rows=45, rows_per_shard=6)
    execute_job(replace(job.config(), post=(EXTRACT,)), job.parts())
    return out


def followed(
    job: FollowingJob, unfolding: Unfolding, order: list[str], kills: list[int], delay: int
) -> None:
    """Run a job while what it reads appears in some order, and stop it after some turns."""
    hidden, turns_left = iter(order), iter(kills)
    is_ended = False
    for _ in range(100):
        with StopSignals() as signals:
            turns = job_turns(job.config(), parts := job.parts(), signals)
            for turn in (
                itertools.count() if (left := next(turns_left, None)) is None else range(left)
            ):
                try:
                    next(turns)
                except StopIteration:
                    parts.close()
                    return
                if not is_ended and turn % (delay + 1) == delay:
                    name = next(hidden, None)
                    unfolding.end() if name is None else unfolding.show(name)
                    is_ended = name is None
            with pytest.raises(StopIteration):
                turns.throw(JobStopped())
            parts.close()
    raise AssertionError("the job does not end")


@pytest.fixture(autouse=True)
def _look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.inputs.upstream.job_source._LOOK_SECONDS", 0.0)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("choice", "steps"), [("samples", []), ("best", STEPS)])
def test_a_followed_job_gives_the_rows_of_the_complete_one(
    whole: Path, tmp_path: Path, choice: str, steps: list[dict[str, Any]]
) -> None:
    _compare(whole, tmp_path, choice, steps, order=[], kills=[9, 20], delay=2)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    choice=st.sampled_from(sorted(CHOICES)),
    steps=st.sampled_from([[], STEPS[:1], STEPS]),
    order=st.permutations(
        [f"{folder}/part-{n:05d}.parquet" for n in range(8) for folder in ("data", "grades")]
    ),
    kills=st.lists(st.integers(1, 40), max_size=6),
    delay=st.integers(0, 6),
)
def test_neither_the_order_of_shards_nor_kills_change_a_row(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, choice: str,
    steps: list[dict[str, Any]], order: list[str], kills: list[int], delay: int,
) -> None:  # fmt: skip
    _compare(whole, tmp_path_factory.mktemp("example"), choice, steps, order, kills, delay)


def _compare(
    whole: Path, folder: Path, choice: str, steps: list[dict[str, Any]],
    order: list[str], kills: list[int], delay: int,
) -> None:  # fmt: skip
    keys = CHOICES[choice]
    unfolding = Unfolding(whole, folder / "draft")
    names = order or unfolding.parts()
    assert sorted(names) == sorted(unfolding.parts())
    first = [name for name in names if name.endswith("00000.parquet")]
    for name in first:  # whose columns are known from then on
        unfolding.show(name)
    log = folder / "log"
    job = FollowingJob(
        str(unfolding.folder), str(folder / "judge"), {**keys, "follow": True}, steps, log=str(log)
    )
    followed(job, unfolding, [name for name in names if name not in first], kills, delay)
    alone = replace(job, out=str(folder / "alone"), keys=keys, log="")
    execute_job(alone.config(), alone.parts())
    assert written(job.out) == written(alone.out)
    assert [len(written(out, "rows")) > 0 for out in (job.out, alone.out)] == [len(steps) > 0] * 2
    manifests = [json.loads(Path(out, "manifest.json").read_text()) for out in (job.out, alone.out)]
    for manifest in manifests:
        del manifest["history"], manifest["growing"]["dataset.path"]
    assert manifests[0] == manifests[1]
    assert "follow: false" in Path(job.out, "config.yaml").read_text()
    computed = log.read_text().splitlines()
    assert len(computed) == len(set(computed))  # a stop that is clean computes nothing twice


def test_a_shard_waits_for_its_grades_if_they_are_read(whole: Path, tmp_path: Path) -> None:
    unfolding = Unfolding(whole, tmp_path / "draft")
    unfolding.show("data/part-00000.parquet")
    unfolding.show("data/part-00001.parquet")
    base = FollowingJob(str(unfolding.folder), str(tmp_path / "out"), {"follow": True})
    assert (open_source(base.config()).num_ready or 0) > 0
    graded = replace(base, keys={"follow": True, "where": "answer != '7'"})
    source: Any = open_source(graded.config())
    assert (source.num_ready, source.num_rows) == (0, None)
    unfolding.show("grades/part-00001.parquet")
    assert not source.learn()
    unfolding.show("grades/part-00000.parquet")
    assert source.learn() and len(source.ends) == 2


def test_grades_that_nobody_makes_are_not_waited_for(whole: Path, tmp_path: Path) -> None:
    """The job is complete, and was graded by other steps, or in part."""
    unfolding = Unfolding(whole, tmp_path / "draft")
    for name in unfolding.parts():
        unfolding.show(name)
    unfolding.end()
    keys = {"follow": True, "where": "answer != '7'"}
    job = FollowingJob(str(unfolding.folder), str(tmp_path / "out"), keys)
    job.parts()
    (unfolding.folder / "grades/part-00000.parquet").unlink()
    refused = pytest.raises(ConfigError, match=r"draft cannot be used \(some are missing.*grade")
    with refused, StopSignals() as signals:
        deque(job_turns(job.config(), job.parts(), signals), maxlen=0)
    config = unfolding.folder / "config.yaml"
    unfolding.show("grades/part-00000.parquet")
    config.write_text(config.read_text().replace("([0-9]+)$", "([0-8]+)$"))
    refused = pytest.raises(ConfigError, match=r"belong to other steps or rows\): run `batchgen")
    with refused, StopSignals() as signals:
        deque(job_turns(job.config(), job.parts(), signals), maxlen=0)


def test_what_cannot_be_followed_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    for path in (("a", "b"), "out/*", "s3://bucket/a"):
        with pytest.raises(ConfigError, match="after: complete"):
            DatasetConfig(kind="job", path=path, follow=True)
    with pytest.raises(ConfigError, match=r"dataset\.follow must be false"):
        DatasetConfig(kind="files", path="a", follow=True)
    unfolding = Unfolding(whole, tmp_path / "draft")
    job = FollowingJob(str(unfolding.folder), str(tmp_path / "out"), {"follow": True})
    with pytest.raises(ConfigError, match=r"no shard of .* is finished"):
        open_source(job.config())
    unfolding.show("data/part-00000.parquet")
    config = unfolding.folder / "config.yaml"
    config.write_text(config.read_text().replace("- Extract:", "- _target_: mine.Step\n  options:"))
    with pytest.raises(ConfigError, match=r"graded by mine\.Step"):
        open_source(job.config())


def test_a_shard_that_changes_stops_the_job(whole: Path, tmp_path: Path) -> None:
    unfolding = Unfolding(whole, tmp_path / "draft")
    unfolding.show("data/part-00000.parquet")
    job = FollowingJob(str(unfolding.folder), str(tmp_path / "out"), {"follow": True})
    source: Any = open_source(job.config())
    other = FakeJob(str(tmp_path / "other"), rows=6, rows_per_shard=6, changed=3)
    execute_job(other.config(), other.parts())
    (unfolding.folder / "data/part-00000.parquet").write_bytes(
        Path(other.out, "data/part-00000.parquet").read_bytes()
    )
    with pytest.raises(JobError, match="has changed while it was read"):
        list(source.rows())


def test_a_job_whose_choice_leaves_nothing_says_so_when_the_other_is_complete(
    whole: Path, tmp_path: Path
) -> None:
    unfolding = Unfolding(whole, tmp_path / "draft")
    for name in unfolding.parts():
        unfolding.show(name)
    keys = {"follow": True, "where": "number > 99"}
    job = FollowingJob(str(unfolding.folder), str(tmp_path / "out"), keys)
    source: Any = open_source(job.config())
    assert source.num_rows is None
    unfolding.end()
    with pytest.raises(ConfigError, match=r"no row of .* is left"):
        source.learn()
