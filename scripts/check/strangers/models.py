"""Attacks by the files of a model."""

from __future__ import annotations

from strangers.attack import Attack

ATTACKS: tuple[Attack, ...] = ()
