"""The key `judge` of a pipeline's step: a model that judges the answers of another step.

`judge_values` replaces `judge` by keys of a job: the prompt of the judge, the constraint on its
output, and the `post` steps that read the output. For example, `judge: {template: simpleqa}` stands
for a prompt that asks for A, B or C, a constraint to these letters, and a step that turns A into
mark 1. Keys that the step sets itself take precedence; `--cfg job` prints the result.
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
"""The column that says from which row of another step a row was made."""
_KEYS = ("scale", "template", "question", "target", "low", "high")
_MOST_NUMBERS = 100


@dataclass(frozen=True)
class _Template:
    """A judge's prompt that comes with batchgen.

    Attributes:
        scale: the kind of judgement: a verdict (choice), a number (score), or which of two answers
            is better (pair).
        question: the column of the question; a step may name another one.
        target: the column of the correct answer; a step may name another one. None if the judge
            does not see the correct answer.
        marks: verdict → mark; None if the judge writes a number.
        pattern: the regular expression whose group is the verdict; None if the judge can only write
            the verdict.
        tokens: the most tokens that the judge may write.
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
"""Name → template. `simpleqa` is from openai/simple-evals, simpleqa_eval.py (commit 10847d1, MIT),
and `hle` from centerforaisafety/hle, hle_eval/run_judge_results.py (commit 7b6be5a, MIT). The
others are batchgen's own."""
_SCALES = {"choice": "match", "score": "score", "pair": "pair"}
"""Scale → its default template."""


def judge_values(value: Any, parents: tuple[str, ...], start: str) -> dict[str, Any]:
    """Return the keys of a job that `judge` stands for, as a nested mapping.

    Args:
        value: the value of the step's key `judge`.
        parents: the steps whose answers are judged.
        start: the path of the key for messages, such as `steps.NAME.judge`.

    Raises:
        ConfigError: the value is not a mapping of known keys, or does not fit the number of
            parents.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{start} must be a mapping, such as {{template: simpleqa}}")
    for key in value:
        if key not in _KEYS:
            guess = nearest(str(key), _KEYS)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(_KEYS)}"
            raise ConfigError(f"{start}.{key}: there is no such key: {hint}")
    name, template = _template(value, start)
    number = 2 if template.scale == "pair" else 1
    if len(parents) != number:
        steps = "two steps whose answers are compared" if number == 2 else "the step that is judged"
        raise ConfigError(f"{start}: from must name {steps}")
    return _values(name, template, value, parents, start)


def _template(values: Mapping[str, Any], start: str) -> tuple[str, _Template]:
    """Return the name and the template that the keys `template` and `scale` choose."""
    scale = values.get("scale")
    if scale is not None and scale not in _SCALES:
        raise ConfigError(f"{start}.scale must be one of {', '.join(_SCALES)}, got {scale!r:.40}")
    name = values.get("template") or _SCALES.get(str(scale))
    if name is None:
        raise ConfigError(f"{start}: give a template ({', '.join(_TEMPLATES)}) or a scale")
    if name not in _TEMPLATES:
        raise ConfigError(
            f"{start}.template must be one of {', '.join(_TEMPLATES)}, got {name!r:.40} (a text "
            "of your own: give the step prompt.user next to judge)"
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
    """Return the keys of a job for a judge with this template; `options` is the value of
    `judge`."""
    low, high = _bounds(template, options, start)
    columns = {"asked": str(options.get("question", template.question))}
    if "target" in options and template.target is None:
        raise ConfigError(f"{start}.target: the template {name} shows no right answer")
    if template.target is not None:
        columns["wanted"] = str(options.get("target", template.target))
    # The template begins with statements that set its variables. `{#- -#}` removes the line end.
    sets = [f"{{%- set {key} = row[{column!r}] %}}" for key, column in columns.items()]
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
        other = {"text": _OTHER}
        values["score"] = {"cluster": _SOURCE}  # both orders of a pair are one question
        on = {"row_id": "answer_id"}
        values["rows"] = [
            {"Join": {"from": parents[1], "on": on, "columns": other, "missing": "drop"}},
            {"Cross": {_ORDER: [*_ORDERS]}},
        ]
    return values


def _bounds(template: _Template, values: Mapping[str, Any], start: str) -> tuple[int, int]:
    """Return the lowest and the highest score."""
    low, high = values.get("low", 1), values.get("high", 5)
    if template.scale != "score" and ("low" in values or "high" in values):
        raise ConfigError(f"{start}: low and high belong to scale score")
    if type(low) is not int or type(high) is not int or not 0 < high - low <= _MOST_NUMBERS:
        raise ConfigError(f"{start}: low and high must be whole numbers, low below high")
    return low, high


def _answers(template: _Template) -> str:
    """Return the Jinja statements that set variables to the judged answers, without their
    reasoning: `given`, or `first` and `second` in the order that the row asks for."""
    after_thoughts = ".rpartition('</think>')[2].strip()"
    if template.scale != "pair":
        return f"{{%- set given = {_RESPONSE}{after_thoughts} %}}"
    original = f"({_RESPONSE}, {_OTHER})"
    swapped = f"({_OTHER}, {_RESPONSE})"
    return (
        f"{{%- set first, second = {original} if {_ORDER} == '{_ORDERS[0]}' else {swapped} %}}"
        f"{{%- set first = first{after_thoughts} %}}{{%- set second = second{after_thoughts} %}}"
    )


def _post(template: _Template, choices: list[str], low: int, high: int) -> list[dict[str, Any]]:
    """Return the `post` steps that read the judge's output."""
    if template.marks is None:
        read: dict[str, Any] = {"ParseScore": {"low": low, "high": high, "pattern": r"(\d+)"}}
        return [read, {"ChoiceScore": {"choices": choices, "prefix": "expected_"}}]
    options: dict[str, Any] = {"marks": dict(template.marks)}
    if template.pattern is not None:
        return [{"Verdict": {**options, "pattern": template.pattern}}]
    if template.scale == "pair":
        return [{"Verdict": {**options, "flip": {_ORDER: _ORDERS[1]}}}]
    return [{"Verdict": options}, {"ChoiceScore": {"choices": choices, "choice": choices[0]}}]
