"""Jobs with `sampling.until`: the same samples whatever runs when, and no more than are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from batchgen.util.errors import ConfigError
from tests.support.jobs.shared_jobs import in_threads
from tests.support.jobs.until_job import Rows, UntilJob, every_sample, expected, is_marked, rows_of

MOST = 8


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """MOST samples of each of 60 rows."""
    folder = tmp_path_factory.mktemp("every")
    return every_sample(UntilJob(str(folder), rows=60, most=MOST), folder / "out")


def _of(every: Rows, job: UntilJob) -> Rows:
    """The rows that a job must have."""
    rows = Rows(row for row in every if row["row_index"] < job.rows)
    return expected(rows, job.valid, job.most, lambda row: is_marked(row, job.one_of), job.width)


def _computed(job: UntilJob) -> Counter[str]:
    return Counter(Path(job.log).read_text().split())


def _data(out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((Path(out) / "data").iterdir())}


def test_rows_have_the_samples_up_to_the_last_valid_one(tmp_path: Path, every: Rows) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=40, log=str(tmp_path / "log"))
    assert job.run().exit_code == 3  # rows without a prompt
    rows = _of(every, job)
    assert rows_of(job.out) == rows
    assert {row["outcome"] for row in rows} == {"enough", "exhausted", "failed"}
    computed = _computed(job)
    kept = {f"{r['row_index']}.{r['sample_index']}" for r in rows if r["outcome"] != "failed"}
    assert set(computed) >= kept and max(computed.values()) == 1
    # While rows were left to begin, nothing was computed in vain.
    first = {name for name in set(computed) - kept if int(name.split(".")[0]) < 20}
    assert not first
    grades = {
        (row["row_index"], row["sample_index"]): row["mark"]
        for row in pq.read_table(Path(job.out) / "grades").to_pylist()
    }
    for row in rows:
        assert row["valid"] in (None, grades[row["row_index"], row["sample_index"]] == 1)


def test_rows_end_when_the_interval_is_narrow(tmp_path: Path, every: Rows) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=40, width=0.6, most=MOST, one_of=2)
    with pytest.raises(RuntimeError):
        replace(job, fail_at_step=9).run()
    for result in in_threads([job, job]):
        assert not isinstance(result, Exception)
    rows = rows_of(job.out)
    assert rows == _of(every, job)
    assert len({row["num_samples"] for row in rows if row["outcome"] == "enough"}) > 1
    assert {row["outcome"] for row in rows} == {"enough", "failed"}
    grown = replace(job, width=0.5, log=str(tmp_path / "log"), max_num_seqs=3)
    grown.run()
    assert rows_of(job.out) == _of(every, grown) != rows
    assert not {f"{r['row_index']}.{r['sample_index']}" for r in rows} & set(_computed(grown))
    whole = replace(grown, out=str(tmp_path / "whole"), max_num_seqs=30)
    whole.run()
    assert _data(job.out) == _data(whole.out)
    with pytest.raises(ConfigError, match=r"until\.width: 0\.5 → 0\.6 \(a wider interval needs"):
        job.run()
    for other in (replace(job, width=None), UntilJob(str(tmp_path / "of"), width=0.6, most=2)):
        with pytest.raises(
            ConfigError, match=r"until\.rule: .width|needs 3 samples of a row or more"
        ):
            other.run()


def _jobs(out: str) -> st.SearchStrategy[UntilJob]:
    return st.builds(
        UntilJob,
        out=st.just(out),
        rows=st.integers(1, 60),
        on_all_errors=st.just("continue"),
        rows_per_shard=st.integers(3, 70),
        max_num_seqs=st.integers(1, 40),
        valid=st.integers(1, 3),
        width=st.sampled_from([None, 0.65, 0.6]),
        most=st.integers(3, MOST),
        one_of=st.sampled_from([1, 2, 3, 7]),
    )


def _check_any(tmp: Callable[[], Path], every: Rows, draw: st.DataObject) -> None:
    """Run a job that is ended by errors, on one worker or two, to its end, and then let it grow."""
    out = tmp()
    job = draw.draw(_jobs(str(out / "out")))
    if job.max_num_seqs > MOST:  # else the row that waits for the others would not let them run
        job = replace(job, straggler=draw.draw(st.integers(-1, job.rows)))
    ends = draw.draw(st.lists(st.integers(1, 60), max_size=3))
    for steps in ends:
        try:
            replace(job, fail_at_step=steps).run()
        except RuntimeError:
            continue
        break
    if draw.draw(st.booleans()):
        for result in in_threads([job, job]):
            assert not isinstance(result, Exception)
    else:
        job.run()
    assert rows_of(job.out) == _of(every, job)
    whole = replace(job, out=str(out / "whole"), max_num_seqs=16)
    whole.run()
    assert _data(job.out) == _data(whole.out)
    grown = replace(
        job,
        log=str(out / "log"),
        valid=job.valid + draw.draw(st.integers(0, 1)),
        width=job.width and job.width - draw.draw(st.sampled_from([0, 0.05, 0.1])),
        most=min(job.most + draw.draw(st.integers(1, 2)), MOST),
        rows=min(job.rows + draw.draw(st.integers(0, 5)), 60),
    )
    before = {(row["row_index"], row["sample_index"]) for row in rows_of(job.out)}
    grown.run()
    after = _of(every, grown)
    assert rows_of(job.out) == after
    there = {f"{row}.{sample}" for row, sample in before}
    computed = set(_computed(grown)) if Path(grown.log).exists() else set()
    assert not there & computed


SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def _check(factory: pytest.TempPathFactory, every: Rows, data: Any) -> None:
    _check_any(lambda: factory.mktemp("job"), every, data)


@pytest.mark.thorough
@settings(max_examples=4, deadline=None, suppress_health_check=SLOW, phases=[Phase.generate])
@given(data=st.data())
def test_any_order_and_any_growth(
    tmp_path_factory: pytest.TempPathFactory, every: Rows, data: Any
) -> None:
    _check(tmp_path_factory, every, data)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW, phases=[Phase.generate])
@given(data=st.data())
def test_any_order_and_any_growth_often(
    tmp_path_factory: pytest.TempPathFactory, every: Rows, data: Any
) -> None:
    _check(tmp_path_factory, every, data)
