"""Makes prompts that are conversations, in the model's chat format (`prompt.kind=chat`).

`ChatPrompt` makes the messages of a row from the configuration's templates or from a column, puts
the row's images into them, renders the model's chat template, and tokenises the text:
`[{"role": "user", "content": "Hi"}]` → `"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"`
→ token ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import UndefinedError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.engine.constraint.harmony import HarmonyTokens
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.dataset_columns import named_path, value_at
from batchgen.inputs.images.image_sources import ImageSource
from batchgen.inputs.images.row_images import RowImage, RowImages
from batchgen.inputs.prompts.chat_templates import bound_chat_templates, on_day, today
from batchgen.inputs.prompts.image_places import ImagePlaces, refuse_template_without_images
from batchgen.inputs.prompts.message_forms import ADVICE, MessageForms, texts_of
from batchgen.inputs.prompts.messages import checked_messages, known_roles
from batchgen.inputs.prompts.prompt_tokens import TextTokens
from batchgen.inputs.prompts.tools import checked_tools
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_templates import RowTemplate, template_errors
from batchgen.util.templates.template_sandbox import RENDER_ERRORS

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Row

Messages = list[dict[str, Any]]
_STAND_IN = "zqz"
"""Stands for an empty content while a message is rendered, so that its position in the text is
found."""
EFFORTS = ("low", "medium", "high")
"""The reasoning efforts that models of Harmony were trained with; the template takes any text."""


class ChatPrompt:
    """Makes prompts in the model's chat format.

    A prompt ends where the model's answer starts, or, with `continue`, at the end of the last
    message, which the model continues. The tokenizer adds no special tokens, because the chat
    template writes them.

    Args:
        columns: the data set's columns with their features.
        room: the maximum number of tokens of a prompt; None for no limit.
        images: reads the images of rows; None if the model or the rows have none.
        day: returns the date that chat templates write, if the configuration names none.
        is_read: whether the model only reads conversations and generates nothing, so that a prompt
            ends after an assistant's last message.

    Raises:
        ConfigError: a template does not compile or uses a column that the data set lacks, or the
            chat template does not accept conversations of this kind.

    Attributes:
        day: the day that the chat template writes, YYYY-MM-DD: the configuration's, or else what
            the argument `day` returns. None if the template writes none.
    """

    def __init__(
        self,
        config: ChatPromptConfig,
        tokenizer: PreTrainedTokenizerBase,
        columns: Mapping[str, Any],
        room: int | None = None,
        images: RowImages | None = None,
        day: Callable[[], str] = today,
        is_read: bool = False,
    ) -> None:
        bound_chat_templates()
        self._config, self._tokenizer, self._is_read = config, tokenizer, is_read
        self._tokens = TextTokens(tokenizer, room)
        self._kwargs = dict(config.template_kwargs or {})
        source = self._chat_template()
        self.day = _day(config.date, source, day)
        self._roles = known_roles(source)
        self._forms = MessageForms(self._render, source)
        if config.messages_column is not None:
            self._path = named_path("prompt.messages_column", config.messages_column, columns)
        if config.tools_column is not None:
            self._tools_path = named_path("prompt.tools_column", config.tools_column, columns)
            _refuse_no_tools(source)
        # Puts images into messages; None if rows have none.
        self._places = None if images is None else ImagePlaces(images, config, columns)
        self._system = _template("prompt.system", config.system, columns)
        # The messages that the configuration describes; empty if they come from a column.
        self._turns = self._templates(columns)
        self._try_roles()

    @property
    def is_constant(self) -> bool:
        """Whether all rows have the same prompt, because no column is used."""
        templates = [template for _, template in self._turns]
        templates += [] if self._system is None else [self._system]
        if not self._turns or self._config.tools_column is not None or self._places is not None:
            return False
        return not any(template.uses_columns for template in templates)

    def token_ids(self, row: Row) -> list[int]:
        """Return the prompt of a row. Raises RequestError as `Prompt.token_ids` does."""
        ids, sources = self._ids_and_sources(row)
        if self._places is None:
            return ids
        images = self._places.images
        return images.expanded(ids, images.tokens(sources))

    def token_ids_and_images(self, row: Row) -> tuple[list[int], list[RowImage]]:
        """Return the prompt of a row and its images. Raises RequestError as `token_ids` does."""
        ids, sources = self._ids_and_sources(row)
        if self._places is None:
            return ids, []
        images = self._places.images
        loaded = images.load(sources)
        return images.expanded(ids, [image.tokens for image in loaded]), loaded

    @property
    def images(self) -> RowImages | None:
        """Makes the images of rows; None if rows have none."""
        return None if self._places is None else self._places.images

    def image_sources(self, row: Row) -> list[ImageSource]:
        """Return the sources of a row's images. Raises RequestError as `token_ids` does."""
        _, sources = self._placed(row)
        return sources

    def _ids_and_sources(self, row: Row) -> tuple[list[int], list[ImageSource]]:
        """Return the prompt with one token for each image, and the sources of the images."""
        messages, sources = self._placed(row)
        if self._turns:
            for message in messages:
                for text in texts_of(message):
                    self._tokens.refuse_long(text)  # before the chat template copies it
        text = self._rendered(messages, self._tools(row))
        if self._places is not None:
            text = self._places.images.marked(text, self._tokenizer)
        return self._tokens.of(text, add_special_tokens=False), sources

    def _placed(self, row: Row) -> tuple[Messages, list[ImageSource]]:
        """Return the conversation of a row with a part for each image, and the sources of the
        images."""
        messages = self._messages(row)
        return (messages, []) if self._places is None else self._places.placed(row, messages)

    def text(self, row: Row) -> str:
        """Return the prompt of a row before it becomes tokens."""
        messages, _ = self._placed(row)
        return self._rendered(messages, self._tools(row))

    def _templates(self, columns: Mapping[str, Any]) -> list[tuple[str, RowTemplate]]:
        """Return the role and the template of each message that the configuration describes."""
        config = self._config
        if config.user is not None:
            return [("user", RowTemplate("prompt.user", config.user, columns))]
        turns = []
        for position, message in enumerate(config.messages or ()):
            ((role, source),) = message.items()
            key = f"prompt.messages[{position}].{role}"
            if role not in self._roles:
                raise ConfigError(f"{key}: unknown role {role!r}: use {', '.join(self._roles)}")
            turns.append((role, RowTemplate(key, source, columns)))
        return turns

    def _rendered(self, messages: Messages, tools: Sequence[Any] | None) -> str:
        """Return the text of a conversation. Raises RequestError if the chat template rejects it or
        leaves out part of it."""
        messages = self._forms.formed(messages, tools)
        last, inner = messages[-1].get("content"), None
        if self._config.continue_ and isinstance(last, str):
            # Templates remove white space around a message. Of a message that is continued it
            # matters, so the template gets the message without it, and it is put back below.
            inner = last.strip() or _STAND_IN
            messages = [*messages[:-1], {**messages[-1], "content": inner}]
        try:
            with template_errors("the model's chat template"):
                text = self._render(messages, tools)
        except UndefinedError as error:
            why = f"the model's chat template: {error.message}"
            raise RequestError("template_error", why) from None
        self._forms.check(messages, text)
        if inner is None:
            return text
        if not text.endswith(inner):
            raise RequestError(
                "template_error",
                "prompt.continue: the model's chat template changes the last message, so that it "
                "cannot be continued: use prompt=text and write the whole prompt",
            )
        return f"{text.removesuffix(inner)}{last}"

    def _messages(self, row: Row) -> Messages:
        """Return the conversation of a row, with the system message."""
        column = self._config.messages_column
        if self._turns:
            messages = [
                {"role": role, "content": template.render(row.fields, row.index)}
                for role, template in self._turns
            ]
        else:
            assert column is not None
            value = value_at(row.fields, self._path)
            messages = checked_messages(value, column, self._roles, images=self._places is not None)
        if self._system is not None:
            if messages[0]["role"] == "system":
                raise RequestError(
                    "bad_messages",
                    f"the row's messages have a system message of their own ({column}): set "
                    "prompt.system=null, or take it out of the row",
                )
            system = self._system.render(row.fields, row.index)
            messages.insert(0, {"role": "system", "content": system})
        if self._config.continue_ and (role := messages[-1]["role"]) != "assistant":
            raise RequestError(
                "bad_messages",
                "prompt.continue extends the assistant's last message, but the row's "
                f"messages end with one of {role}",
            )
        return messages

    def _tools(self, row: Row) -> list[dict[str, Any]] | None:
        """Return the tools that a column names for the row; None if there are none."""
        column = self._config.tools_column
        if column is None:
            return None
        return checked_tools(value_at(row.fields, self._tools_path), column)

    def _is_complete(self, messages: Messages) -> bool:
        """Return whether a conversation has its answer and is only read, so that no answer
        follows."""
        return self._is_read and messages[-1]["role"] == "assistant"

    def _render(self, messages: Messages, tools: Sequence[Any] | None = None) -> str:
        """Render the chat template; raises RENDER_ERRORS if it rejects the conversation.
        `apply_chat_template` is not used, because it removes null keys from messages, which some
        templates need."""
        continues = self._config.continue_
        options = dict(self._kwargs)
        listed = None if tools is None else list(tools)
        template = self._tokenizer.get_chat_template(options.pop("chat_template", None), listed)
        with on_day(self.day):
            rendered: Any = chat_template_utils.render_jinja_template(
                conversations=[messages],
                tools=listed,
                chat_template=template,
                add_generation_prompt=not continues and not self._is_complete(messages),
                continue_final_message=continues,
                **{**self._tokenizer.special_tokens_map, **options},
            )
        texts, _generation_masks = rendered
        return str(texts[0])

    def _chat_template(self) -> str:
        """Return the source of the chat template; of several named templates, all sources joined.
        Raises ConfigError if there is none, or for an option that it does not have."""
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
                    f"prompt.template_kwargs.{name}: the model's chat template has no such option"
                )
        effort = self._kwargs.get("reasoning_effort")
        if effort not in (None, *EFFORTS) and HarmonyTokens.of(self._tokenizer) is not None:
            raise ConfigError(
                f"prompt.template_kwargs.reasoning_effort must be one of {', '.join(EFFORTS)}, got "
                f"{effort!r}"
            )
        return source

    def _try_roles(self) -> None:
        """Raise ConfigError before the job starts if the chat template rejects conversations with
        the roles of this configuration, or leaves out messages or images."""
        roles = [role for role, _ in self._turns] or ["user"]
        keys = [template.key for _, template in self._turns] or ["prompt"]
        if self._config.continue_ and not self._turns:
            roles, keys = [*roles, "assistant"], [*keys, "prompt"]
        if self._system is not None:
            roles, keys = ["system", *roles], ["prompt.system", *keys]
        image = [{"type": "image"}, {"type": "text", "text": "text"}]
        try:
            messages = [{"role": role, "content": "text"} for role in roles]
            self._render(messages)
            if self._places is not None and "user" in roles:
                text = self._render([{"role": "user", "content": image}])
                mark = str(self._tokenizer.decode([self._places.images.mark_id]))
                refuse_template_without_images(text, mark)
        except RENDER_ERRORS as error:
            why = " ".join(str(error).split())
            if self._config.continue_ and "continue_final_message" in why:
                raise ConfigError(
                    "prompt.continue: the model's chat template changes the last message, so that "
                    "it cannot be continued: use prompt=text and write the whole prompt"
                ) from None
            raise ConfigError(
                f"prompt: the model's chat template cannot take the roles {' and '.join(roles)}: "
                f"{why}"
            ) from None
        if (left_out := self._forms.left_out(messages)) is not None:
            at, _ = left_out
            raise ConfigError(
                f"{keys[at]}: the model's chat template leaves out a message of the role "
                f"{roles[at]} here: {ADVICE}"
            )


def _day(date: str | None, source: str, of_job: Callable[[], str]) -> str | None:
    """Return the day that a chat template writes; None if it writes none.

    Args:
        date: the configured day; None means the one that `of_job` returns.
        source: the source of the chat template.
    """
    if re.search(r"\bstrftime_now\b", source):
        return of_job() if date is None else date
    if date is not None:
        raise ConfigError("prompt.date: the model's chat template writes no date: leave it out")
    return None


def _template(key: str, source: str | None, columns: Mapping[str, Any]) -> RowTemplate | None:
    return None if source is None else RowTemplate(key, source, columns)


def _refuse_no_tools(source: str) -> None:
    """Refuse tools for a chat template that would leave them out."""
    if not re.search(r"\btools\b", source):
        raise ConfigError(
            "prompt.tools_column: the model's chat template knows no tools: drop the key, and "
            "write the tools into prompt.system"
        )
