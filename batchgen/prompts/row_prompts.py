"""Makes the prompt of a row: the token ids that the model reads first."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import UndefinedError
from transformers import PreTrainedTokenizerBase

from batchgen.config.prompt_config import (
    ChatPromptConfig,
    PromptConfig,
    TextPromptConfig,
    TokensPromptConfig,
    TooLong,
)
from batchgen.dataset.dataset_columns import column_path, value_at
from batchgen.engine.base.outputs import RequestError
from batchgen.prompts.chat_templates import bound_chat_templates
from batchgen.prompts.messages import checked_messages, known_roles, short
from batchgen.prompts.prompt_tokens import TextTokens, not_empty, text_bytes
from batchgen.prompts.row_templates import RowTemplate, template_errors
from batchgen.templates.template_sandbox import RENDER_ERRORS
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

if TYPE_CHECKING:
    from batchgen.dataset.source import Row


_MOST_SHOWN = 1000
"""Characters of a prompt that a warning shows."""


class Prompt(Protocol):
    """A way to make prompts of rows."""

    @property
    def is_constant(self) -> bool:
        """Whether all rows get the same prompt, because no template uses a column."""
        return False

    def text(self, row: Row) -> str | None:
        """The prompt of a row before it becomes tokens; None where it is tokens already."""
        return None

    def size(self, row: Row) -> int:
        """How much of the row goes into its prompt: bytes of text, or how many token ids.

        It costs much less than `token_ids`. Where prompts have a fixed frame, the rows with the
        larger size have the larger prompts; no text has more tokens than bytes.
        """
        return len(self.token_ids(row))

    def token_ids(self, row: Row) -> list[int]:
        """The prompt of a row, which has at least one token and any length.

        Raises:
            RequestError: the row has no prompt. The error's type is missing_field, template_error,
                bad_messages, bad_token_ids, empty_prompt or prompt_too_long.
        """
        ...


def build_prompt(
    config: PromptConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    columns: Mapping[str, Any],
    room: int | None = None,
) -> Prompt:
    """The prompt that the configuration describes.

    Args:
        tokenizer: None if the model has none; then only token ids can be prompts.
        columns: the data set's columns, and what they hold in the terms of datasets.
        room: the most tokens of a prompt, for which far longer texts are refused untokenised; None
            reads texts of any length.

    Raises:
        ConfigError: a template does not compile or asks for a column that the data set lacks,
            or the model has no tokenizer or no chat template.
    """
    if isinstance(config, TokensPromptConfig):
        return TokensPrompt(config, vocab_size, columns)
    if tokenizer is None:
        raise ConfigError(
            f"prompt.kind={config.kind} needs a tokenizer, and the model comes without one: use "
            "prompt=tokens"
        )
    if isinstance(config, TextPromptConfig):
        return TextPrompt(config, tokenizer, columns, room)
    return ChatPrompt(config, tokenizer, columns, room)


def fit_prompt(
    ids: list[int], max_len: int, too_long: TooLong, bos_id: int | None = None
) -> list[int]:
    """A prompt of at most `max_len` tokens.

    Of a longer one `truncate_left` keeps the last tokens. A BOS token at its start stays, because
    models answer badly without it. In a chat prompt the system message and the marks of a turn may
    be cut off. With `error` a longer prompt raises RequestError (prompt_too_long).
    """
    assert max_len >= 1
    if len(ids) <= max_len:
        return ids
    if too_long == "error":
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {len(ids)} tokens and at most {max_len} leave room for the answer: "
            "raise engine.max_model_len, lower sampling.max_new_tokens, or set "
            "prompt.too_long=truncate_left",
        )
    if ids[0] == bos_id and max_len > 1:
        return [ids[0], *ids[1 - max_len :]]
    return ids[-max_len:]


def constant_prompt_warning(prompt: Prompt, row: Row) -> str:
    """What users are told of a prompt that is the same for all rows, as it is seldom meant so."""
    try:
        text = prompt.text(row) or ""
    except RequestError as error:
        text = f"({error})"
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
    return (
        "the prompt uses no column of the data set, so all rows get the same one (a column is "
        f"written {{{{ name }}}}, a file of a template is named with prompt.user_file or "
        f"prompt.text_file). The first prompt:\n{shown}"
    )


class ChatPrompt:
    """A conversation in the model's chat format, up to where the model's answer starts.

    The tokenizer adds no special tokens to the text, because the chat template writes a BOS itself
    where the model wants one.
    """

    def __init__(
        self,
        config: ChatPromptConfig,
        tokenizer: PreTrainedTokenizerBase,
        columns: Mapping[str, Any],
        room: int | None = None,
    ) -> None:
        bound_chat_templates()
        self._config, self._tokenizer = config, tokenizer
        self._tokens = TextTokens(tokenizer, room)
        self._kwargs = dict(config.template_kwargs or {})
        self._roles = known_roles(self._chat_template())
        if config.messages_column is not None:
            self._path = _path("prompt.messages_column", config.messages_column, columns)
        self._user = _template("prompt.user", config.user, columns)
        self._system = _template("prompt.system", config.system, columns)
        self._try_roles()

    @property
    def is_constant(self) -> bool:
        templates = [template for template in (self._user, self._system) if template is not None]
        return self._user is not None and not any(t.uses_columns for t in templates)

    def token_ids(self, row: Row) -> list[int]:
        messages = self._messages(row)
        if self._user is not None:
            self._tokens.refuse_long(messages[-1]["content"])  # before it is copied for each mark
        return self._tokens.of(self._rendered(messages), add_special_tokens=False)

    def size(self, row: Row) -> int:
        messages = self._messages(row)
        if self._user is not None:
            return sum(text_bytes(message["content"]) for message in messages)
        return text_bytes(str(messages))

    def text(self, row: Row) -> str:
        return self._rendered(self._messages(row))

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        """The text of a conversation, or RequestError if the chat template does not take it."""
        try:
            with template_errors("the model's chat template"):
                return self._render(messages)
        except UndefinedError as error:
            text = f"the model's chat template: {error.message}"
            raise RequestError("template_error", text) from None

    def _messages(self, row: Row) -> list[dict[str, Any]]:
        """The conversation of a row, with the system message."""
        column = self._config.messages_column
        if self._user is not None:
            messages = [{"role": "user", "content": self._user.render(row.fields, row.index)}]
        else:
            assert column is not None
            value = value_at(row.fields, self._path)
            messages = checked_messages(value, column, self._roles)
        if self._system is not None:
            if messages[0]["role"] == "system":
                raise RequestError(
                    "bad_messages",
                    f"the row's messages have a system message of their own ({column}): set "
                    "prompt.system=null, or take it out of the row",
                )
            messages.insert(
                0, {"role": "system", "content": self._system.render(row.fields, row.index)}
            )
        return messages

    def _render(self, messages: list[dict[str, Any]]) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._kwargs
        )
        assert isinstance(text, str)
        return text

    def _chat_template(self) -> str:
        """The source of the chat template; of one with several parts, that of all of them."""
        template = self._kwargs.get("chat_template", self._tokenizer.chat_template)
        if template is None:
            raise ConfigError(
                "prompt.kind=chat: the model's tokenizer has no chat template: use prompt=text and "
                "write the whole prompt"
            )
        source = "".join(template.values()) if isinstance(template, Mapping) else str(template)
        for name in self._kwargs:
            if name != "chat_template" and not re.search(rf"\b{re.escape(name)}\b", source):
                raise ConfigError(
                    f"prompt.template_kwargs.{name}: the model's chat template knows no such option"
                )
        return source

    def _try_roles(self) -> None:
        """Refuse a system message before the job starts, if the chat template takes none."""
        roles = ["system"] * (self._system is not None) + ["user"]
        try:
            self._render([{"role": role, "content": "text"} for role in roles])
        except RENDER_ERRORS as error:
            raise ConfigError(
                f"prompt: the model's chat template cannot take the roles {' and '.join(roles)}: "
                f"{' '.join(str(error).split())}"
            ) from None


class TextPrompt:
    """One template for the whole prompt.

    The tokenizer adds its special tokens, such as a BOS, unless `add_special_tokens` is false.
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

    def size(self, row: Row) -> int:
        return text_bytes(self.text(row))

    def text(self, row: Row) -> str:
        return self._text.render(row.fields, row.index)


class TokensPrompt(Prompt):
    """The token ids that a column holds, as they are."""

    def __init__(
        self, config: TokensPromptConfig, vocab_size: int, columns: Mapping[str, Any]
    ) -> None:
        self._column, self._vocab_size = config.token_ids_column, vocab_size
        self._path = _path("prompt.token_ids_column", self._column, columns)

    def token_ids(self, row: Row) -> list[int]:
        ids = value_at(row.fields, self._path)
        if not isinstance(ids, list):
            raise RequestError(
                "bad_token_ids",
                f"column {self._column!r} must hold a list of integers, got {short(ids)}",
            )
        for position, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError(
                    "bad_token_ids",
                    f"column {self._column!r}, position {position}: {short(token)} is not "
                    f"an id of the model, 0 to {self._vocab_size - 1}",
                )
        return not_empty(ids)


def _template(key: str, source: str | None, columns: Collection[str]) -> RowTemplate | None:
    return None if source is None else RowTemplate(key, source, columns)


def _path(key: str, name: str, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Where in a row the column lies that a key names."""
    path = column_path(name, columns)
    if path is None:
        raise ConfigError(
            f"{key}: the data set has no column {name!r}: choose among {some_names(columns, name)}"
        )
    return path
