"""The answer of a row that is scored: a template of its text, or its token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from batchgen.config.groups.prompt_config import PromptConfig, TokensPromptConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.prompts.prompt_tokens import TextTokens
from batchgen.inputs.prompts.row_prompts import TokensPrompt
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_templates import RowTemplate

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Row


class Answer(Protocol):
    """A way to make the answers of rows."""

    def token_ids(self, row: Row) -> list[int]:
        """The tokens of the answer of a row, at least one. Raises RequestError (missing_field,
        template_error, bad_token_ids, empty_answer, answer_too_long) for a row that has none."""
        ...


def build_answer(
    config: PromptConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    columns: Mapping[str, Any],
    room: int,
) -> Answer | None:
    """The answer that the configuration describes, for rows of at most `room` tokens; None if rows
    generate. Raises ConfigError as the classes do."""
    if config.answer is not None:
        return AnswerText(config.answer, tokenizer, columns, room)
    if isinstance(config, TokensPromptConfig) and (column := config.answer_ids_column) is not None:
        return AnswerIds(column, vocab_size, columns, room)
    return None


class AnswerText:
    """Makes the token ids of answers from a template. The tokenizer adds no special tokens.

    Args:
        room: the most tokens of a row.

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

    def token_ids(self, row: Row) -> list[int]:
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

    def token_ids(self, row: Row) -> list[int]:
        """The ids of a row's answer."""
        try:
            return _fitting(self._ids.token_ids(row), self._room)
        except RequestError as error:
            raise _of_answer(error) from None


def _fitting(ids: list[int], room: int) -> list[int]:
    if len(ids) >= room:
        raise RequestError(
            "answer_too_long",
            f"the answer has {len(ids)} tokens, and prompt and answer together have at most "
            f"{room}: shorten it, or raise engine.max_model_len if the model allows it",
        )
    return ids


def _of_answer(error: RequestError) -> RequestError:
    """What is wrong with tokens, said of an answer instead of a prompt."""
    if error.type != "empty_prompt":
        return error
    return RequestError("empty_answer", "the answer has no tokens")
