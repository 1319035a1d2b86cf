"""Attacks by rows of a data set, its columns, and the templates and constraints over them."""

from __future__ import annotations

from strangers.attack import Attack

ATTACKS: tuple[Attack, ...] = ()
