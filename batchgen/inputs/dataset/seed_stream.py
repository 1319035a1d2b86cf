"""Which of many streams of random numbers a job draws from."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from batchgen.inputs.dataset.source import ReadJob


def depth_of(jobs: Sequence[ReadJob]) -> int:
    """How many jobs stand behind each other before the one that reads these; 0 without any."""
    return max((job.depth for job in jobs), default=0)


def stream_of(name: str | None, jobs: Sequence[ReadJob]) -> str | None:
    """The name of a job's stream: the one it was given, else by its depth, so that a judge does not
    draw the numbers of what it judges. None for the stream of jobs that read no other one."""
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
