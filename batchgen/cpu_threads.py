"""How the threads of a CPU's products wait for each other. Imports no torch: it must come first."""

import os
from collections.abc import MutableMapping

_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait sleep, unless the user has said how they are to wait.

    OpenMP reads this when torch loads. Its own way is to spin, on a core that the awaited thread
    may need: two busy neighbours on two cores then take most of a job's speed
    (docs/performance.md).
    """
    if not any(name in environment for name in _POLICIES):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
