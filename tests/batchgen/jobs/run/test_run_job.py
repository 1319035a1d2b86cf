"""Whole jobs with a fake engine: what they write, refuse, survive and report."""

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.request_params import derive_seed
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.shards.journal import Journal
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.request_id import RequestId
from tests.support.jobs.fake_job import (
    BAD_PROMPT,
    BAD_REQUEST,
    MEMORY,
    FakeEngine,
    FakeJob,
    FakeSource,
    outcome,
)
from tests.support.jobs.job_comparison import compare_outputs


def _job(out: Path, **fields: Any) -> FakeJob:
    return FakeJob(str(out), **fields)


def _run(job: FakeJob, build: Callable[[], FakeEngine]) -> JobResult:
    return execute_job(job.config(), replace(job.parts(), port=build))


def _not_built() -> FakeEngine:
    raise AssertionError("the engine was built")


def _rows(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "data").iterdir())
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def _metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize("rows_per_shard", [1, 7, 16, 1000])
@pytest.mark.parametrize("samples", [1, 3])
def test_every_sample_of_every_row_once_and_in_order(
    tmp_path: Path, rows_per_shard: int, samples: int
) -> None:
    job = _job(tmp_path, rows=40, samples=samples, rows_per_shard=rows_per_shard)
    assert job.run().exit_code == 3
    assert len(list((tmp_path / "data").iterdir())) == -(-40 // rows_per_shard)
    found = _rows(tmp_path)
    keys = [(row["row_index"], row["sample_index"]) for row in found]
    assert keys == [(i, s) for i in range(40) for s in range(samples)]
    for row in found:
        index, sample = row["row_index"], row["sample_index"]
        assert (row["row_id"], row["question"]) == (f"id{index}", f"q{index}")
        if index % BAD_PROMPT == 0:
            error = {"type": "template_error", "message": f"row {index} has no prompt"}
        elif index % BAD_REQUEST == 0:
            message = f"request {index}.{sample} can never run"
            error = {"type": "kv_cache_too_small", "message": message}
        else:
            seed = derive_seed(0, row["row_id"], sample)
            request_id = RequestId("", index, sample)
            expected = outcome(request_id, [index, index + 1, 2], RequestParams(seed=seed))
            assert row["error"] is None
            assert row["token_ids"] == expected.token_ids
            assert row["logprobs"] == expected.columns["logprobs"].tolist()
            continue
        assert row["error"] == error and row["text"] is None


def test_shards_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    for size in (1, 3, 64):
        _job(tmp_path / str(size), max_num_seqs=size, rows=60).run()
    for size in (3, 64):
        for path in (tmp_path / "1/data").iterdir():
            assert path.read_bytes() == (tmp_path / f"{size}/data" / path.name).read_bytes()


def test_the_output_loads_everywhere(tmp_path: Path) -> None:
    _job(tmp_path / "out").run()
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["train"] and loaded["train"].num_rows == 200
    assert loaded["train"][3]["token_ids"] == _rows(tmp_path / "out")[3]["token_ids"]
    assert loaded["train"].features["top_logprobs"].feature.length == 2
    frame = pd.read_parquet(tmp_path / "out/data")
    assert list(frame["row_index"]) == [i for i in range(100) for _ in range(2)]


def test_card_config_metrics(tmp_path: Path) -> None:
    result = _job(tmp_path).run()
    card = (tmp_path / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    files = [{"split": "train", "path": "data/*.parquet"}]
    assert header["configs"] == [{"config_name": "default", "data_files": files}]
    assert "200 answers" in card and "16 template_error" in card and "`num_prompt_tokens`" in card
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["sampling"]["n"] == 2 and config["strategy"]["_target_"] == "fake.Strategy"
    metrics = _metrics(tmp_path)
    errors = {"template_error": 16, "kv_cache_too_small": 10}
    assert (metrics["status"], metrics["rows"], metrics["errors"]) == ("complete", 200, errors)
    assert sum(metrics["finish_reasons"].values()) == 200
    found = _rows(tmp_path)
    assert metrics["generated_tokens"] == sum(row["num_generated_tokens"] for row in found)
    (attempt,) = metrics["attempts"]
    assert attempt["generated_tokens"] == metrics["generated_tokens"]
    assert attempt["engine"]["steps"] > 0 and attempt["peak_rss_mib"] > 10
    assert attempt["memory"] == asdict(MEMORY)
    for text in ("200", "error 26", "template_error 16", "tokens/s", str(tmp_path)):
        assert text in result.message
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".lock", "README.md", "config.yaml", "cost", "data", "manifest.json", "metrics.json")
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("why", ["", "this CPU rounds as it likes"])
def test_the_user_learns_where_rows_depend_on_the_batch(tmp_path: Path, why: str) -> None:
    result = _job(tmp_path, batch_dependence=why).run()
    assert _metrics(tmp_path)["attempts"][0]["batch_dependence"] == (why or None)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["batch_dependence"] == (why or None)
    assert ("may depend on the other rows of its batch" in result.message) == bool(why)
    assert why in result.message


def test_a_complete_job_computes_nothing(tmp_path: Path) -> None:
    job = _job(tmp_path, bad=False)
    assert job.run().exit_code == 0
    before = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    result = _run(job, _not_built)
    assert result.exit_code == 0 and "complete already; nothing was computed" in result.message
    del before[".lock"]
    assert before == {
        p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"
    }


def test_only_error_rows(tmp_path: Path) -> None:
    class AllBad(Prompt):
        def token_ids(self, row: object) -> list[int]:
            raise batch_error

    from batchgen.engine.interface.outputs import RequestError

    batch_error = RequestError("missing_field", "no question")
    job = _job(tmp_path, rows=49, on_all_errors="continue")
    result = execute_job(job.config(), replace(job.parts(), prompt=AllBad()))
    assert result.exit_code == 3 and result.error_rows == 98
    assert {row["error"]["type"] for row in _rows(tmp_path)} == {"missing_field"}


def test_an_input_row_that_does_not_fit_is_an_error_row(tmp_path: Path) -> None:
    from batchgen.engine.interface.outputs import RequestError

    class OddSource(FakeSource):
        def passthrough(self, row: Any) -> dict[str, Any]:
            if row.index == 3:
                raise RequestError("bad_row", "column 'number' is not int64")
            return super().passthrough(row)

    job = _job(tmp_path, rows=5, bad=False)
    source: Any = OddSource(5)
    assert execute_job(job.config(), replace(job.parts(), source=source)).error_rows == 2
    row = _rows(tmp_path)[6]
    assert row["error"]["type"] == "bad_row" and row["row_id"] == "id3" and row["number"] is None


def test_no_rows_at_all(tmp_path: Path) -> None:
    job = _job(tmp_path / "out", rows=0)
    assert _run(job, _not_built).exit_code == 0
    (path,) = (tmp_path / "out/data").iterdir()
    assert pq.read_metadata(path).num_rows == 0 and "logprobs" in pq.read_schema(path).names
    assert _run(job, _not_built).exit_code == 0


def test_prompts_leave_room_for_the_answer(tmp_path: Path) -> None:
    job = _job(tmp_path / "a", rows=3, bad=False, on_all_errors="continue")
    execute_job(job.config(), replace(job.parts(), max_model_len=16 + 2))  # prompts have 3 tokens
    assert {row["error"]["type"] for row in _rows(tmp_path / "a")} == {"prompt_too_long"}
    parts = replace(job.parts(), max_model_len=16, port=_not_built)
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens=16 leaves no room"):
        execute_job(job.config(), parts)


def test_the_window_bounds_what_is_in_flight(tmp_path: Path) -> None:
    most = 0

    class Watched(FakeEngine):
        def step(self) -> list[RequestOutput]:
            nonlocal most
            most = max(most, len(self._running))
            return super().step()

    job = _job(tmp_path, rows=300)
    _run(job, lambda: Watched(job))
    assert most == 2 * job.max_num_seqs


def test_a_straggler_holds_up_no_other_shard(tmp_path: Path) -> None:
    published = 0

    class Watched(FakeEngine):
        def step(self) -> list[RequestOutput]:
            nonlocal published
            if len(self._running) == 2:  # only the straggler's samples are left
                deadline = time.monotonic() + 10
                while published < 9 and time.monotonic() < deadline:
                    published = len(list((tmp_path / "data").iterdir()))
            return super().step()

    job = _job(tmp_path, rows=160, straggler=1, bad=False)
    assert _run(job, lambda: Watched(job)).exit_code == 0
    assert published == 9  # all but the straggler's own
    assert len(_rows(tmp_path)) == 320


def test_a_broken_engine_stops_the_job_and_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _job(tmp_path / "whole").run()
    job = _job(tmp_path / "out", log=str(log), fail_at_step=20)
    with pytest.raises(RuntimeError, match="fell off the bus") as error:
        job.run()
    assert "run the same command to resume" in error.value.__notes__[0]
    assert _metrics(tmp_path / "out")["status"] == "failed"
    finished = len(log.read_text().splitlines())
    assert finished > 10
    assert _job(tmp_path / "out", log=str(log)).run().exit_code == 3
    computed = log.read_text().splitlines()
    assert len(computed) == len(set(computed))  # nothing twice
    compare_outputs(tmp_path / "whole", tmp_path / "out")
    statuses = [attempt["status"] for attempt in _metrics(tmp_path / "out")["attempts"]]
    assert statuses == ["failed", "complete"]


@pytest.mark.parametrize("refused", ["seed", "dataset", "foreign", "file", "column"])
def test_refused_before_the_weights_load(tmp_path: Path, refused: str) -> None:
    out = tmp_path / "out"
    job = _job(out, rows=20)
    parts = replace(job.parts(), port=_not_built)
    if refused in ("seed", "dataset"):
        job.run()
    before = _rows(out) if (out / "data").exists() else None
    if refused == "seed":
        job, message = replace(job, temperature=0.5), r"sampling\.temperature: 1\.0 → 0\.5"
    elif refused == "dataset":
        source: Any = FakeSource(21, changed=7)
        message = (
            r"dataset: 20 rows → 21 rows; the first finished row that differs is row 7 "
            r"\(id 'id7'\) \(counted"
        )
        parts = replace(parts, source=source)
    elif refused == "foreign":
        out.mkdir()
        (out / "precious").touch()
        message = r"holds files that do not belong to a batchgen job \(precious\)"
    elif refused == "file":
        out.touch()
        message = "cannot be written"
    else:
        odd: Any = FakeSource(20)
        odd.schema = FakeSource.schema.append(FakeSource.schema.field(0).with_name("stop"))
        parts, message = replace(parts, source=odd), r"'stop' .*\[question,number,tags\]"
    with pytest.raises(ConfigError, match=message):
        execute_job(job.config(), parts)
    assert before is None or before == _rows(out)


def test_overwrite_starts_anew_only_for_another_job(tmp_path: Path) -> None:
    _job(tmp_path, rows=20).run()
    other = _job(tmp_path, rows=20, temperature=0.5, overwrite=True)
    assert other.run().exit_code == 3
    assert len(_metrics(tmp_path)["attempts"]) == 1
    assert _run(other, _not_built).exit_code == 3


class _FullDisk:
    """Fails the n-th write of any kind from now on, and all later ones, with ENOSPC."""

    def __init__(self, patch: pytest.MonkeyPatch, writes_left: int) -> None:
        self.left = writes_left
        for owner, name in (
            (os, "write"),
            (os, "fsync"),
            (pq.ParquetWriter, "write_table"),
            (pq.ParquetWriter, "close"),
            (Path, "rename"),
            (Path, "write_bytes"),
        ):
            patch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a writer's __del__
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_at_any_write(tmp_path: Path, every: int) -> None:
    fields: dict[str, Any] = {"rows": 12, "rows_per_shard": 4, "max_num_seqs": 4}
    _job(tmp_path / "whole", **fields).run()
    failed = 0
    while True:
        out = tmp_path / f"full at {failed}"
        job = _job(out, **fields)
        with pytest.MonkeyPatch.context() as patch:
            _FullDisk(patch, failed)
            try:
                job.run()
                break
            except (JobError, ConfigError) as error:
                assert "No space left on device" in str(error)
        assert job.run().exit_code == 3
        compare_outputs(tmp_path / "whole", out)
        failed += every
    assert failed > 40


def test_finished_rows_are_safe_when_the_disk_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(tmp_path / "out", log=str(tmp_path / "log"), rows=60)
    append, calls = Journal.append, 0

    def failing(self: Journal, shard: int, batch: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise JobError("cannot write x: No space left on device")
        append(self, shard, batch)

    monkeypatch.setattr(Journal, "append", failing)
    with pytest.raises(JobError, match="No space left") as error:
        job.run()
    assert "Finished rows are safe" in error.value.__notes__[0]
    monkeypatch.undo()
    before = len((tmp_path / "log").read_text().splitlines())
    job.run()
    assert _metrics(tmp_path / "out")["attempts"][1]["rows_resumed"] > 0
    computed = (tmp_path / "log").read_text().splitlines()
    # Only what had finished in the very step whose write failed is computed again.
    assert len(computed) - len(set(computed)) <= job.max_num_seqs < before


def _peak_rss(parts: ResolvedJob, job: FakeJob) -> tuple[float, float]:
    """Highest resident MiB in the first tenth of the rows and over all of them."""
    peaks: list[float] = []

    class Sampled(FakeEngine):
        def step(self) -> list[RequestOutput]:
            if self.stats.steps % 10 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                peaks.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            return super().step()

    execute_job(job.config(), replace(parts, port=lambda: Sampled(job)))
    return max(peaks[: len(peaks) // 10]), max(peaks)


@pytest.mark.thorough
def test_memory_is_flat(tmp_path: Path) -> None:
    job = _job(tmp_path, rows=20_000, samples=1, rows_per_shard=500, max_num_seqs=256, bad=False)
    tenth, all_of_it = _peak_rss(job.parts(), job)
    assert all_of_it < 1.1 * tenth, f"{tenth:.0f} MiB at 10%, {all_of_it:.0f} MiB at 100%"
