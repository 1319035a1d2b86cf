"""Attacks by damaged files, and by other workers of a job."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.strangers.attack import Attack, Work

_FLIPS = 12


def _rotted(path: Path) -> Iterator[None]:
    """Flip one bit of a file after the other, all over it, each only while the body runs."""
    content = path.read_bytes()
    for number in range(_FLIPS):
        found = bytearray(content)
        found[(2 * number + 1) * len(found) // (2 * _FLIPS)] ^= 1 << (number % 8)
        path.write_bytes(found)
        yield
    path.write_bytes(content)


def _served(work: Work, path: Path, *command: str | Path) -> str | None:
    """What a verb prints of a file in which a bit has rotted, other than the right values."""
    right = work.batchgen(*command)
    for _ in _rotted(path):
        run = work.batchgen(*command)
        if run.out == right.out and run.code == right.code:
            continue  # a bit that holds no value
        if found := run.refused(path.name, "damaged", code=1):
            return found
    return None


def rotted_shard(work: Work) -> str | None:
    """A bit has rotted in a shard."""
    job = work.finished_job()
    return _served(work, job / "data/part-00000.parquet", "show", job, "--json")


def rotted_grades(work: Work) -> str | None:
    """A bit has rotted in the grades."""
    job = work.finished_job()
    return _served(work, job / "grades/part-00000.parquet", "compare", job, job)


def rotted_shard_computed_again(work: Work) -> str | None:
    """A shard has rotted, and its rows are to be computed again."""
    job = work.rows('{"q": "one"}\n{"q": "two"}\n')
    asked = ("prompt.user={{ q }}", "output.report=false")
    assert work.job(job, *asked).code == 0
    shard = work.path / "out/data/part-00000.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-20] + bytes(20))
    if found := work.job(job, *asked).refused(shard.name, "damaged", "delete it", code=1):
        return found
    shard.unlink()
    run = work.job(job, *asked)
    if run.code != 0:
        return f"exit code {run.code}: {run.text[-300:]!r}"
    return None if shard.read_bytes() == content else "the shard is another one"


def unreadable_heartbeats(work: Work) -> str | None:
    """Heartbeats and leases are empty, cut off or zeroed."""
    job = work.finished_job()
    for folder in ("workers", "leases"):
        (job / folder).mkdir()
    for number, content in enumerate((b"", b'{"worker": 2, "en', bytes(300), b"\xff" * 9, b"[]")):
        (job / f"workers/{number + 1:04d}.json").write_bytes(content)
        (job / f"leases/{number:05d}.e001.json").write_bytes(content)
        (job / f"leases/{number + 10:05d}.quarantined.json").write_bytes(content)
    for verb in ("status", "show"):
        run = work.batchgen(verb, job)
        if run.code != 0 or "Traceback" in run.err:
            return f"{verb}: exit code {run.code}: {run.err.strip()[-200:]!r}"
    return None


def deleted_folder(work: Work) -> str | None:
    """The folder of a running job is deleted."""
    out = work.path / "out"
    rows = work.rows("".join(f'{{"q": "{number}"}}\n' for number in range(20_000)))

    def delete() -> None:
        until = time.monotonic() + 100
        while time.monotonic() < until and not any(out.glob("data/*.parquet")):
            time.sleep(0.05)
        shutil.rmtree(out)

    thread = threading.Thread(target=delete)
    thread.start()
    asked = ("prompt.user={{ q }}", "output.rows_per_shard=8", "workers.heartbeat=0.2")
    run = work.job(rows, *asked)
    thread.join()
    if "rows are safe" in run.text:
        return "it calls rows safe that are gone"
    return run.refused("was deleted or replaced", code=1)


ATTACKS: tuple[Attack, ...] = (
    rotted_shard,
    rotted_grades,
    rotted_shard_computed_again,
    unreadable_heartbeats,
    deleted_folder,
)
