"""Draws random row numbers for an audit."""

from __future__ import annotations

from hashlib import blake2b


def drawn_rows(total: int, count: int, seed: int) -> list[int]:
    """Draw `count` different numbers below `total`, ascending; all numbers if there are no more.
    They depend on the arguments alone."""
    if count >= total:
        return list(range(total))
    indices: set[int] = set()
    number = 0
    while len(indices) < count:
        digest = blake2b(f"{seed} {number}".encode(), digest_size=16).digest()
        indices.add(int.from_bytes(digest, "little") % total)
        number += 1
    return sorted(indices)
