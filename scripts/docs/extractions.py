"""Generates docs/reference/extractions.md for `reference.py`: what the extraction steps return for
sample texts, compared with the answers that a person finds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batchgen.evals.graders.extract import Extract
from batchgen.evals.graders.parse_score import ParseScore
from batchgen.evals.graders.step import AnswerRow

_TEXTS = Path(__file__).with_name("extractions.yaml")
_ANSWERS = Path(__file__).with_name("smollm2_answers.jsonl")
"""Answers of SmolLM2-135M-Instruct (Q4_1) to the first 200 questions of GSM8K's test part, asked
as `+experiment=gsm8k` does, greedy, after 108 tokens; with the number that a person who has read a
text says it gives as its answer, or null."""
_STEPS = {"Extract": (Extract, "answer"), "ParseScore": (ParseScore, "score")}
_NUMBERS: dict[str, Any] = {"methods": ["boxed", "last_number"]}
_OF_MODEL: Sequence[tuple[str, dict[str, Any]]] = (
    ("Extract", _NUMBERS),
    ("Extract", {"methods": ["boxed"]}),
    ("Extract", {"methods": ["letter"], "letters": "ABCD"}),
    ("Extract", {"methods": ["letter"], "letters": "ABCDEFGHIJ"}),
    ("ParseScore", {"low": 1, "high": 5}),
)
"""What is tried on the answers of the model. They have numbers alone: no box, letter or score."""
_SHOWN = 80
_HEAD = """# Which answer is found

What `Extract` finds in a text, by its methods, and which score `ParseScore` reads.
`batchgen --help post` has all keys, and [Right answers](same_answers.md) says which answers count
as the same. An empty cell means that no answer is found: the answer is marked wrong (`Extract`), or
the row has no score. `⏎` is a line break.

"""
_TABLE = """
A person labelled the answer of each text before a step read it. *Precision* is the share of found
answers that are right, *recall* the share of texts with an answer in which it is found. Invented
texts were written for these rules, and a test requires that the steps find what the person found.
They show what the rules are, not how often a model's answers fit them.

| step | source | texts | with an answer | found | right | precision | recall |
|---|---|---|---|---|---|---|---|"""
_OF_ANSWERS = """## Answers of a model

200 answers of SmolLM2-135M-Instruct to questions of GSM8K, as `+experiment=gsm8k` asks them, cut
after 108 tokens: 13 say what their answer is. They show what cut texts do: `last_number` takes a
number of a calculation that has not ended, and an exam says how many answers were cut. The ends of
the 13, and what `[boxed, last_number]` finds in them:

| end of the text | found | the person |
|---|---|---|"""


@dataclass
class Tally:
    """How often a step extracts an answer from texts, and how often the right one."""

    texts: int = 0
    answered: int = 0
    found: int = 0
    right: int = 0

    def add(self, wanted: str | None, found: str | None) -> None:
        """Count one text."""
        self.texts += 1
        self.answered += wanted is not None
        self.found += found is not None
        self.right += found is not None and found == wanted

    def cells(self) -> list[str]:
        """Return the figures as table cells."""
        shares = [f"{self.right / of:.1%}" if of else "–" for of in (self.found, self.answered)]
        return [*map(str, (self.texts, self.answered, self.found, self.right)), *shares]


def groups() -> list[dict[str, Any]]:
    """Return the texts for each step with its options; each text has the answer that a person
    finds."""
    found: list[dict[str, Any]] = yaml.safe_load(_TEXTS.read_text(encoding="utf-8"))
    return found


def model_answers() -> list[tuple[str, str | None]]:
    """Return the model's answers, each with the final answer that a person finds in it."""
    rows = [json.loads(line) for line in _ANSWERS.read_text(encoding="utf-8").splitlines()]
    return [(row["text"], row["answer"]) for row in rows]


def answers(group: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Return, for each text of a group, the part or value that the step extracts."""
    make, name = _STEPS[group["step"]]
    step = make(**group["options"])
    for text, _ in group["texts"]:
        found = step.apply(AnswerRow(text, {}, {}))[name]
        yield text, f"{found:g}" if isinstance(found, float) else found


def _groups_of_model() -> Iterator[dict[str, Any]]:
    """The texts of the model for each step that is tried on them."""
    for step, options in _OF_MODEL:
        numbers = options == _NUMBERS
        texts = [[text, said if numbers else None] for text, said in model_answers()]
        yield {"step": step, "options": options, "texts": texts}


def tallies() -> Iterator[tuple[str, str, Tally]]:
    """Return each step with its options, the source of its texts, and how often it is right."""
    sources = {"invented": groups(), "SmolLM2": [*_groups_of_model()]}
    for source, each in sources.items():
        for group in each:
            tally = Tally()
            for (_, wanted), (_, found) in zip(group["texts"], answers(group), strict=True):
                tally.add(wanted, found)
            yield _title(group), source, tally


def extractions_page() -> str:
    """Return the text of docs/reference/extractions.md."""
    counts = list(tallies())
    invented = sum(tally.texts for _, source, tally in counts if source == "invented")
    real = len(model_answers())
    lines = [f"{_HEAD}{invented + real} texts: {invented} invented, {real} of a model.", _TABLE]
    lines += [f"| {step} | {source} | {' | '.join(c.cells())} |" for step, source, c in counts]
    parts = ["\n".join(lines)]
    for group in groups():
        lines = [f"## {_title(group)}", "", "| text | answer |", "|---|---|"]
        lines += [f"| {_cell(text)} | {_cell(answer)} |" for text, answer in answers(group)]
        parts.append("\n".join(lines))
    first = next(_groups_of_model())
    lines = [_OF_ANSWERS]
    for (text, wanted), (_, found) in zip(first["texts"], answers(first), strict=True):
        if wanted is not None:
            end = "…" + text.strip()[-_SHOWN:]
            lines.append(f"| {_cell(end)} | {_cell(found)} | {_cell(wanted)} |")
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"


def _title(group: dict[str, Any]) -> str:
    options = ", ".join(f"{key}: {_value(value)}" for key, value in group["options"].items())
    return f"`{group['step']}: {{{options}}}`"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    plain = str(value)
    return plain if plain.isalnum() else f"'{plain}'"


def _cell(text: str | None) -> str:
    """Return a text as code in a table cell."""
    if not text:
        return "" if text is None else "empty"
    marks = "``" if "`" in text else "`"
    pad = " " if text[0] in " `" or text[-1] in " `" else ""
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"{marks}{pad}{shown}{pad}{marks}"
