"""Makes the prompts of rows: the token ids that the model reads before it answers.

`build_prompt` makes the `Prompt` of a job, from a text template, a conversation, token ids or
OpenAI bodies. `fit_prompt` cuts or refuses a prompt that is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from batchgen.config.groups.prompt_config import (
    OpenAIPromptConfig,
    PromptConfig,
    TextPromptConfig,
    TokensPromptConfig,
    TooLong,
)
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.dataset_columns import named_path, value_at
from batchgen.inputs.images.row_images import RowImage, RowImages
from batchgen.inputs.prompts.chat_prompt import ChatPrompt
from batchgen.inputs.prompts.chat_templates import today
from batchgen.inputs.prompts.messages import short_value
from batchgen.inputs.prompts.openai_bodies import BodyPrompt
from batchgen.inputs.prompts.prompt_tokens import TextTokens, not_empty
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_templates import RowTemplate

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Row


_MOST_SHOWN = 1000
"""The maximum number of characters of a prompt in a warning."""


class Prompt(Protocol):
    """The interface of the classes that make the prompts of rows."""

    @property
    def day(self) -> str | None:
        """The date that prompts contain, YYYY-MM-DD; None if they contain none."""
        return None

    @property
    def is_constant(self) -> bool:
        """Whether all rows get the same prompt, because no template uses a column."""
        return False

    def text(self, row: Row) -> str | None:
        """Return the text of a row's prompt; None if the row has token ids."""
        return None

    def token_ids(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt: at least one, without an upper limit.

        Raises:
            RequestError: the row has no prompt. The error's type is missing_field, template_error,
                bad_messages, bad_token_ids, empty_prompt or prompt_too_long.
        """
        ...

    def token_ids_and_images(self, row: Row) -> tuple[list[int], list[RowImage]]:
        """Return the token ids of a row's prompt, and its images. Raises RequestError as
        `token_ids`."""
        return self.token_ids(row), []


def build_prompt(
    config: PromptConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    columns: Mapping[str, Any],
    room: int | None = None,
    images: RowImages | None = None,
    day: Callable[[], str] = today,
    is_read: bool = False,
) -> Prompt:
    """Return the prompt that the configuration describes.

    Args:
        tokenizer: None if the model has none; then only token ids can be prompts.
        columns: the data set's columns with their features.
        room: the maximum number of tokens of a prompt, or None for no limit. Far longer texts are
            refused before they are tokenised.
        images: reads the images of rows; None if the model or the rows have none.
        day: returns the date that chat templates write, if the configuration names none.
        is_read: whether the model only reads prompts and generates no answer, so that no start of
            an answer is added after an assistant's last message.

    Raises:
        ConfigError: a template does not compile or uses a column that the data set lacks, or the
            model has no tokenizer or no chat template.
    """
    if isinstance(config, TokensPromptConfig):
        return TokensPrompt("prompt.token_ids_column", config.token_ids_column, vocab_size, columns)
    if tokenizer is None:
        raise ConfigError(
            f"prompt.kind={config.kind} needs a tokenizer, and the model comes without one: use "
            "prompt=tokens"
        )
    if isinstance(config, TextPromptConfig):
        return TextPrompt(config, tokenizer, columns, room)
    if isinstance(config, OpenAIPromptConfig):
        return BodyPrompt(config, tokenizer, columns, vocab_size, room, images, day, is_read)
    return ChatPrompt(config, tokenizer, columns, room, images, day, is_read)


def prompt_room(max_model_len: int, max_new_tokens: int) -> int:
    """Return the maximum number of tokens of a prompt. Raises RequestError (prompt_too_long) if the
    answer may take all tokens."""
    if max_new_tokens >= max_model_len:
        raise RequestError(
            "prompt_too_long",
            f"an answer of {max_new_tokens} tokens leaves no room for a prompt: both together have "
            f"at most {max_model_len}",
        )
    return max_model_len - max_new_tokens


def fit_prompt(
    ids: list[int], max_len: int, too_long: TooLong, bos_id: int | None = None
) -> list[int]:
    """Return a prompt of at most `max_len` tokens.

    With `truncate_left`, a longer prompt keeps its last tokens, and its first token if that is the
    BOS token, because models answer badly without it. A chat prompt may lose its system message and
    the marks of a turn.

    Raises:
        RequestError: prompt_too_long: the prompt is longer, and `too_long` is `error`.
    """
    assert max_len >= 1
    if len(ids) <= max_len:
        return ids
    if too_long == "error":
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {len(ids)} tokens, but the answer leaves room for only {max_len}: "
            "raise engine.max_model_len, lower sampling.max_new_tokens, or set "
            "prompt.too_long=truncate_left",
        )
    if ids[0] == bos_id and max_len > 1:
        return [ids[0], *ids[1 - max_len :]]
    return ids[-max_len:]


def constant_prompt_refusal(key: str, prompt: Prompt, row: Row) -> str:
    """Return the error message for a prompt that is the same for all rows, which is rarely
    intended.

    Args:
        key: the configuration key of the prompt's template.
        row: a row, whose prompt the message shows.
    """
    try:
        text = prompt.text(row) or ""
    except RequestError as error:
        text = f"({error})"
    excerpt = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
    names = list(row.fields)
    column = next((name for name in names if name in text), names[0] if names else "name")
    return (
        f"{key} uses no column, so all rows would get one and the same prompt: write {{{{ "
        f"{column} }}}} for the column {column} ({key}_file=… for the file of a template); set "
        f"prompt.constant=true if that is intended. The prompt:\n{excerpt}"
    )


class TextPrompt(Prompt):
    """Makes each prompt from one text template.

    The tokenizer adds its special tokens, such as BOS, unless `add_special_tokens` is false.
    """

    def __init__(
        self,
        config: TextPromptConfig,
        tokenizer: PreTrainedTokenizerBase,
        columns: Collection[str],
        room: int | None = None,
    ) -> None:
        assert config.text is not None
        self._tokens = TextTokens(tokenizer, room)
        self._add_special_tokens = config.add_special_tokens
        self._text = RowTemplate("prompt.text", config.text, columns)

    @property
    def is_constant(self) -> bool:
        return not self._text.uses_columns

    def token_ids(self, row: Row) -> list[int]:
        return self._tokens.of(self.text(row), add_special_tokens=self._add_special_tokens)

    def text(self, row: Row) -> str:
        return self._text.render(row.fields, row.index)


class TokensPrompt(Prompt):
    """Uses the token ids of a column unchanged.

    Args:
        key: the configuration key that names the column, for errors.
        vocab_size: token ids must be below it.
    """

    def __init__(self, key: str, column: str, vocab_size: int, columns: Mapping[str, Any]) -> None:
        self._column, self._vocab_size = column, vocab_size
        self._path = named_path(key, column, columns)

    def token_ids(self, row: Row) -> list[int]:
        ids = value_at(row.fields, self._path)
        if not isinstance(ids, list):
            raise RequestError(
                "bad_token_ids",
                f"column {self._column!r} must hold a list of integers, got {short_value(ids)}",
            )
        for position, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError(
                    "bad_token_ids",
                    f"column {self._column!r}, position {position}: {short_value(token)} is not "
                    f"an id of the model, 0 to {self._vocab_size - 1}",
                )
        return not_empty(ids)
