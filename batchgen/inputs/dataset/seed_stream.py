"""Chooses a job's stream of random numbers, so that jobs of a chain draw different ones."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from batchgen.inputs.dataset.source import ReadJob


def depth_of(jobs: Sequence[ReadJob]) -> int:
    """The length of the chain of jobs before the one that reads these jobs; 0 without any."""
    return max((job.depth for job in jobs), default=0)


def stream_of(name: str | None, jobs: Sequence[ReadJob]) -> str | None:
    """The name of a job's stream: `name` if it is set, else one that follows from the job's depth,
    so that a judge does not draw the same numbers as the job that it judges. None for jobs that
    read no other one."""
    depth = depth_of(jobs)
    return name if name is not None or not depth else f"depth {depth}"


def stream_seed(seed: int, stream: str | None) -> int:
    """The seed of a job, in the stream of this name."""
    if stream is None:
        return seed
    digest = blake2b(digest_size=8, person=b"batchgen.stream")
    digest.update((seed % 2**64).to_bytes(8, "little"))
    digest.update(stream.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")
