"""Rows that an older job has made by the same key are copied: the result is equal to the byte."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from tests.support.jobs.fake_job import FakeJob, FakeSource
from tests.support.jobs.forked import fork_server
from tests.support.jobs.job_comparison import attempts, finished_rows
from tests.support.jobs.object_files import FaultyFiles, use

ROWS = 40


def run(fake: FakeJob, older: tuple[str, ...] | None = (), **output: Any) -> JobResult:
    """Run a job that keeps keys and copies rows of the `older` folders."""
    config = fake.config()
    return execute_job(
        replace(config, output=replace(config.output, reuse=older, **output)), fake.parts()
    )


def job(out: Path, log: Path | None = None, **more: Any) -> FakeJob:
    given: dict[str, Any] = {
        "rows": ROWS,
        "rows_per_shard": 8,
        "log": "" if log is None else str(log),
    }
    return FakeJob(str(out), **(given | more))


def same_bytes(one: Path, two: Path) -> bool:
    names = sorted(path.name for path in (one / "data").iterdir())
    assert names == sorted(path.name for path in (two / "data").iterdir())
    return all((one / "data" / n).read_bytes() == (two / "data" / n).read_bytes() for n in names)


def computed(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def copied(out: Path) -> int:
    return sum(attempt["rows_copied"] for attempt in attempts(out))


def errors(rows: int = ROWS) -> int:
    return 2 * sum(i % 13 == 0 or i % 17 == 0 for i in range(rows))


def test_keys_change_no_byte_of_the_data(tmp_path: Path) -> None:
    job(tmp_path / "plain").run()
    run(job(tmp_path / "kept"))
    assert same_bytes(tmp_path / "plain", tmp_path / "kept")
    assert not (tmp_path / "plain/keys").exists() and any((tmp_path / "kept/keys").iterdir())


def test_an_equal_job_computes_nothing(tmp_path: Path) -> None:
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    run(job(old))
    result = run(job(new, log), (str(old),))
    assert same_bytes(old, new) and computed(log) == []
    assert copied(new) == 2 * ROWS - errors()
    figures = json.loads((new / "metrics.json").read_text())
    assert figures["rows_copied"] == copied(new)
    assert f"{copied(new):,} copied from older jobs" in result.message
    assert figures["attempts"][0]["generated_tokens"] == 0 < figures["generated_tokens"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_more_and_fewer_samples(tmp_path: Path, before: int, after: int) -> None:
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    run(job(old, samples=before))
    run(job(new, log, samples=after), (str(old),))
    job(tmp_path / "whole", samples=after).run()
    assert same_bytes(tmp_path / "whole", new)
    good = ROWS - errors() // 2
    assert len(computed(log)) == good * max(0, after - before)


def test_a_changed_row_alone_is_computed(tmp_path: Path) -> None:
    """As are rows that are new; those that are gone are not missed, and places may differ."""
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    run(job(old))

    class Others(FakeSource):
        """The rows from number 5 on."""

        def rows(self, start: int = 0) -> Any:
            for row in FakeSource(ROWS + 9).rows(start + 5):
                yield Row(row.index - 5, row.id, row.fields)

    fake = job(new, log, bad=False)
    config = replace(fake.config(), output=replace(fake.config().output, reuse=(str(old),)))
    parts = replace(fake.parts(), source=Others(ROWS + 4))

    class ByName(Prompt):
        def token_ids(self, row: Row) -> list[int]:
            number = int(row.id[2:])
            return [number, number + 1, 2]

    execute_job(config, replace(parts, prompt=ByName()))
    wholly = replace(fake.config(), output=replace(fake.config().output, dir=str(tmp_path / "w")))
    execute_job(wholly, replace(parts, prompt=ByName()))
    assert same_bytes(tmp_path / "w", new)
    # Nine rows were not there, and rows that had an error are computed.
    failed = sum(i % 13 == 0 or i % 17 == 0 for i in range(5, ROWS))
    assert copied(new) == 2 * (ROWS - 5 - failed)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 0),
        ({"temperature": 0.5}, 1),
        ({"constraint": {"kind": "regex", "pattern": "[a-z]+"}}, 1),
        ({"rows_per_shard": 3, "text_column": "answer", "prompt_token_ids": False}, 0),
        ({"changed": 3}, 0),  # another column of the row, and the same prompt
    ],
)
def test_what_decides_tokens_is_in_the_key(
    tmp_path: Path, changed: dict[str, Any], expected: int
) -> None:
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    run(job(old))
    run(job(new, log, **changed), (str(old),))
    job(tmp_path / "whole", **changed).run()
    assert same_bytes(tmp_path / "whole", new)
    assert len(computed(log)) == expected * (2 * ROWS - errors())


def test_a_column_that_is_missing_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    fake = job(old)
    config = replace(fake.config(), output=replace(fake.config().output, reuse=()))
    execute_job(config, replace(fake.parts(), columns=fake.parts().columns[:1]))
    run(job(new, log), (str(old), str(tmp_path / "nothing")))
    assert len(computed(log)) == 2 * ROWS - errors()
    said = capsys.readouterr().err
    assert f"no rows of {old} are copied: its rows have no column top_logprobs as this job" in said
    assert f"no rows of {tmp_path}/nothing are copied" in said


def test_retried_errors_are_computed(tmp_path: Path) -> None:
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    run(job(old))
    run(job(new, log, bad=False), (str(old),))
    job(tmp_path / "whole", bad=False).run()
    assert same_bytes(tmp_path / "whole", new) and len(computed(log)) == errors()


def test_a_damaged_folder_is_computed_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    run(job(old))
    shard = old / "data/part-00001.parquet"
    content = bytearray(shard.read_bytes())
    content[200] ^= 255
    shard.write_bytes(content)
    for path in (old / "keys").iterdir():
        if path.name.startswith("part-00002"):
            path.write_bytes(path.read_bytes()[: 36 * 5 + 7])  # a kill may tear a record
    run(job(new, log), (str(old),))
    job(tmp_path / "whole").run()
    assert same_bytes(tmp_path / "whole", new)
    assert 0 < len(computed(log)) < 2 * ROWS and "is damaged" in capsys.readouterr().err


def test_rows_of_an_unfinished_job_are_copied(tmp_path: Path) -> None:
    """Those of its journals, too."""
    old, new, log = tmp_path / "old", tmp_path / "new", tmp_path / "log"
    with pytest.raises(RuntimeError):
        run(job(old, rows_per_shard=100, fail_at_step=8))
    rows = finished_rows(old)
    assert not any((old / "data").iterdir()) and rows > 10
    run(job(new, log), (str(old),))
    job(tmp_path / "whole").run()
    assert same_bytes(tmp_path / "whole", new)
    assert len(computed(log)) == 2 * ROWS - errors() - copied(new) and copied(new) > rows / 2


def test_rows_of_a_bucket_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a job that has failed and one that is complete, into a third."""
    files, log = FaultyFiles(), tmp_path / "log"
    use(monkeypatch, files)
    old, older, new = (f"s3://jobs/{name}" for name in ("old", "older", "new"))
    with pytest.raises(RuntimeError):
        run(replace(job(tmp_path, fail_at_step=9, bad=False), out=old))
    run(replace(job(tmp_path, rows=8), out=older))
    run(replace(job(tmp_path, log, bad=False), out=new), (old, older))
    job(tmp_path / "whole", bad=False).run()
    start = "jobs/new/data/"
    written = {p: f for p, f in files.store.items() if p.startswith(start)}
    expected = {start + p.name: p.read_bytes() for p in (tmp_path / "whole/data").iterdir()}
    assert written == expected and 10 < len(computed(log)) < 2 * ROWS - 16
    assert any(path.startswith("jobs/new/keys/") for path in files.store)


