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
"""Answers of SmolLM2-135M-Instruct (Q4_1) to the first 200 questions of GSM8K's test part, asked as
`+experiment=gsm8k` does, decoded greedily and cut after 108 tokens. Each has the number that a
person who read it found as its answer, or null."""
_STEPS = {"Extract": (Extract, "answer"), "ParseScore": (ParseScore, "score")}
"""The class of each step, and the column that it makes."""
_NUMBERS: dict[str, Any] = {"methods": ["boxed", "last_number"]}
_MODEL_STEPS: Sequence[tuple[str, dict[str, Any]]] = (
    ("Extract", _NUMBERS),
    ("Extract", {"methods": ["boxed"]}),
    ("Extract", {"methods": ["letter"], "letters": "ABCD"}),
    ("Extract", {"methods": ["letter"], "letters": "ABCDEFGHIJ"}),
    ("ParseScore", {"low": 1, "high": 5}),
)
"""The steps and options that are applied to the model's answers. These have only numbers as
answers, so the right result of the other options is that there is no answer."""
_SHOWN = 80
"""Characters of a model's answer that the page shows, from its end."""
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
        """Count one text: `wanted` is the answer that a person found, and `found` the step's."""
        self.texts += 1
        self.answered += wanted is not None
        self.found += found is not None
        self.right += found is not None and found == wanted

    def cells(self) -> list[str]:
        """Return the figures as table cells."""
        shares = [f"{self.right / of:.1%}" if of else "–" for of in (self.found, self.answered)]
        return [*map(str, (self.texts, self.answered, self.found, self.right)), *shares]


def groups() -> list[dict[str, Any]]:
    """Return the groups of invented texts. A group has a `step`, its `options`, and `texts`: pairs
    of a text and the answer that a person found in it (None: there is none)."""
    content: list[dict[str, Any]] = yaml.safe_load(_TEXTS.read_text(encoding="utf-8"))
    return content


def model_answers() -> list[tuple[str, str | None]]:
    """Return the model's answers, each with the number that a person found in it."""
    rows = [json.loads(line) for line in _ANSWERS.read_text(encoding="utf-8").splitlines()]
    return [(row["text"], row["answer"]) for row in rows]


def answers(group: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield each text of a group with the answer that the step extracts from it."""
    step_class, column = _STEPS[group["step"]]
    step = step_class(**group["options"])
    for text, _ in group["texts"]:
        answer = step.apply(AnswerRow(text, {}, {}))[column]
        yield text, f"{answer:g}" if isinstance(answer, float) else answer


def _groups_of_model() -> Iterator[dict[str, Any]]:
    """Yield groups, as `groups` returns them, of the model's answers for each step of
    `_MODEL_STEPS`."""
    for step, options in _MODEL_STEPS:
        numbers = options == _NUMBERS
        texts = [[text, number if numbers else None] for text, number in model_answers()]
        yield {"step": step, "options": options, "texts": texts}


def tallies() -> Iterator[tuple[str, str, Tally]]:
    """Yield each step with its options, the source of its texts, and how often it is right."""
    sources = {"invented": groups(), "SmolLM2": [*_groups_of_model()]}
    for source, groups_of_source in sources.items():
        for group in groups_of_source:
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
    lines += [f"| {step} | {source} | {' | '.join(t.cells())} |" for step, source, t in counts]
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
    """Return a step as a job file has it: `Extract: {methods: [boxed]}`, as Markdown code."""
    options = ", ".join(f"{key}: {_value(value)}" for key, value in group["options"].items())
    return f"`{group['step']}: {{{options}}}`"


def _value(value: Any) -> str:
    """Write an option's value in YAML, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    plain = str(value)
    return plain if plain.isalnum() else f"'{plain}'"


def _cell(text: str | None) -> str:
    """Return a text as code in a Markdown table cell; nothing for None."""
    if not text:
        return "" if text is None else "empty"
    marks = "``" if "`" in text else "`"
    pad = " " if text[0] in " `" or text[-1] in " `" else ""
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"{marks}{pad}{shown}{pad}{marks}"
