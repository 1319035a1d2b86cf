"""Accepts vLLM's names of keyword arguments for ours, and refuses unknown ones with a
suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

SAME = {
    "SamplingParams": {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"},
    "LLM": {
        "max_num_batched_tokens": "max_batched_tokens",
        "enable_prefix_caching": "prefix_caching",
        "async_scheduling": "overlap",
        "tensor_parallel_size": "tensor_parallel",
    },
    "call": {
        "sampling_params": "params",
        "use_tqdm": "progress",
        "chat_template_kwargs": "template_kwargs",
        "lora_request": "lora",
    },
}
"""For parameters, engines and calls: names of vLLM → those of ours that mean the same."""


@dataclass(frozen=True)
class KeywordNames:
    """The keywords that a function takes besides those that it declares.

    Attributes:
        same: maps names of vLLM's to those of ours that mean the same.
        elsewhere: maps names that belong to another function to what to write instead.
    """

    function: str
    keywords: Collection[str]
    same: Mapping[str, str]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def ours(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords under our names. Raises ValueError if one is unknown, or two mean the same
        and differ."""
        ours: dict[str, Any] = {}
        typed: dict[str, str] = {}
        for name, value in keywords.items():
            key = self.same.get(name, name)
            if key not in self.keywords:
                raise ValueError(self._unknown(name))
            if key in ours and ours[key] != value:
                raise ValueError(
                    f"{self.function}: {typed[key]} and {name} mean the same and differ: give one"
                )
            ours[key], typed[key] = value, name
        return ours

    def _unknown(self, name: str) -> str:
        if name in self.elsewhere:
            return f"{self.function}: {name} is not an argument: {self.elsewhere[name]}"
        known = [
            *self.keywords,
            *(name for name, name_here in self.same.items() if name_here in self.keywords),
        ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"choose among {', '.join(sorted(self.keywords))}"
        )
        return f"{self.function} has no argument {name!r}: {hint}"
