"""What leases cost: many simulated workers, each of which does nothing but take shards.

    python scripts/bench/bench_leases.py [--shards 1000] [--workers 64] [--folder /some/file/system]

Each worker is a thread with its own view of the folder (`workers.worker.Worker`), its own heartbeat
and a null engine: a shard is done as soon as it is taken. They all run at once, so this is a job
whose shards take no time, the worst case for leases. Printed are the seconds per shard, the
operations per shard on the file system, and which share of a shard of one minute that is.
"""

from __future__ import annotations

import argparse
import collections
import shutil
import tempfile
import threading
import time
from pathlib import Path

from batchgen.config.workers_config import WorkersConfig
from batchgen.leases.lease_files import mark_name
from batchgen.leases.store_operations import Create
from batchgen.workers.worker import Worker

CALLS = {"Create": 4, "Overwrite": 2, "Read": 1, "Names": 1, "Same": 1}
"""Calls of the file system per operation: a made object is created, written, linked, unlinked."""


def run(folder: Path, shards: int, count: int) -> None:
    for name in ("data", "journal"):
        (folder / name).mkdir()
    config = WorkersConfig(heartbeat=15.0, stale_after=60.0)
    workers = [Worker(folder, config, 1) for _ in range(count)]
    joined = collections.Counter[str]()
    for worker in workers:
        joined.update(worker.store.operations)
        worker.store.operations.clear()
    taken: list[int] = []
    spent: list[float] = []

    def work(worker: Worker) -> None:
        worker.begin(set(), shards)
        while True:
            started = time.thread_time()
            task = worker.next_task(idle=True)
            if task.kind in ("shard", "backup"):
                if task.kind == "shard":
                    taken.append(task.shard)
                worker.store.do(Create(mark_name(task.shard, "done"), b"{}"))
                worker.has_completed(task.shard)
            spent.append(time.thread_time() - started)
            if task.kind == "over":
                return
            if task.kind == "wait":
                time.sleep(0.05)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    operations = collections.Counter[str]()
    for worker in workers:
        operations.update(worker.store.operations)
        worker.end("complete")
    assert sorted(taken) == list(range(shards)), "a shard was taken twice, or never"
    calls = sum(CALLS[kind] * n for kind, n in operations.items())
    print(f"{shards} shards, {count} workers, {seconds:.1f} s in all")
    print(f"to join: {sum(joined.values()) / count:.1f} operations per worker")
    per_shard = {kind: round(n / shards, 2) for kind, n in sorted(operations.items())}
    print(f"operations per shard: {per_shard}")
    print(f"calls of the file system per shard: about {calls / shards:.1f}")
    cpu = sum(spent) / shards
    print(f"{cpu * 1e3:.2f} ms of CPU per shard: {cpu / 60:.4%} of a shard of one minute")


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the leases of shards.")
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where to make a folder for it")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_leases", dir=args.folder))
    try:
        run(folder, args.shards, args.workers)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
