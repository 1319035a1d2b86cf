"""What a stop or a kill leaves of answers that are begun, and that a job goes on with them."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_jobs import SharingJob, run_jobs
from batchgen.storage.folder.job_summary import status_line
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.lease_files import BEGUN
from batchgen.storage.metrics import job_metrics
from batchgen.storage.shards.journal import Journal
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.storage.stores import object_storage
from batchgen.util.errors import JobError
from tests.support.cases import some_slow
from tests.support.jobs.job_comparison import finished_rows
from tests.support.jobs.object_files import FaultyFiles, use
from tests.support.jobs.real_job import ROWS, VOCAB, overrides, run, save_tokenizer


class Killed(Exception):
    """Stands for the end of the process."""


@dataclass
class Computed:
    """What engines have computed while `watched`."""

    tokens: int = 0
    steps: int = 0


@contextmanager
def watched(
    stop_at: int | None = None,
    kill_at: int | None = None,
    fail: Callable[[int], bool] = lambda n: False,
) -> Iterator[Computed]:
    """Count tokens; send the process a SIGINT in one step, or end it in one."""
    computed, step, close = Computed(), LLMEngine.step, LLMEngine.close

    def counted(engine: LLMEngine) -> list[RequestOutput]:
        computed.steps += 1
        if computed.steps == kill_at:
            raise Killed
        if computed.steps == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    def closed(engine: LLMEngine) -> None:
        computed.tokens += engine.generated_tokens
        close(engine)

    with patch.object(LLMEngine, "step", counted), patch.object(LLMEngine, "close", closed):
        yield computed


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    folder = tiny_model("llama", **VOCAB)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


LONG = (
    "sampling.max_new_tokens=30", "sampling.ignore_eos=true", "engine.max_num_seqs=6",
    "output.columns=[logprobs,top_logprobs]", "output.begun_every=0.001",
)  # fmt: skip


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "data").glob("*.parquet"))}


def records(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "journal").glob(f"*{BEGUN}"))


def attempts(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "metrics.json").read_text())["attempts"]
    return found


@pytest.mark.thorough
def test_a_stopped_job_goes_on_with_what_it_has_begun(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    with watched() as undisturbed:
        run(overrides(model, rows, whole, *LONG))
    computed = 0
    for stop_at in (1, 13, 35, 20):
        with watched(stop_at=stop_at) as found:
            # Without records in between, a stop writes them.
            result = run(overrides(model, rows, out, *LONG, "output.begun_every=3600"))
            assert result.exit_code == 130
        computed += found.tokens
        recorded = attempts(out)[-1]["rows_recorded"]
        assert recorded == min(6, 22 - finished_rows(out)) or stop_at == 1
        begun = f" and {recorded} begun" if recorded else ""
        assert f"Stopped with {finished_rows(out)} answers done{begun}. " in result.message
        line = status_line(open_job_reader(str(out)), "out")
        assert (f", {recorded} begun" in line) == (recorded > 0)
    assert records(out)
    with watched() as found:
        assert run(overrides(model, rows, out, *LONG)).exit_code == 0
    computed += found.tokens
    assert shards(out) == shards(whole)
    # A step that was launched and not read when the stop came.
    assert 0 <= computed - undisturbed.tokens <= 4 * 6
    told = attempts(out)
    assert sum(one["rows_begun"] for one in told) >= 6
    for one in told:
        assert (one["rows_begun"] == 0) == (one["tokens_begun"] == 0)
        assert one["tokens_begun"] <= one["generated_tokens"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["rows_begun"] == sum(one["rows_begun"] for one in told)
    assert metrics["tokens_begun"] == sum(one["tokens_begun"] for one in told)
    assert not (out / "journal").exists() and told[-1]["rows_recorded"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "strategy",
    some_slow(["ar", "ar_spec", "constraint", "until", "reasoning"], quick=["constraint"]),
)
def test_a_killed_job_goes_on_from_its_records(
    model: Path, rows: Path, tmp_path: Path, strategy: str
) -> None:
    more = {
        "ar": [],
        "ar_spec": ["strategy=ar_spec", "strategy.adaptive=false", "strategy.ngram_min=1"],
        "constraint": [
            "constraint=regex", "constraint.pattern='[ab]{15,25}'", "sampling.ignore_eos=false"
        ],
        "until": [
            "sampling.until.valid=1", "sampling.until.most=3", "sampling.n=1",
            "sampling.until.where='row.text is lower'",
        ],
        "reasoning": ["output.reasoning_end=a", "sampling.stop=[zz]"],
    }[strategy]  # fmt: skip
    more = [*LONG, *more]
    if strategy == "ar_spec":
        more.append("output.columns=[logprobs]")
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(overrides(model, rows, whole, *more))
    rng, kills = random.Random(len(strategy)), 0
    while True:
        with watched(kill_at=rng.randint(8, 30)):
            try:
                run(overrides(model, rows, out, *more))
            except Killed:
                kills += 1
                continue
        break
    assert kills > 2
    told = attempts(out)
    assert sum(one["rows_begun"] for one in told) > 0
    if strategy != "ar_spec":  # of drafts its rows say what depends on the schedule
        assert shards(out) == shards(whole)
    columns = ["row_id", "sample_index", "text", "token_ids", "finish_reason"]
    found, expected = (list(JobFolderReader(path).rows(columns)) for path in (out, whole))
    assert found == expected


@pytest.mark.thorough
def test_files_of_records_do_not_pile_up(model: Path, rows: Path, tmp_path: Path) -> None:
    """A later attempt makes those of an earlier one superfluous."""
    out = tmp_path / "out"
    for number in range(6):
        with watched(kill_at=8), pytest.raises(Killed):
            run(overrides(model, rows, out, *LONG, "engine.max_num_seqs=2"))
        assert 1 <= len({name.split(".")[1] for name in records(out)}) <= 2, number


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["sampling.seed=4", "sampling.max_new_tokens=40"])
def test_nothing_goes_on_with_other_tokens(
    model: Path, rows: Path, tmp_path: Path, change: str
) -> None:
    """Before a row is finished, a folder can become that of another job."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    with watched(stop_at=20):
        run(overrides(model, rows, out, *LONG))
    assert JobFolderReader(out).end == 0 and records(out)
    with watched(stop_at=20):
        run(overrides(model, rows, out, *LONG, change))
    with watched():
        run(overrides(model, rows, out, *LONG, change))
    run(overrides(model, rows, whole, *LONG, change))
    assert shards(out) == shards(whole)
    assert attempts(out)[-1]["rows_begun"] == 6


