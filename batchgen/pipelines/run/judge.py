"""The key `judge` of a step: a model that judges the answers of another step.

It stands for the keys of a job, which the step may replace: the prompt, what the judge may write,
and the `post` steps that read it. `--cfg job` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.config.groups.config_keys import nearest
from batchgen.util.errors import ConfigError

JUDGE = "judge"
_FOLDER = Path(__file__).with_name("judges")
_RESPONSE, _OTHER, _ORDER = "response", "other_response", "order"
_ORDERS = ("ab", "ba")
_SOURCE = "source"
"""The column that says of which answer a row is made."""
_KEYS = ("scale", "template", "question", "target", "low", "high")
_MOST_NUMBERS = 100


@dataclass(frozen=True)
class _Template:
    """A ready prompt of a judge.

    Attributes:
        question, target: the columns that it reads where the step says nothing; no target is
            shown if there is none.
        marks: the verdicts that there are.
        pattern: where the verdict stands; null for a judge who may write nothing else.
        tokens: how long the judge may write.
    """

    scale: str
    question: str
    target: str | None = None
    marks: Mapping[str, float] | None = None
    pattern: str | None = None
    tokens: int = 8


_TEMPLATES: Mapping[str, _Template] = {
    "simpleqa": _Template("choice", "problem", "answer", {"A": 1, "B": 0, "C": 0}),
    "hle": _Template(
        "choice",
        "question",
        "answer",
        {"yes": 1, "no": 0},
        r"(?i)\bcorrect\b[\s*:\"'\]]{1,9}(yes|no)\b",
        4096,
    ),
    "match": _Template("choice", "question", "answer", {"A": 1, "B": 0}),
    "score": _Template("score", "question"),
    "pair": _Template("pair", "question", None, {"A": 1, "B": 0, "C": 0.5}),
}
"""`simpleqa` is that of openai/simple-evals, simpleqa_eval.py (commit 10847d1, MIT), and `hle` that
of centerforaisafety/hle, hle_eval/run_judge_results.py (commit 7b6be5a, MIT). The others are
batchgen's own."""
_SCALES = {"choice": "match", "score": "score", "pair": "pair"}
"""Scale → the template that is taken where none is given."""


def judge_values(value: Any, parents: tuple[str, ...], start: str) -> dict[str, Any]:
    """The keys of a job that `judge` stands for.

    Args:
        parents: the steps whose answers are judged.
        start: where the key stands, for messages.

    Raises:
        ConfigError: it is no mapping of known keys, or does not fit the steps that are judged.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{start} must be a mapping, such as {{template: simpleqa}}")
    for key in value:
        if key not in _KEYS:
            guess = nearest(str(key), _KEYS)
            said = f"did you mean {guess}?" if guess else f"there are {', '.join(_KEYS)}"
            raise ConfigError(f"{start}.{key}: there is no such key: {said}")
    name, template = _template(value, start)
    wanted = 2 if template.scale == "pair" else 1
    if len(parents) != wanted:
        steps = "two steps whose answers are compared" if wanted == 2 else "the step that is judged"
        raise ConfigError(f"{start}: from must name {steps}")
    return _values(name, template, value, parents, start)


def _template(values: Mapping[str, Any], start: str) -> tuple[str, _Template]:
    scale = values.get("scale")
    if scale is not None and scale not in _SCALES:
        raise ConfigError(f"{start}.scale must be among {', '.join(_SCALES)}: {scale!r:.40}")
    name = values.get("template") or _SCALES.get(str(scale))
    if name is None:
        raise ConfigError(f"{start}: give a template ({', '.join(_TEMPLATES)}) or a scale")
    if name not in _TEMPLATES:
        raise ConfigError(
            f"{start}.template must be among {', '.join(_TEMPLATES)}: {name!r:.40} (a text of your "
            "own: give the step prompt.user beside judge)"
        )
    template = _TEMPLATES[name]
    if scale not in (None, template.scale):
        raise ConfigError(f"{start}: the template {name} is for scale {template.scale}")
    return name, template


def _values(
    name: str,
    template: _Template,
    options: Mapping[str, Any],
    parents: tuple[str, ...],
    start: str,
) -> dict[str, Any]:
    low, high = _bounds(template, options, start)
    names = {"asked": str(options.get("question", template.question))}
    if "target" in options and template.target is None:
        raise ConfigError(f"{start}.target: the template {name} shows no right answer")
    if template.target is not None:
        names["wanted"] = str(options.get("target", template.target))
    sets = [f"{{%- set {ours} = row[{column!r}] %}}" for ours, column in names.items()]
    sets.append(_answers(template))
    if template.scale == "score":
        sets.append(f"{{%- set low, high = {low}, {high} %}}")
    text = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    values: dict[str, Any] = {
        "dataset": {"text_as": _RESPONSE},
        "prompt": {"choice": "chat", "user": "".join(sets) + "{#- -#}\n" + text},
        "sampling": {"choice": "greedy", "max_new_tokens": template.tokens},
        "constraint": "none",
    }
    choices = [*(template.marks or ())] or [str(n) for n in range(low, high + 1)]
    if template.pattern is None:
        values["constraint"] = {"choice": "choice", "choices": choices, "scores": True}
    values["post"] = _post(template, choices, low, high)
    if template.scale == "pair":
        columns = {"text": _OTHER}
        values["score"] = {"cluster": _SOURCE}  # both orders of a pair are one question
        on = {"row_id": "answer_id"}
        values["rows"] = [
            {"Join": {"from": parents[1], "on": on, "columns": columns, "missing": "drop"}},
            {"Cross": {_ORDER: [*_ORDERS]}},
        ]
    return values


def _bounds(template: _Template, values: Mapping[str, Any], start: str) -> tuple[int, int]:
    """The lowest and the highest score."""
    low, high = values.get("low", 1), values.get("high", 5)
    if template.scale != "score" and ("low" in values or "high" in values):
        raise ConfigError(f"{start}: low and high belong to scale score")
    if type(low) is not int or type(high) is not int or not 0 < high - low <= _MOST_NUMBERS:
        raise ConfigError(f"{start}: low and high must be whole numbers, low below high")
    return low, high


def _answers(template: _Template) -> str:
    """The variables of the answers that are judged, behind their reasoning."""
    behind = ".rpartition('</think>')[2].strip()"
    if template.scale != "pair":
        return f"{{%- set given = {_RESPONSE}{behind} %}}"
    both = f"({_RESPONSE}, {_OTHER})"
    turned = f"({_OTHER}, {_RESPONSE})"
    return (
        f"{{%- set first, second = {both} if {_ORDER} == '{_ORDERS[0]}' else {turned} %}}"
        f"{{%- set first = first{behind} %}}{{%- set second = second{behind} %}}"
    )


def _post(template: _Template, choices: list[str], low: int, high: int) -> list[dict[str, Any]]:
    """The steps that read what the judge wrote."""
    if template.marks is None:
        read: dict[str, Any] = {"ParseScore": {"low": low, "high": high, "pattern": r"(\d+)"}}
        return [read, {"ChoiceScore": {"choices": choices, "prefix": "expected_"}}]
    options: dict[str, Any] = {"marks": dict(template.marks)}
    if template.pattern is not None:
        return [{"Verdict": {**options, "pattern": template.pattern}}]
    if template.scale == "pair":
        return [{"Verdict": {**options, "flip": {_ORDER: _ORDERS[1]}}}]
    return [{"Verdict": options}, {"ChoiceScore": {"choices": choices, "choice": choices[0]}}]
