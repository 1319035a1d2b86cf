"""The configuration group `prompt`: how the prompts of rows are made. The files conf/prompt/*.yaml
explain the keys. A template is a Jinja text with the columns of a row, such as `{{ question }}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from batchgen.config.groups.template_files import template_text
from batchgen.util.errors import ConfigError

TooLong = Literal["error", "truncate_left"]
DEFAULT_USER = "{{ question }}"
"""The user's message, if the configuration names no other source."""
DEFAULT_TEXT = "{{ prompt }}"
"""The template of `prompt=text`, if the configuration names no other."""
DEFAULT_MESSAGES = "messages"
"""The column of conversations, if the configuration names no other."""
RESERVED_TEMPLATE_KWARGS = {
    "conversation",
    "messages",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
}
"""Arguments of the tokenizer's `apply_chat_template` that chat_prompt.py sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPromptConfig:
    """The prompt is a conversation, written with the tokenizer's chat template.

    After the checks, `user` and `system` hold the templates themselves, and the keys of files are
    null: the content of a file is part of the job, and not its path.
    """

    kind: Literal["chat"] = "chat"
    user: str | None = None
    user_file: str | None = None
    system: str | None = None
    system_file: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    messages_column: str | None = None
    tools_column: str | None = None
    continue_: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    date: str | None = None  # YYYY-MM-DD
    image_column: str | None = None
    images: tuple[str, ...] | None = None  # a template each
    image_root: str | None = None
    max_images: int | None = None
    max_pixels: int | None = None
    answer: str | None = None  # a template
    answer_ids_column: str | None = None
    answer_step_map_column: str | None = None
    constant: bool = False
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        if self.messages is not None and self.messages_column == DEFAULT_MESSAGES:
            object.__setattr__(self, "messages_column", None)
        ways = ("user", "user_file", "messages", "messages_column")
        # Without any of them, the user's message is DEFAULT_USER. `template_text` refuses `user`
        # together with `user_file`.
        first, *others = [k for k in ways if getattr(self, k) is not None] or ["user"]
        if others and others != ["user_file"]:
            raise ConfigError(
                f"prompt.{first} and prompt.{others[-1]} are both set: choose one "
                f"(prompt.{first}=null drops it)"
            )
        user = template_text("prompt.user", self.user, self.user_file)
        if first == "user" and user is None:
            user = DEFAULT_USER
        self._check_turns()
        system = template_text("prompt.system", self.system, self.system_file)
        for key, value in {"user": user, "system": system}.items():
            object.__setattr__(self, key, value)
            object.__setattr__(self, f"{key}_file", None)
        check_template_kwargs(self.template_kwargs, tools=self.tools_column is not None)
        check_date(self.date)
        check_answer(self)
        if self.images is not None and self.image_column is not None:
            raise ConfigError("prompt.images and prompt.image_column are both set: choose one")
        check_image_limits(self)

    def _check_turns(self) -> None:
        """Check the messages in the configuration, and whether the last one can be continued."""
        for position, message in enumerate(self.messages or ()):
            if len(message) != 1:
                raise ConfigError(
                    f"prompt.messages[{position}] must be one role with its template, such as "
                    f"{{user: '{{{{ question }}}}'}}, got {dict(message)!r}"
                )
        if self.messages is not None and not self.messages:
            raise ConfigError("prompt.messages must have at least one message")
        roles = [role for message in self.messages or () for role in message]
        if roles[:1] == ["system"] and (self.system or self.system_file) is not None:
            raise ConfigError("prompt.system and a system message in prompt.messages: choose one")
        last = None if self.messages_column is not None else (roles or ["user"])[-1]
        if self.continue_ and last not in (None, "assistant"):
            raise ConfigError(
                f"prompt.continue extends the assistant's last message, but the last one here "
                f"has the role {last}: end prompt.messages with {{assistant: …}}, or take "
                "prompt.messages_column"
            )


def check_image_limits(prompt: ChatPromptConfig | OpenAIPromptConfig) -> None:
    """Check the keys that limit the images of a row."""
    for key in ("max_images", "max_pixels"):
        if (value := getattr(prompt, key)) is not None and value < 1:
            raise ConfigError(f"prompt.{key} must be null or at least 1, got {value}")


def check_answer(prompt: PromptConfig) -> None:
    """Check the keys that name the answer of a row to score."""
    if prompt.answer is not None and prompt.answer_ids_column is not None:
        raise ConfigError("prompt.answer and prompt.answer_ids_column are both set: choose one")
    if prompt.answer_step_map_column is not None and prompt.answer_ids_column is None:
        raise ConfigError(
            "prompt.answer_step_map_column says when each token of prompt.answer_ids_column was "
            "unmasked, but that key is not set: name the column of the token ids, such as "
            "token_ids"
        )


def check_template_kwargs(values: Mapping[str, Any] | None, *, tools: bool = False) -> None:
    """Refuse options of the chat template that batchgen sets. With `tools`, rows bring tools, so
    that this option is refused too."""
    reserved = RESERVED_TEMPLATE_KWARGS | ({"tools"} if tools else set())
    if taken := sorted(reserved & set(values or {})):
        raise ConfigError(
            f"prompt.template_kwargs must not set {', '.join(taken)}: batchgen sets it; give only "
            "the template's own options, such as enable_thinking"
        )


def check_date(day: str | None) -> None:
    """Refuse a text that is not a day."""
    if day is None:
        return
    try:
        is_day = date.fromisoformat(day).isoformat() == day
    except ValueError:
        is_day = False
    if not is_day:
        raise ConfigError(f"prompt.date must be null or a day such as 2026-11-25, got {day!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPromptConfig:
    """The prompt is plain text, for base models or for a chat format of the user's.

    After the checks, `text` holds the template itself, and `text_file` is null.
    """

    kind: Literal["text"] = "text"
    text: str | None = None
    text_file: str | None = None
    add_special_tokens: bool = True
    answer: str | None = None  # a template
    answer_ids_column: str | None = None
    answer_step_map_column: str | None = None
    constant: bool = False
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        text = template_text("prompt.text", self.text, self.text_file)
        object.__setattr__(self, "text", DEFAULT_TEXT if text is None else text)
        object.__setattr__(self, "text_file", None)
        check_answer(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensPromptConfig:
    """The prompt is token ids from a column of the data set."""

    kind: Literal["tokens"] = "tokens"
    token_ids_column: str
    answer: str | None = None  # a template
    answer_ids_column: str | None = None
    answer_step_map_column: str | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        check_answer(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIPromptConfig:
    """The prompt is made from the body of a request to OpenAI's API."""

    kind: Literal["openai"] = "openai"
    body_column: str = "body"
    answer: str | None = None  # a template
    answer_ids_column: str | None = None
    answer_step_map_column: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    date: str | None = None  # YYYY-MM-DD
    image_root: str | None = None
    max_images: int | None = None
    max_pixels: int | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        check_template_kwargs(self.template_kwargs, tools=True)
        check_date(self.date)
        check_image_limits(self)
        check_answer(self)


PromptConfig = ChatPromptConfig | TextPromptConfig | TokensPromptConfig | OpenAIPromptConfig
TAIL_IDS_COLUMN, TAIL_STEP_MAP_COLUMN = "tail_token_ids", "tail_step_map"
"""The columns in which a replay looks for the tokens after an answer in its last block."""
PROMPT_KINDS: dict[str, type[PromptConfig]] = {
    "chat": ChatPromptConfig,
    "text": TextPromptConfig,
    "tokens": TokensPromptConfig,
    "openai": OpenAIPromptConfig,
}


def answer_key(prompt: PromptConfig) -> str | None:
    """The key that names the answer of a row to score; None if rows generate."""
    if prompt.answer is not None:
        return "prompt.answer"
    return None if prompt.answer_ids_column is None else "prompt.answer_ids_column"
