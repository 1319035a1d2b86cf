"""Derives a job's seed from its random stream, so that jobs that read each other's rows draw
different random numbers. Job set-up uses this.

A job that reads the rows of another job belongs to a *chain*; its *depth* is the number of jobs
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from batchgen.inputs.dataset.source import ReadJob


def depth_of(jobs: Sequence[ReadJob]) -> int:
    """Return the depth of a job that reads these jobs: the length of the longest chain before it; 0
    if it reads none."""
    return max((job.depth for job in jobs), default=0)


def stream_of(name: str | None, jobs: Sequence[ReadJob]) -> str | None:
    """Return the name of a job's random stream; None for the default stream, which jobs that read
    no other job use.

    Args:
        name: the name that the user has set. Without one, it is derived from the job's depth, so
            that a judge does not draw the same numbers as the job that it judges.
        jobs: the jobs whose rows are read.
    """
    depth = depth_of(jobs)
    return name if name is not None or not depth else f"depth {depth}"


def stream_seed(seed: int, stream: str | None) -> int:
    """Return the seed for a job in this stream, given the configured seed."""
    if stream is None:
        return seed
    digest = blake2b(digest_size=8, person=b"batchgen.stream")
    digest.update((seed % 2**64).to_bytes(8, "little"))
    digest.update(stream.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")
