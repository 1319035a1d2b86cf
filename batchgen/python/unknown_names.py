"""The keyword arguments of the Python interface: our names, and those that vLLM's users type."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_OFF = (None, False)


@dataclass(frozen=True)
class Names:
    """The keywords that a function takes besides those that it declares.

    Attributes:
        same: maps names of vLLM's to those of ours that mean the same.
        refused: maps names of vLLM's that mean something else, or something that batchgen has not,
            to what to do instead.
        harmless: maps such names to values that ask for what batchgen does anyway; None and False
            always do.
    """

    function: str
    own: Collection[str]
    same: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def ours(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given keywords under our names, without harmless ones; ValueError if one is unknown
        or refused, or two mean the same and differ."""
        ours: dict[str, Any] = {}
        typed: dict[str, str] = {}
        for name, value in given.items():
            if name in self.refused:
                if not self._is_harmless(name, value):
                    raise ValueError(f"{self.function}: {name}={value!r:.60}: {self.refused[name]}")
                continue
            key = self.same.get(name, name)
            if key not in self.own:
                raise ValueError(self._unknown(name))
            if key in ours and ours[key] != value:
                raise ValueError(
                    f"{self.function}: {typed[key]} and {name} mean the same and differ: give one"
                )
            ours[key], typed[key] = value, name
        return ours

    def _is_harmless(self, name: str, value: Any) -> bool:
        # By identity or type as well: 0 equals False, and 1 equals True.
        return any(value is ok or (value == ok and type(value) is type(ok))
                   for ok in self.harmless.get(name, _OFF))  # fmt: skip

    def _unknown(self, name: str) -> str:
        known = [*self.own, *(name for name, own in self.same.items() if own in self.own)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose among {', '.join(sorted(self.own))}"
        return f"{self.function} has no argument {name!r}: {hint}"
