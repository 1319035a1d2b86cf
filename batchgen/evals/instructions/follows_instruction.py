"""Checks whether a response follows an instruction of IFEval or IFBench:
`batchgen.follows_instruction`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.evals.instructions.arguments import InstructionArguments
from batchgen.evals.instructions.ifbench_forms import FORMS, REFUSED
from batchgen.evals.instructions.ifbench_tables import TABLES
from batchgen.evals.instructions.ifbench_words import WORDS
from batchgen.evals.instructions.ifeval import IFEVAL

CHECKS = {**IFEVAL, **WORDS, **FORMS, **TABLES}
"""The checks of IFEval and of IFBench, by the ids of their instructions."""


def follows_instruction(
    instruction_id: str,
    kwargs: Mapping[str, Any],
    response: str,
    *,
    prompt: str | None = None,
    loose: bool = False,
) -> bool:
    """Whether a response follows an instruction of IFEval (Zhou et al. 2023, arXiv 2311.07911) or
    of IFBench (Pyatkin et al. 2025, arXiv 2507.02833).

    Args:
        instruction_id: such as "keywords:existence".
        kwargs: its arguments; those that are None count as missing.
        response: the generated text. An empty one follows no instruction.
        prompt: the whole prompt. Instructions to repeat the prompt read it if kwargs do not have
            the text to repeat.
        loose: also accept a response that follows it without its first or last line, without both,
            or without asterisks.

    Raises:
        ValueError: the instruction is unknown or cannot be checked by a program here, or an
            argument is missing or of another type.
        ConfigError: the package langdetect, which recognises languages, is missing.
    """
    check = CHECKS.get(instruction_id)
    if check is None:
        if instruction_id in REFUSED:
            raise ValueError(
                f"{instruction_id} cannot be checked here: it needs {REFUSED[instruction_id]}"
            )
        raise ValueError(
            f"unknown instruction {instruction_id!r:.80}; known: {', '.join(sorted(CHECKS))}"
        )
    if prompt is not None and kwargs.get("prompt_to_repeat") is None:
        kwargs = {**kwargs, "prompt_to_repeat": prompt}
    args = InstructionArguments(instruction_id, kwargs)
    versions = _versions(response) if loose else [response]
    return any(check(text, args) for text in versions if text.strip())


def _versions(response: str) -> list[str]:
    """The response, and its versions without lines or marks that may not belong to the answer."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(text.replace("*", "") for text in cut)]))
