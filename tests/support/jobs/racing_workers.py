"""Workers that make the same objects at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from batchgen.storage.leases.store_operations import Create
from batchgen.storage.stores.job_storage import Store


def winners(store_of: Callable[[str], Store]) -> list[str]:
    """Let four workers make the same fifty leases, as threads.

    Args:
        store_of: opens the store for the worker of this name, in its thread.

    Returns:
        For each lease that was made the name of its maker, which is also what the lease holds.
    """
    wins: list[str] = []

    def run(name: str) -> None:
        store = store_of(name)
        wins.extend(name for i in range(50) if store.do(Create(f"leases/{i}", name.encode())))

    threads = [threading.Thread(target=run, args=(f"w{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wins
