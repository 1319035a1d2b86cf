"""What the steps that find answers give for texts, as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from batchgen.evals.graders.extract import Extract
from batchgen.evals.graders.parse_score import ParseScore
from batchgen.evals.graders.step import AnswerRow

_TEXTS = Path(__file__).with_name("extractions.yaml")
_STEPS = {"Extract": (Extract, "answer"), "ParseScore": (ParseScore, "score")}
_HEAD = """# Which answer is found

What `Extract` finds in a text, by its methods, and which score `ParseScore` reads.
`batchgen --help post` has all keys, and [Right answers](same_answers.md) says which answers count
as the same. An empty cell means that nothing is found: the answer is marked wrong (`Extract`), or
the row has no score. `⏎` is a line end."""


def groups() -> list[dict[str, Any]]:
    """The texts for each step with its options, each text with the answer that a person finds."""
    found: list[dict[str, Any]] = yaml.safe_load(_TEXTS.read_text(encoding="utf-8"))
    return found


def answers(group: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Each text of a group, and the part of it, or the value in it, that the step finds."""
    make, name = _STEPS[group["step"]]
    step = make(**group["options"])
    for text, _ in group["texts"]:
        found = step.apply(AnswerRow(text, {}, {}))[name]
        yield text, f"{found:g}" if isinstance(found, float) else found


def extractions_page() -> str:
    """docs/reference/extractions.md."""
    parts = [_HEAD]
    for group in groups():
        options = ", ".join(f"{key}: {_value(value)}" for key, value in group["options"].items())
        lines = [f"## `{group['step']}: {{{options}}}`", "", "| text | answer |", "|---|---|"]
        lines += [f"| {_cell(text)} | {_cell(answer)} |" for text, answer in answers(group)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    plain = str(value)
    return plain if plain.isalnum() else f"'{plain}'"


def _cell(text: str | None) -> str:
    """A text as code in a cell of a table."""
    if not text:
        return "" if text is None else "empty"
    marks = "``" if "`" in text else "`"
    pad = " " if text[0] in " `" or text[-1] in " `" else ""
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"{marks}{pad}{shown}{pad}{marks}"
