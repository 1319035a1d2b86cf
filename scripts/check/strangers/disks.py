"""Attacks by damaged files, and by other workers of a job."""

from __future__ import annotations

from strangers.attack import Attack

ATTACKS: tuple[Attack, ...] = ()
