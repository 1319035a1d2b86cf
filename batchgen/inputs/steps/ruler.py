"""The row step `Ruler` makes long texts in which facts are hidden, with questions about them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.inputs.steps.ruler_texts import TASKS, RulerText, ruler_text
from batchgen.inputs.steps.table_step import BadRow, StepRow, TableStep, Taken, Tools
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Features
    from transformers import PreTrainedTokenizerBase

_LEAST = 512
"""The minimum length of a text, in tokens."""
_ROUNDS = 12
"""The maximum number of texts that are tried to find the longest one that fits."""
_FIRST = 8
"""The number of units that is tried first, which always fits into the minimum length."""


@dataclass(frozen=True, kw_only=True)
class Ruler(TableStep):
    """Makes each row a test of RULER (Hsieh et al. 2024, arXiv 2404.06654): a long text, and a
    question about what is hidden in it. Consecutive rows go through all tasks with the first of
    `lengths`, then with the next. The number of a row and the seed decide what its text says.

    The columns are `task`, `length`, `input` (text and question), `answer_prefix` (the beginning of
    the answer, for the prompt) and `outputs` (the texts that the answer must contain). The text is
    as long as possible: `length` tokens of the job's model without `reserve`. Tasks:

    - `niah_single_1`: a number among repeated sentences.
    - `niah_single_2`, `niah_single_3`: a number, or a UUID, in prose.
    - `niah_multikey_1`: one of four numbers in prose, each with its key of two words.
    - `niah_multikey_2`: a number among others, each with its key.
    - `niah_multikey_3`: the same with keys and values that are UUIDs.
    - `niah_multivalue`: the four numbers of one key, in prose.
    - `niah_multiquery`: the numbers of four keys, in prose.
    - `vt`: five variables that hold one value, in a chain of assignments.
    - `cwe`: the ten most common words of a numbered list.
    - `fwe`: the three most frequent of coded words.

    Attributes:
        tasks: the tasks to use.
        lengths: numbers of tokens for text, question, chat format and answer together.
        reserve: how many of these tokens are left for the chat format and the answer.
        seed: a different number gives different texts.
    """

    stable = True

    tasks: Sequence[str] = TASKS
    lengths: Sequence[int] = (4096,)
    reserve: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("tasks", "lengths"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ConfigError(f"tasks must be one of {', '.join(TASKS)}, got {unknown[0]!r}")
        if not self.tasks or not self.lengths:
            raise ConfigError("give at least one task and one length")
        if self.reserve < 0:
            raise ConfigError(f"reserve must be at least 0, got {self.reserve}")
        minimum = _LEAST + self.reserve
        if short := [one for one in self.lengths if type(one) is not int or one < minimum]:
            raise ConfigError(f"lengths must be whole numbers from {minimum} on: {short[0]!r}")

    def made(self, features: Features) -> Features:
        """Return the columns of a row."""
        from datasets import Features, Value
        from datasets import List as ListOf

        text = Value("string")
        return Features(
            {
                "task": text,
                "length": Value("int64"),
                "input": text,
                "answer_prefix": text,
                "outputs": ListOf(text),
            }
        )

    def stored(self, features: Features) -> Features:
        """Return the columns that suffice to make the text again: the row's number, and the units
        of its text."""
        from datasets import Features, Value

        return Features({"ruler_index": Value("int64"), "ruler_units": Value("int64")})

    def start(self, tools: Tools) -> _Texts:
        """Start a pass at the first row. Raises ConfigError without a tokenizer."""
        if tools.tokenizer is None:
            raise ConfigError("Ruler needs a model with a tokenizer, which says how long texts are")
        return _Texts(self, tools.tokenizer)

    def restored(self, fields: Mapping[str, Any], k: int, stored: Mapping[str, Any]) -> Any:
        """Return the columns of a row, made again."""
        return self.row(stored["ruler_index"], stored["ruler_units"])

    def task_and_length(self, index: int) -> tuple[str, int]:
        """Return the task and the length of row `index`."""
        task = self.tasks[index % len(self.tasks)]
        return task, self.lengths[index // len(self.tasks) % len(self.lengths)]

    def row(self, index: int, units: int) -> dict[str, Any]:
        """Return the columns of row `index`, with a text of `units` units."""
        task, length = self.task_and_length(index)
        text = self.text(index, units)
        return {
            "task": task,
            "length": length,
            "input": text.input,
            "answer_prefix": text.answer_prefix,
            "outputs": list(text.outputs),
        }

    def text(self, index: int, units: int) -> RulerText:
        """Return the text of row `index` with `units` units: sentences, needles or words, by the
        task."""
        task, length = self.task_and_length(index)
        chance = random.Random(f"ruler {self.seed} {index} {task} {length}")
        return ruler_text(task, length, units, chance)


class _Texts:
    """A pass of `Ruler`."""

    full = False

    def __init__(self, step: Ruler, tokenizer: PreTrainedTokenizerBase) -> None:
        self._step, self._tokenizer = step, tokenizer

    def take(self, row: StepRow) -> Taken:
        units = self._units(row.index)
        fields = self._step.row(row.index, units)
        return [{**fields, "ruler_index": row.index, "ruler_units": units}]

    def close(self) -> None:
        pass

    def _units(self, index: int) -> int:
        """Return the largest number of units whose text fits; BadRow if none does.

        The search takes secant steps: from two texts it estimates the tokens of a unit, and tries
        the number of units that should fill the rest. It stays between the largest number that is
        known to fit and the smallest that is known not to.
        """
        task, length = self._step.task_and_length(index)
        limit = length - self._step.reserve
        fits, units = 0, _FIRST
        last_units, last_tokens = 0, 0
        too_many: int | None = None
        for _ in range(_ROUNDS):
            tokens = self._tokens(index, units)
            if tokens <= limit:
                fits = max(fits, units)
            else:
                too_many = units if too_many is None else min(too_many, units)
            tokens_per_unit = max((tokens - last_tokens) / (units - last_units), 0.1)
            last_units, last_tokens = units, tokens
            guess = units + int((limit - tokens) / tokens_per_unit)
            # Without an upper bound the guess may be one unit more, in case it is too small.
            low, high = fits + 1, guess + 1 if too_many is None else too_many - 1
            if low > high:
                break
            units = min(max(guess, low), high)
            if units == last_units:
                break
        if fits == 0:
            raise BadRow(f"{task}: no text fits into {limit} tokens: raise Ruler's lengths")
        return fits

    def _tokens(self, index: int, units: int) -> int:
        text = self._step.text(index, units)
        return len(self._tokenizer(text.input, add_special_tokens=False, verbose=False).input_ids)
