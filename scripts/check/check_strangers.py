"""Attack the built command as strangers would: with their folders, data sets, models and pages.

    python scripts/check/check_strangers.py [WORD …]

Each attack runs `batchgen` as a process of its own, with a folder, a job file, rows or a model that
somebody hostile has made, and looks at what became of it. A line is printed for each; the exit code
is 1 if one got through. With words, only attacks whose names hold one of them run. docs/security.md
says what is to hold. Attacks are functions in the modules of strangers/, one for each kind of thing
that strangers make; a new one goes to the list at the end of its module.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from strangers import disks, folders, models, rows
from strangers.attack import Attack, Work

ATTACKS: tuple[Attack, ...] = (*folders.ATTACKS, *rows.ATTACKS, *disks.ATTACKS, *models.ATTACKS)


def name(attack: Attack) -> str:
    """What an attack is called: the first line of its docstring."""
    assert attack.__doc__ is not None
    return attack.__doc__.splitlines()[0].rstrip(".")


def main() -> int:
    """Run the attacks that are asked for; returns the exit code."""
    words = sys.argv[1:]
    chosen = [a for a in ATTACKS if not words or any(word in name(a) for word in words)]
    through = 0
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        for number, attack in enumerate(chosen):
            path = Path(folder, f"{number:02}")
            path.mkdir()
            began = time.monotonic()
            found = attack(Work(path, Path(folder)))
            through += found is not None
            outcome = "held" if found is None else f"GOT THROUGH: {found}"
            print(f"{name(attack)}: {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{len(chosen)} attacks, {through} got through")
    return 1 if through or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
