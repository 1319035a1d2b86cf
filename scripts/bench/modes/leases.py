"""The mode leases of bench_job_layer.py: what the leases of shards cost."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from batchgen.config.workers_config import WorkersConfig
from batchgen.leases.lease_files import mark_name
from batchgen.leases.store_operations import Create
from batchgen.workers.worker import Worker

CALLS = {"Create": 4, "Overwrite": 2, "Read": 1, "Names": 1, "Same": 1}
"""Calls of the file system per operation: a made object is created, written, linked, unlinked."""


def add_lease_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where to make a folder for it")


def run_leases(options: argparse.Namespace) -> list[Any]:
    """Time many simulated workers, each of which does nothing but take shards.

    Each worker is a thread with its own view of the folder, its own heartbeat and a null engine: a
    shard is done as soon as it is taken. They all run at once, so this is a job whose shards take
    no time, the worst case for leases.
    """
    shards, count = options.shards, options.workers
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

    joined, operations = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="bench_leases", dir=options.folder) as temporary:
        folder = Path(temporary)
        for name in ("data", "journal"):
            (folder / name).mkdir()
        config = WorkersConfig(heartbeat=15.0, stale_after=60.0)
        workers = [Worker(folder, config, 1) for _ in range(count)]
        for worker in workers:
            joined.update(worker.store.operations)
            worker.store.operations.clear()
        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
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
    return [{"seconds": seconds, "operations_per_shard": per_shard, "cpu_s_per_shard": cpu}]
