"""Sets how idle OpenMP threads wait on a CPU. The command `batchgen` calls `share_cores` at its
start, before torch is imported."""

import os
from collections.abc import MutableMapping

_SHORT_SPIN = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
"""How long threads spin before they sleep. GCC's OpenMP counts loop iterations (2,000 take about 50
µs), LLVM's counts milliseconds."""


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting threads spin briefly and then sleep, unless the user has configured this.

    OpenMP reads the variables when torch loads. By default, a thread spins for long, on a core that
    the awaited thread may need: two other busy processes on two cores then take most of a job's
    speed. Sleeping at once would cost a third of the speed on an idle machine
    (docs/benchmarks/jobs.md).

    Args:
        environment: the environment variables, which are changed.
    """
    if "OMP_WAIT_POLICY" not in environment and not _SHORT_SPIN.keys() & environment.keys():
        environment.update(_SHORT_SPIN)
