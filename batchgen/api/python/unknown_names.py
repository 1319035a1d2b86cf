"""Accepts vLLM's names for keyword arguments, and rejects unknown names with a suggestion. `LLM`,
its methods and `SamplingParams` use `KeywordNames`."""

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
"""vLLM's names → batchgen's names with the same meaning, for sampling parameters, the engine and
calls."""


@dataclass(frozen=True)
class KeywordNames:
    """The keyword arguments that a function accepts.

    Attributes:
        function: the function's name in error messages.
        keywords: batchgen's names.
        same: vLLM's names → batchgen's names with the same meaning.
        elsewhere: names that belong to another function → what to write instead.
    """

    function: str
    keywords: Collection[str]
    same: Mapping[str, str]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def ours(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments under batchgen's names.

        Raises:
            ValueError: a name is unknown, or two names mean the same and have different values.
        """
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
        """Return the error message for an unknown name."""
        if name in self.elsewhere:
            return f"{self.function}: {name} is not an argument: {self.elsewhere[name]}"
        candidates = [
            *self.keywords,
            *(name for name, name_here in self.same.items() if name_here in self.keywords),
        ]
        near = difflib.get_close_matches(name, candidates, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"choose among {', '.join(sorted(self.keywords))}"
        )
        return f"{self.function} has no argument {name!r}: {hint}"
