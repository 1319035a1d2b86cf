"""The command is attacked as strangers would: with their folders, data sets, models and pages.

    python -m pytest tests/strangers -m slow [-k WORDS]

Each attack runs `batchgen` as a process of its own, with a folder, a job file, rows or a model that
somebody hostile has made, and looks at what became of it. docs/security.md says what is to hold.
Attacks are functions in the modules of this folder, one for each kind of thing that strangers make;
a new one goes to the list at the end of its module.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.strangers import damaged_disks, hostile_folders, hostile_models, hostile_rows
from tests.support.strangers.attack import Attack, Work

ATTACKS: tuple[Attack, ...] = (
    *hostile_folders.ATTACKS,
    *hostile_rows.ATTACKS,
    *damaged_disks.ATTACKS,
    *hostile_models.ATTACKS,
)


def name(attack: Attack) -> str:
    """What an attack is called: the first line of its docstring."""
    assert attack.__doc__ is not None
    return attack.__doc__.splitlines()[0].rstrip(".")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What attacks make once."""
    return tmp_path_factory.mktemp("shared")


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=name)
def test_nothing_gets_through(attack: Attack, tmp_path: Path, shared: Path) -> None:
    assert attack(Work(tmp_path, shared)) is None