def test_no_records_on_request(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with watched(stop_at=20):
        run(overrides(model, rows, out, *LONG, "output.begun_every=0"))
    assert not records(out)


@pytest.mark.thorough
def test_a_full_disk_costs_the_records_alone(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def full(*_: Any) -> None:
        raise JobError("cannot write it: No space left on device")

    with patch.object(OutputWriter, "write_begun", full):
        assert run(overrides(model, rows, out, *LONG)).exit_code == 0
    assert capsys.readouterr().err.count("unfinished answers are no longer recorded") == 1


@pytest.mark.thorough
def test_damaged_records_are_passed_over(model: Path, rows: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(overrides(model, rows, whole, *LONG))
    rng = random.Random(0)
    for _ in range(4):
        with watched(kill_at=15), pytest.raises(Killed):
            run(overrides(model, rows, out, *LONG))
        for path in (out / "journal").glob(f"*{BEGUN}"):
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 64
            path.write_bytes(content[: rng.randrange(len(content))])
    assert run(overrides(model, rows, out, *LONG)).exit_code == 0
    assert shards(out) == shards(whole)


@pytest.mark.thorough
def test_a_job_in_an_object_store_goes_on(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the machine on which it was begun."""
    files = FaultyFiles()
    use(monkeypatch, files)
    monkeypatch.setattr(job_metrics, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(object_storage, "SYNC_SECONDS", 0.0)
    whole, url = tmp_path / "whole", "s3://jobs/a"
    run(overrides(model, rows, whole, *LONG))
    computed, sync = 0, Journal.sync

    def unless_forced(journal: Journal, force: bool = False) -> None:
        if not force:
            sync(journal)
            journal._storage._wait()  # type: ignore[attr-defined]

    for kill_at in (15, 25, 35):
        with (
            watched(kill_at=kill_at) as found,
            pytest.raises(Killed),
            patch.object(Journal, "sync", unless_forced),
        ):
            run(overrides(model, rows, url, *LONG))
        computed += found.tokens
        there = [name for name in files.store if name.endswith(BEGUN)]
        assert len(there) > 6, "no piece was ended"
    with watched() as found:
        run(overrides(model, rows, url, *LONG))
    start = "jobs/a/data/"
    data = {n.removeprefix(start): c for n, c in files.store.items() if n.startswith(start)}
    assert data == shards(whole)
    metrics = json.loads(files.store["jobs/a/metrics.json"])
    assert metrics["rows_begun"] >= 12 and metrics["tokens_begun"] > 150
    assert not [name for name in files.store if name.endswith(BEGUN)]


@pytest.mark.thorough
def test_jobs_that_share_an_engine_go_on(model: Path, rows: Path, tmp_path: Path) -> None:
    names = {"first": "sampling.seed=1", "second": "sampling.seed=2"}

    def run_both(out: Path) -> dict[str, JobResult]:
        jobs = {}
        for name, seed in names.items():
            config = compose({}, overrides(model, rows, out / name, *LONG, seed))
            jobs[name] = SharingJob(config, resolve_job(config))
        build: Any = jobs["first"].parts.build_engine
        return run_jobs(jobs, build)

    run_both(tmp_path / "whole")
    for stop_at in (15, 22):
        with watched(stop_at=stop_at):
            results = run_both(tmp_path / "out")
        assert {result.exit_code for result in results.values()} == {130}
    run_both(tmp_path / "out")
    for name in names:
        assert shards(tmp_path / "out" / name) == shards(tmp_path / "whole" / name)
    told = [one for name in names for one in attempts(tmp_path / "out" / name)]
    assert sum(one["rows_begun"] for one in told) >= 6
    for name in names:
        timeline = json.loads((tmp_path / "out" / name / "metrics.json").read_text())["timeline"]
        assert all(point[2] >= 0 for point in timeline), timeline


@pytest.mark.thorough
def test_nothing_is_recorded_while_all_rows_fail(model: Path, rows: Path, tmp_path: Path) -> None:
    """What was wrong may be mended, and must leave no trace."""
    out = tmp_path / "out"
    bad = json.dumps({"id": "bad", "q": None})
    rows.write_text("\n".join([bad, rows.read_text()]))
    with watched(stop_at=15):
        run(overrides(model, rows, out, *LONG))
    assert not records(out)
