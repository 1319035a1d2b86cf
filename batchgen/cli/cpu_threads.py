"""Sets how OpenMP threads wait for each other on a CPU. Imports no torch, because it must run
before it."""

import os
from collections.abc import MutableMapping

_SHORT_SPIN = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
"""GCC's OpenMP counts turns of its loop (2,000 take some 50 µs), LLVM's counts milliseconds."""


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait spin shortly and then sleep, unless the user has said how to wait.

    OpenMP reads this when torch loads. Its own way is to spin for long, on a core that the awaited
    thread may need: two busy neighbours on two cores then take most of a job's speed. To sleep at
    once costs a quiet machine a third of it (docs/benchmarks/jobs.md).
    """
    if "OMP_WAIT_POLICY" not in environment and not _SHORT_SPIN.keys() & environment.keys():
        environment.update(_SHORT_SPIN)
