"""The answer of a row that is scored."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from batchgen.engine.base.outputs import RequestError
from batchgen.prompts.prompt_tokens import TextTokens, text_bytes
from batchgen.prompts.row_templates import RowTemplate
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.dataset.source import Row


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
        columns: Collection[str],
        room: int,
    ) -> None:
        if tokenizer is None:
            raise ConfigError("prompt.answer needs a tokenizer, and the model comes without one")
        self._tokens = TextTokens(tokenizer, room)
        self._room = room
        self._template = RowTemplate("prompt.answer", template, columns)

    def size(self, row: Row) -> int:
        """Return the bytes of the answer of a row."""
        return text_bytes(self._template.render(row.fields, row.index))

    def token_ids(self, row: Row) -> list[int]:
        """Return the tokens of the answer of a row. Raises RequestError (missing_field,
        template_error, empty_answer, answer_too_long) for a row that has none."""
        text = self._template.render(row.fields, row.index)
        if not text:
            raise RequestError("empty_answer", "prompt.answer is empty in this row")
        try:
            ids = self._tokens.of(text, add_special_tokens=False)
        except RequestError as error:
            if error.type == "empty_prompt":
                raise RequestError("empty_answer", "the answer has no tokens") from None
            raise
        if len(ids) >= self._room:
            raise RequestError(
                "answer_too_long",
                f"the answer has {len(ids)} tokens, and prompt and answer together have at most "
                f"{self._room}: shorten it, or raise engine.max_model_len if the model allows it",
            )
        return ids
