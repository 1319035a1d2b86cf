"""Makes prompts from the request bodies of OpenAI batch files: conversations, texts or token ids.

`build_prompt` makes a `BodyPrompt` for `prompt=openai`. A body, in a column of the data set, is
`{"messages": [{"role": "user", "content": "Hi"}]}` or `{"prompt": "Once upon"}`; other keys, such
as `temperature`, are not read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from batchgen.config.groups.prompt_config import ChatPromptConfig, OpenAIPromptConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.dataset_columns import json_cell, named_path, value_at
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.images.image_sources import ImageSource
from batchgen.inputs.images.row_images import RowImage, RowImages
from batchgen.inputs.prompts.chat_prompt import ChatPrompt
from batchgen.inputs.prompts.chat_templates import today
from batchgen.inputs.prompts.messages import short_value
from batchgen.inputs.prompts.prompt_tokens import TextTokens, not_empty
from batchgen.util.errors import ConfigError

BAD_BODY = "bad_body"
"""The error type of a row whose body has no usable prompt."""


class BodyPrompt:
    """Makes the prompt of a request body.

    A body has either `messages`, with optional `tools`, which the chat template renders; or a
    `prompt`. A prompt that is a text gets the tokenizer's special tokens; a prompt that is a list
    of token ids is used as it is.

    Args:
        columns: the data set's columns with their features.
        room: the maximum number of tokens of a prompt, or None for no limit. Far longer texts are
            refused before they are tokenised.
        images: reads the images of rows; None if the model or the rows have none.
        day: returns the date that chat templates write, if the configuration names none.
        is_read: whether the model only reads prompts and generates no answer (for embeddings and
            classes), so that the template adds no start of an answer.
    """

    is_constant = False

    def __init__(
        self,
        config: OpenAIPromptConfig,
        tokenizer: PreTrainedTokenizerBase,
        columns: Mapping[str, Any],
        vocab_size: int,
        room: int | None = None,
        images: RowImages | None = None,
        day: Callable[[], str] = today,
        is_read: bool = False,
    ) -> None:
        self._column, self._vocab_size = config.body_column, vocab_size
        self._path = named_path("prompt.body_column", config.body_column, columns)
        self._tokens = TextTokens(tokenizer, room)
        self._chat: ChatPrompt | None = None
        template = tokenizer.chat_template
        if template is None and config.date is not None:
            raise ConfigError("prompt.date: the model has no chat template: leave it out")
        if template is not None:
            takes_tools = re.search(r"\btools\b", str(template)) is not None
            chat = ChatPromptConfig(
                messages_column="messages",
                tools_column="tools" if takes_tools else None,
                template_kwargs=config.template_kwargs,
                date=config.date,
            )
            # The columns of the rows that `_messages` makes; their features are not needed.
            columns_of_body = dict.fromkeys(("messages", "tools"))
            self._chat = ChatPrompt(chat, tokenizer, columns_of_body, room, images, day, is_read)
            self._takes_tools = takes_tools

    @property
    def day(self) -> str | None:
        """The date that the chat template writes; None if it writes none."""
        return None if self._chat is None else self._chat.day

    def token_ids(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt.

        Raises:
            RequestError: as for `Prompt.token_ids`, and bad_body.
        """
        body = self._body(row)
        if "messages" in body:
            return self._of_messages().token_ids(self._messages(row, body))
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return self._tokens.of(prompt, add_special_tokens=True)
        return not_empty(prompt)

    def token_ids_and_images(self, row: Row) -> tuple[list[int], list[RowImage]]:
        """Return the token ids of a row's prompt, and its images. Raises RequestError as
        `token_ids`."""
        body = self._body(row)
        if "messages" not in body:
            return self.token_ids(row), []
        return self._of_messages().token_ids_and_images(self._messages(row, body))

    @property
    def images(self) -> RowImages | None:
        """The reader of rows' images; None if rows have no images."""
        return None if self._chat is None else self._chat.images

    def image_sources(self, row: Row) -> list[ImageSource]:
        """Return the sources of a row's images. Raises RequestError as `token_ids`."""
        body = self._body(row)
        if "messages" not in body:
            return []
        return self._of_messages().image_sources(self._messages(row, body))

    def text(self, row: Row) -> str | None:
        """Return the text of a row's prompt; None if the body has token ids."""
        body = self._body(row)
        if "messages" in body:
            return self._of_messages().text(self._messages(row, body))
        return body["prompt"] if isinstance(body["prompt"], str) else None

    def _body(self, row: Row) -> dict[str, Any]:
        """Return the body of a row, with either `messages` or a valid `prompt`."""
        try:
            cell = json_cell(value_at(row.fields, self._path))
        except ValueError as error:
            raise self._bad(str(error)) from None
        if not isinstance(cell, Mapping):
            raise self._bad(f"must hold the body of a request, got {short_value(cell)}")
        body = {key: value for key, value in cell.items() if value is not None}
        if ("messages" in body) == ("prompt" in body):
            raise self._bad("must have either messages or a prompt")
        if "prompt" in body:
            self._check_prompt(body["prompt"])
        return body

    def _check_prompt(self, prompt: Any) -> None:
        if isinstance(prompt, str):
            return
        if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
            raise self._bad(
                f"prompt must be one text or one list of ids, got {short_value(prompt)}"
            )
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    "bad_token_ids",
                    f"column {self._column!r}: {token} is not an id of the model, 0 to "
                    f"{self._vocab_size - 1}",
                )

    def _of_messages(self) -> ChatPrompt:
        """Return what makes prompts of messages. Raises RequestError if the tokenizer has no chat
        template."""
        if self._chat is None:
            raise self._bad("messages need a chat template, and the model's tokenizer has none")
        return self._chat

    def _messages(self, row: Row, body: Mapping[str, Any]) -> Row:
        """Return the row with the columns that `ChatPrompt` reads."""
        if body.get("tools") and not self._takes_tools:
            raise RequestError("bad_tools", "the model's chat template knows no tools")
        fields = {"messages": body["messages"], "tools": body.get("tools")}
        return Row(row.index, row.id, fields)

    def _bad(self, why: str) -> RequestError:
        return RequestError(BAD_BODY, f"column {self._column!r}: {why}")
