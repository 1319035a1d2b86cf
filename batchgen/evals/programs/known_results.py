"""A cache of the results of programs in the user's cache folder, so that no program is run
twice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b

from batchgen.evals.programs.run_program import OUTCOMES, ProgramResult
from batchgen.util.paths import user_cache
from batchgen.util.temporary import temporary_name


class KnownResults:
    """Keeps results by a key of everything that they depend on.

    If an entry is damaged or the folder cannot be used, programs run again. A program that ran out
    of time also runs again, because the machine may have been the reason.
    """

    def __init__(self) -> None:
        """Open the cache of this user."""
        self._folder = user_cache() / "programs"

    def get(self, key: str) -> ProgramResult | None:
        """The result of a key; None if it is not known."""
        try:
            known = ProgramResult(**json.loads((self._folder / key).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return known if known.outcome in OUTCOMES else None

    def put(self, key: str, result: ProgramResult) -> None:
        """Store a result."""
        if result.outcome == "timeout":
            return
        temporary = temporary_name(self._folder / key)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(json.dumps(asdict(result)), encoding="utf-8")
                temporary.replace(self._folder / key)
            finally:
                temporary.unlink(missing_ok=True)


def result_key(parts: Sequence[str | float]) -> str:
    """The key of a result that depends on these parts."""
    text = json.dumps(parts)
    return blake2b(text.encode(), digest_size=20).hexdigest()
