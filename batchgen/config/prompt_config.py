"""The configuration group `prompt`: what the prompts of rows are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.config.template_files import template_text
from batchgen.util.errors import ConfigError

TooLong = Literal["error", "truncate_left"]
DEFAULT_USER = "{{ question }}"
"""The user's message where the configuration names nothing else."""
DEFAULT_TEXT = "{{ prompt }}"
"""The template of `prompt=text` where the configuration names nothing else."""
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
"""Arguments that prompts.py itself gives to the tokenizer's `apply_chat_template`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPromptConfig:
    """The prompt is a conversation, written with the tokenizer's chat template.

    Once it is made, `user` and `system` hold the templates themselves, and the keys of files are
    null: what a file holds is part of the job, and not where it lies.
    """

    kind: Literal["chat"] = "chat"
    user: str | None = None
    user_file: str | None = None
    system: str | None = None
    system_file: str | None = None
    messages_column: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        given = [k for k in ("user", "user_file") if getattr(self, k) is not None]
        if given and self.messages_column is not None:
            raise ConfigError(
                f"prompt.{given[0]} and prompt.messages_column are both set: choose one "
                f"(prompt.{given[0]}=null drops it)"
            )
        user = template_text("prompt.user", self.user, self.user_file)
        if user is None and self.messages_column is None:
            user = DEFAULT_USER
        system = template_text("prompt.system", self.system, self.system_file)
        for key, value in {"user": user, "system": system}.items():
            object.__setattr__(self, key, value)
            object.__setattr__(self, f"{key}_file", None)
        reserved = sorted(RESERVED_TEMPLATE_KWARGS & set(self.template_kwargs or {}))
        if reserved:
            raise ConfigError(
                f"prompt.template_kwargs must not set {', '.join(reserved)}: batchgen sets it; "
                "give only the template's own options, such as enable_thinking"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPromptConfig:
    """The prompt is plain text, for base models or a chat format of one's own. Once it is made,
    `text` holds the template itself, and `text_file` is null."""

    kind: Literal["text"] = "text"
    text: str | None = None
    text_file: str | None = None
    add_special_tokens: bool = True
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        text = template_text("prompt.text", self.text, self.text_file)
        object.__setattr__(self, "text", DEFAULT_TEXT if text is None else text)
        object.__setattr__(self, "text_file", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensPromptConfig:
    """The prompt is token ids that the data set has in a column."""

    kind: Literal["tokens"] = "tokens"
    token_ids_column: str
    too_long: TooLong = "error"


PromptConfig = ChatPromptConfig | TextPromptConfig | TokensPromptConfig
PROMPT_KINDS = {"chat": ChatPromptConfig, "text": TextPromptConfig, "tokens": TokensPromptConfig}
