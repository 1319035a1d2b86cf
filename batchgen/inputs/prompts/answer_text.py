"""Makes the answers of rows whose answers come from the data set and are scored, not generated.

`build_answer` is the entry point. An answer is made from a template (`AnswerText`), from a column
of token ids (`AnswerIds`), or from token ids and the steps in which a diffusion model unmasked them
(`Replay`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from batchgen.config.groups.prompt_config import (
    TAIL_IDS_COLUMN,
    TAIL_STEP_MAP_COLUMN,
    PromptConfig,
)
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.interface.trajectory import GivenAnswer, Trajectory
from batchgen.inputs.dataset.dataset_columns import named_path, value_at
from batchgen.inputs.prompts.messages import short_value
from batchgen.inputs.prompts.prompt_tokens import TextTokens
from batchgen.inputs.prompts.row_prompts import TokensPrompt
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_templates import RowTemplate

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Row


class Answer(Protocol):
    """The interface of what makes the answers of rows."""

    def of(self, row: Row) -> GivenAnswer:
        """Return the answer of a row, of at least one token. Raises RequestError (missing_field,
        template_error, bad_token_ids, bad_step_map, empty_answer, answer_too_long) for a row that
        has none."""
        ...


def build_answer(
    config: PromptConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    columns: Mapping[str, Any],
    room: int,
) -> Answer | None:
    """Return what makes the answers that the configuration describes; None if rows generate their
    answers.

    Args:
        tokenizer: None if the model has none; then only token ids can be answers.
        columns: the data set's columns with their features.
        room: the most tokens of a prompt and its answer together.

    Raises:
        ConfigError: a column is missing, or a template is wrong.
    """
    if config.answer is not None:
        return AnswerText(config.answer, tokenizer, columns, room)
    if config.answer_ids_column is None:
        return None
    ids = AnswerIds(config.answer_ids_column, vocab_size, columns, room)
    if config.answer_step_map_column is None:
        return ids
    return Replay(ids, config.answer_step_map_column, columns)


class AnswerText:
    """Makes the token ids of answers from a template. The tokenizer adds no special tokens.

    Args:
        room: the most tokens of a prompt and its answer together.

    Raises:
        ConfigError: the template does not compile or asks for a column that the data set lacks, or
            the model has no tokenizer.
    """

    def __init__(
        self,
        template: str,
        tokenizer: PreTrainedTokenizerBase | None,
        columns: Mapping[str, Any],
        room: int,
    ) -> None:
        if tokenizer is None:
            raise ConfigError("prompt.answer needs a tokenizer, and the model comes without one")
        self._tokens = TextTokens(tokenizer, room)
        self._room = room
        self._template = RowTemplate("prompt.answer", template, columns)

    def of(self, row: Row) -> list[int]:
        """Return the tokens of the answer of a row. Raises RequestError (missing_field,
        template_error, empty_answer, answer_too_long) for a row that has none."""
        text = self._template.render(row.fields, row.index)
        if not text:
            raise RequestError("empty_answer", "prompt.answer is empty in this row")
        try:
            ids = self._tokens.of(text, add_special_tokens=False)
        except RequestError as error:
            raise _of_answer(error) from None
        return _fitting(ids, self._room)


class AnswerIds:
    """The token ids that a column holds, as they are. Raises ConfigError if the data set lacks the
    column."""

    def __init__(self, column: str, vocab_size: int, columns: Mapping[str, Any], room: int) -> None:
        self._ids = TokensPrompt("prompt.answer_ids_column", column, vocab_size, columns)
        self._room = room

    def of(self, row: Row) -> list[int]:
        """The ids of a row's answer."""
        try:
            return _fitting(self._ids.token_ids(row), self._room)
        except RequestError as error:
            raise _of_answer(error) from None


class Replay:
    """Returns answers with the steps in which their tokens were unmasked, and, if the data set has
    it, the tail of their last block.

    Attributes:
        same_distribution: see `Trajectory`; for all rows.
    """

    def __init__(self, ids: AnswerIds, column: str, columns: Mapping[str, Any]) -> None:
        """Raise ConfigError if the data set lacks the column of the steps."""
        self._ids, self.same_distribution = ids, True
        self._steps = _Steps("prompt.answer_step_map_column", column, columns)
        self._tail: tuple[_Steps, _Steps] | None = None
        if TAIL_IDS_COLUMN in columns and TAIL_STEP_MAP_COLUMN in columns:
            # Neither column can be missing, so no error needs the key of the configuration.
            tail_ids = _Steps("", TAIL_IDS_COLUMN, columns)
            self._tail = tail_ids, _Steps("", TAIL_STEP_MAP_COLUMN, columns)

    def of(self, row: Row) -> Trajectory:
        """Return the trajectory that a row replays. Raises RequestError for a row that has none."""
        steps = self._steps.of(row)
        if steps is None:
            raise RequestError("bad_step_map", f"column {self._steps.column!r} is null")
        tail_ids = tail_steps = None
        if self._tail is not None:
            ids_column, steps_column = self._tail
            tail_ids, tail_steps = ids_column.of(row), steps_column.of(row)
        if (tail_ids is None) != (tail_steps is None):
            raise RequestError("bad_step_map", "one of the columns of the tail is null")
        return Trajectory(self._ids.of(row), steps, tail_ids, tail_steps, self.same_distribution)


class _Steps:
    """Reads a list of integers from a column. `key` is the key of the configuration that names the
    column, for errors."""

    def __init__(self, key: str, column: str, columns: Mapping[str, Any]) -> None:
        self.column, self._path = column, named_path(key, column, columns)

    def of(self, row: Row) -> list[int] | None:
        """Return the integers of a row; None if its cell is null."""
        values = value_at(row.fields, self._path)
        if values is None:
            return None
        if not isinstance(values, list) or any(type(one) is not int for one in values):
            raise RequestError(
                "bad_step_map",
                f"column {self.column!r} must hold a list of integers, got {short_value(values)}",
            )
        return values


def _fitting(ids: list[int], room: int) -> list[int]:
    """Return the ids, or raise RequestError if they leave no room for a prompt."""
    if len(ids) >= room:
        raise RequestError(
            "answer_too_long",
            f"the answer has {len(ids)} tokens, and prompt and answer together have at most "
            f"{room}: shorten it, or raise engine.max_model_len if the model allows it",
        )
    return ids


def _of_answer(error: RequestError) -> RequestError:
    """Reword an error about a prompt's tokens as one about an answer's."""
    if error.type != "empty_prompt":
        return error
    return RequestError("empty_answer", "the answer has no tokens")
