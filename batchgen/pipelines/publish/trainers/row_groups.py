"""Groups rows that belong together, such as the samples of one input row, and forms pairs in
them."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import IO, Any

import numpy as np


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A row of a group.

    Attributes:
        key: the key that the rows of its group share.
        score: None if it has none.
        content: its exported content, as JSON values.
    """

    key: str
    score: float | None
    content: dict[str, Any]


def adjacent_groups(members: Iterable[GroupMember]) -> Iterator[list[GroupMember]]:
    """Yield groups from rows in which equal keys stand together."""
    for _, group in groupby(members, key=lambda one: one.key):
        yield list(group)


def scattered_groups(members: Iterable[GroupMember]) -> Iterator[list[GroupMember]]:
    """Yield groups from rows in any order, ordered by each group's first row.

    The contents of rows wait in a temporary file; 32 bytes per row are in memory.
    """
    keys, starts = bytearray(), array("q", [0])
    with tempfile.TemporaryFile(prefix="batchgen-export-") as file:
        for one in members:
            keys += blake2b(one.key.encode(), digest_size=16).digest()
            line = json.dumps([one.key, one.score, one.content], default=str).encode()
            file.write(line)
            starts.append(starts[-1] + len(line))
        if not keys:
            return
        digests = np.frombuffer(bytes(keys), np.uint64).reshape(-1, 2)
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable
        ordered = digests[order]
        is_first = np.append(True, np.any(ordered[1:] != ordered[:-1], axis=1))
        groups = np.split(order, np.flatnonzero(is_first)[1:])
        groups.sort(key=lambda rows: int(rows[0]))
        for rows in groups:
            yield [_read(file, starts[row], starts[row + 1]) for row in rows.tolist()]


def _read(file: IO[bytes], start: int, stop: int) -> GroupMember:
    file.seek(start)
    return GroupMember(*json.loads(file.read(stop - start)))


def pairs(
    scores: Sequence[float | None], same: Sequence[object], gap: float, limit: int
) -> list[tuple[int, int]]:
    """Up to `limit` pairs (better, worse) of the members of a group whose scores differ by at least
    `gap`, and differ at all, and that are not the `same`.

    Pairs of members that are in few pairs yet come first, then those that are farther apart, then
    those whose members come first. So the result depends on the order alone.
    """
    candidates = [
        (b - a, i, j)
        for i, b in enumerate(scores)
        for j, a in enumerate(scores)
        if a is not None and b is not None and b > a and b - a >= gap and same[i] != same[j]
    ]
    candidates.sort(key=lambda one: (-one[0], one[1], one[2]))
    used = [0] * len(scores)
    taken: list[tuple[int, int]] = []
    while candidates and len(taken) < limit:
        best = min(
            range(len(candidates)), key=lambda at: used[candidates[at][1]] + used[candidates[at][2]]
        )
        _, i, j = candidates.pop(best)
        used[i] += 1
        used[j] += 1
        taken.append((i, j))
    return taken
