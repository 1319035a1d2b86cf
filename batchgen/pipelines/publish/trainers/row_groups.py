"""Groups the rows of an export, such as the samples of one input row, and chooses preference pairs
within a group. The formats dpo and grpo use it."""

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
        key: the key of the group; equal for all its rows.
        score: the value that ranks the row; None without a value.
        content: the exported content, as JSON values.
    """

    key: str
    score: float | None
    content: dict[str, Any]


def adjacent_groups(members: Iterable[GroupMember]) -> Iterator[list[GroupMember]]:
    """Yield groups of consecutive rows with equal keys."""
    for _, group in groupby(members, key=lambda member: member.key):
        yield list(group)


def scattered_groups(members: Iterable[GroupMember]) -> Iterator[list[GroupMember]]:
    """Yield groups of rows that are in any order, sorted by each group's first row.

    The rows are stored in a temporary file; memory holds 32 bytes per row.
    """
    keys, starts = bytearray(), array("q", [0])
    with tempfile.TemporaryFile(prefix="batchgen-export-") as file:
        for member in members:
            keys += blake2b(member.key.encode(), digest_size=16).digest()
            line = json.dumps([member.key, member.score, member.content], default=str).encode()
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
    """Choose up to `limit` pairs (better, worse) of the N members of a group.

    The choice is greedy: first pairs whose members are in few pairs so far, then pairs with a
    larger difference of scores, then pairs with lower indices. It is therefore deterministic.

    Args:
        scores: [N]; members without a score are in no pair.
        same: [N]; members with equal values are never paired.
        gap: the minimum difference of scores; equal scores are never paired.

    Returns:
        Indices of members.
    """
    candidates = [
        (high - low, i, j)
        for i, high in enumerate(scores)
        for j, low in enumerate(scores)
        if low is not None
        and high is not None
        and high > low
        and high - low >= gap
        and same[i] != same[j]
    ]
    candidates.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    used = [0] * len(scores)  # the number of chosen pairs with each member

    def uses(pair: tuple[float, int, int]) -> int:
        _, i, j = pair
        return used[i] + used[j]

    chosen: list[tuple[int, int]] = []
    while candidates and len(chosen) < limit:
        best = min(candidates, key=uses)  # the first of equal ones
        candidates.remove(best)
        _, i, j = best
        used[i] += 1
        used[j] += 1
        chosen.append((i, j))
    return chosen
