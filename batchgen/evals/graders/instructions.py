"""The post step `Instructions`, which checks whether a response follows the instructions of its
prompt.

    instruction_id_list ["punctuation:no_comma"], kwargs [{}], text "Yes, sir"  →  mark 0.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.evals.graders.step import AnswerRow, Column, GradeFailure, TextStep
from batchgen.evals.instructions.follows_instruction import follows_instruction
from batchgen.util.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Instructions(TextStep):
    """Checks the instructions of IFEval and IFBench, by programs and without a judge.

    `mark` is 1 if the response follows all instructions as it is (strict). `mark_loose` also
    accepts the response without its first or last line, or without asterisks. The share of all
    instructions that are followed is sum(num_followed) / sum(num_instructions).

    `batchgen.follows_instruction` checks one instruction. Rows with instructions on languages have
    a grade_error if the package langdetect is missing (pip install 'batchgen[evals]'); once it is
    installed, `batchgen grade` computes their grades. Two instructions of IFBench need taggers
    (words:start_verb, words:odd_even_syllables): their rows have a grade_error, too.

    Attributes:
        instructions: the column with the ids of each row's instructions, such as
            `punctuation:no_comma`.
        kwargs: the column with the arguments of each of them, in the same order.
        prompt: the column with the prompt, which a response may have to repeat; null if there is
            none.
        prefix: put before the names of the columns.
    """

    version = 1
    isolated = False

    instructions: str = "instruction_id_list"
    kwargs: str = "kwargs"
    prompt: str | None = "prompt"
    prefix: str = ""

    @property
    def columns(self) -> tuple[Column, ...]:
        columns = (
            Column("mark", "float64", "1 if the response follows all instructions, 0 if not"),
            Column(
                "mark_loose",
                "float64",
                (
                    "like mark, but also counted if the response follows them without its first or "
                    "last line or its asterisks"
                ),
            ),
            Column("num_instructions", "int32", "the instructions of the row"),
            Column("num_followed", "int32", "how many of them the response follows"),
            Column(
                "num_followed_loose",
                "int32",
                "how many it follows by the looser rule of mark_loose",
            ),
            Column(
                "not_followed",
                "strings",
                "the ids of the instructions that it does not follow, by the rule of mark",
            ),
        )
        return tuple(Column(self.prefix + c.name, c.kind, c.meaning) for c in columns)

    @property
    def field_names(self) -> tuple[str, ...]:
        prompt = () if self.prompt is None else (self.prompt,)
        return (self.instructions, self.kwargs, *prompt)

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        ids, all_kwargs = row.fields[self.instructions], row.fields[self.kwargs]
        prompt = None if self.prompt is None else row.fields[self.prompt]
        if not _are_instructions(ids, all_kwargs):
            raise GradeFailure(
                "no_target",
                f"{self.instructions} must be a list of ids, and {self.kwargs} a list of as many "
                f"objects: got {ids!r:.80} and {all_kwargs!r:.80}",
            )
        prompt = prompt if isinstance(prompt, str) else None
        verdicts = []
        for loose in (False, True):
            try:
                verdicts.append(
                    [
                        follows_instruction(
                            name, kwargs or {}, row.text, prompt=prompt, loose=loose
                        )
                        for name, kwargs in zip(ids, all_kwargs, strict=True)
                    ]
                )
            except ConfigError as error:
                raise GradeFailure("failed", str(error)) from None
            except ValueError as error:
                raise GradeFailure("bad_target", str(error)) from None
        strict, lenient = verdicts
        values = (
            float(all(strict)),
            float(all(lenient)),
            len(ids),
            sum(strict),
            sum(lenient),
            [name for name, followed in zip(ids, strict, strict=True) if not followed],
        )
        return {c.name: value for c, value in zip(self.columns, values, strict=True)}


def _are_instructions(ids: Any, kwargs: Any) -> bool:
    """Whether a row has ids of instructions, and arguments for each of them."""
    if not isinstance(ids, Sequence) or not isinstance(kwargs, Sequence) or len(ids) != len(kwargs):
        return False
    objects = all(item is None or isinstance(item, Mapping) for item in kwargs)
    return bool(ids) and objects and all(isinstance(name, str) for name in ids)