def _work(fake: FakeJob, older: tuple[str, ...]) -> None:
    import os

    os._exit(run(fake, older).exit_code)


@pytest.mark.slow
def test_killed_jobs_leave_what_can_be_copied(tmp_path: Path) -> None:
    """Jobs that are killed again and again, each of which copies from those before it: nothing is
    computed twice beyond what was in flight, and two workers of the last one copy, too."""
    rng, context = random.Random(1), fork_server()
    log, kills = tmp_path / "log", 0
    folders: list[str] = []
    for version in range(4):
        out = tmp_path / f"out{version}"
        fake = job(out, log, rows_per_shard=50, step_s=0.01)
        for _ in range(2):
            process = context.Process(target=_work, args=(fake, tuple(folders[::-1])))
            process.start()
            before, deadline = len(computed(log)), time.monotonic() + 60
            while len(computed(log)) < before + 6 and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            process.join(60)
            kills += 1
        folders.append(str(out))
    assert all(0 < finished_rows(Path(folder)) < 2 * ROWS for folder in folders[:3])
    last = tmp_path / "last"
    workers = [
        context.Process(target=_work, args=(job(last, log), tuple(folders[::-1]))) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert {worker.exitcode for worker in workers} == {3}
    run(job(tmp_path / "whole"))
    assert same_bytes(tmp_path / "whole", last)
    good = 2 * ROWS - errors()
    assert good <= len(computed(log)) <= good + kills * fake.max_num_seqs
