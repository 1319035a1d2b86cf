"""Recognises the prompts that `LLM` accepts, and converts them to token ids and images.

`read_prompts` recognises the prompts of a call, and `PromptIds` converts each one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.images.decode_image import has_pillow
from batchgen.inputs.images.image_sizes import has_processor, image_sizes
from batchgen.inputs.images.image_sources import ImageFolder, sources_of
from batchgen.inputs.images.row_images import RowImage, RowImages
from batchgen.inputs.prompts.chat_prompt import ChatPrompt
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from batchgen.inputs.dataset.source import Row
    from batchgen.inputs.model.open_model import OpenedModel

Conversation = Sequence[Mapping[str, Any]]
"""Messages {"role": …, "content": …}; the model answers the last one."""
Prompt = str | Sequence[int] | Conversation | Mapping[str, Any]
"""A prompt is a text, a list of token ids, or a conversation, whose messages may contain images. A
text or ids may also be given in a mapping, as in vLLM: {"prompt": text} or {"prompt_token_ids":
ids}, optionally with {"multi_modal_data": {"image": image or images}}."""
TokenizedPrompt = tuple[list[int], Sequence[RowImage]]
"""The token ids of a prompt, and its loaded images."""

_KINDS = "a text, a list of token ids or a list of messages {role, content}"
# Keys of a mapping that hold a prompt, and the key that may be beside them.
_WRAPPED = ("prompt", "prompt_token_ids")
_BESIDE = "multi_modal_data"


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """One prompt of a call, and what kind it is.

    Attributes:
        raw: the prompt as the user passed it.
        kind: `none` if it is not a prompt.
        value: the text, the ids as a list of int, or the list of messages; for kind `none` an error
            message.
        images: the images passed along with a text or ids, which contain the model's image token
            for each; None without any.
    """

    raw: Any
    kind: Literal["text", "ids", "messages", "none"]
    value: Any
    images: Any = None

    @classmethod
    def of(cls, prompt: Any) -> ReadPrompt:
        """Recognise the kind of one prompt. This never fails: a wrong prompt has the kind
        `none`."""
        bare, images = prompt, None
        if isinstance(prompt, Mapping) and _is_wrapped(prompt):
            extras = prompt.get(_BESIDE) or {}
            texts = [prompt[name] for name in _WRAPPED if name in prompt]
            if len(texts) + (_BESIDE in prompt) == len(prompt) and set(extras) <= {"image"}:
                bare, images = texts[0], extras.get("image")
        if isinstance(bare, str):
            return cls(prompt, "text", bare, images)
        items = _items(bare)
        if items is not None and all(map(is_token_id, items)):
            return cls(prompt, "ids", [int(item) for item in items], images)
        if items is not None and any(isinstance(item, Mapping) for item in items):
            return cls(prompt, "messages", items)
        return cls(prompt, "none", f"a prompt must be {_KINDS}, got {prompt!r:.100}")


def read_prompts(prompts: Any) -> tuple[list[ReadPrompt], bool]:
    """Return the prompts that a user passed, and whether it was a single one.

    A text, a list of integers and a list of messages are one prompt each. Any other list or
    iterable is a list of prompts of any kinds.

    Raises:
        ValueError: `prompts` is neither a prompt nor an iterable.
    """
    if isinstance(prompts, (str, Mapping)):
        return [ReadPrompt.of(prompts)], True
    items = _items(prompts)
    if items is None and isinstance(prompts, Iterable) and not isinstance(prompts, bytes):
        items = list(prompts)
    if items is None:
        raise ValueError(f"prompts must be {_KINDS}, or a list of these, got {prompts!r:.100}")
    messages = all(isinstance(item, Mapping) and not _is_wrapped(item) for item in items)
    if items and (messages or all(map(is_token_id, items))):
        return [ReadPrompt.of(items)], True
    return [ReadPrompt.of(item) for item in items], False


def images_of(model: OpenedModel, max_pixels: int | None) -> RowImages | None:
    """Make the loader of prompts' images for a model. Returns None if the model reads no images, or
    if Pillow or the model's processor configuration is missing. Raises ValueError for an invalid
    `max_pixels`."""
    vision = model.config.vision
    if vision is None or not (has_pillow() and has_processor(model.path)):
        return None
    sizes = image_sizes(model.path, vision, max_pixels)
    return RowImages(ImageFolder(Path(), anywhere=True), sizes, vision.rules)


@dataclass(frozen=True)
class PromptIds:
    """Converts prompts to token ids, and loads their images.

    Attributes:
        template_kwargs: options of the chat template.
        images: the loader of images; None if prompts may have none.
        is_read: whether prompts are only read, so that no start of an answer follows a last message
            of the assistant.
    """

    tokenizer: PreTrainedTokenizerBase | None
    template_kwargs: Mapping[str, Any]
    images: RowImages | None = None
    is_read: bool = False

    def check(self, prompts: Iterable[ReadPrompt]) -> None:
        """Check that the model can take prompts of these kinds: texts and conversations need a
        tokenizer, and conversations a chat template that knows the options.

        Raises:
            ValueError: it cannot.
        """
        kinds = {prompt.kind for prompt in prompts}
        if self.tokenizer is None and kinds & {"text", "messages"}:
            raise ValueError("the model comes without a tokenizer: give prompts as token ids")
        if "messages" in kinds:
            _ = self._chat

    def of(self, prompt: ReadPrompt) -> TokenizedPrompt:
        """Return the token ids and images of one checked prompt.

        Raises:
            RequestError: it is not a prompt, its messages do not suit the chat template, or an
                image cannot be used.
        """
        if prompt.kind == "none":
            raise RequestError("bad_prompt", prompt.value)
        if prompt.kind == "messages":
            try:
                return self._chat.token_ids_and_images(cast("Row", _Row({_COLUMN: prompt.value})))
            except RequestError as error:  # drop the data set's column, which a call does not have
                message = str(error).removeprefix(f"column {_COLUMN!r}, ")
                raise RequestError(error.type, message) from None
        ids = prompt.value
        if prompt.kind == "text":
            assert self.tokenizer is not None
            # `verbose=False`: no warning about long texts, which the engine refuses itself.
            text = prompt.value
            if prompt.images is not None and self.images is not None:
                text = self.images.marked(text, self.tokenizer)
            ids = list(self.tokenizer.encode(text, verbose=False))
        if not (sources := sources_of(prompt.images)):
            return ids, ()
        if self.images is None:
            raise RequestError("bad_images", NO_IMAGES)
        loaded = self.images.load(sources)
        return self.images.expanded(ids, [image.tokens for image in loaded]), loaded

    @cached_property
    def _chat(self) -> ChatPrompt:
        """The chat template with its options. Raises ValueError if there is none, or it does not
        know them."""
        assert self.tokenizer is not None
        if self.tokenizer.chat_template is None and "chat_template" not in self.template_kwargs:
            raise ValueError(
                "the model's tokenizer has no chat template: give prompts as text, or a template "
                "with llm.chat(…, template_kwargs={'chat_template': …})"
            )
        try:
            config = ChatPromptConfig(
                messages_column=_COLUMN, template_kwargs=dict(self.template_kwargs)
            )
            columns, images = {_COLUMN: _COLUMN}, self.images
            return ChatPrompt(config, self.tokenizer, columns, images=images, is_read=self.is_read)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("prompt.")) from None


# `ChatPrompt` reads rows; a call's messages are put under this column of a row.
_COLUMN = "messages"
NO_IMAGES = (
    "the prompt has images, and this LLM reads none: it needs a model that does, such as Qwen3-VL, "
    "images=True, and Pillow (pip install 'batchgen[images]')"
)


@dataclass(frozen=True, slots=True)
class _Row:
    """The part of a row that `ChatPrompt` reads. Importing the class `Row` would load the library
    datasets."""

    fields: Mapping[str, Any]


def _items(value: Any) -> list[Any] | None:
    """Return the items of a list, tuple, array or column as a list; None for any other value."""
    if isinstance(value, (str, bytes, Mapping)):
        return None
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "tolist"):  # an array of numpy or torch, or a column of pandas
        items = value.tolist()
        return items if isinstance(items, list) else None
    return None


def is_token_id(item: Any) -> bool:
    """Whether a value is an integer (of Python, numpy or similar) and not a boolean."""
    return isinstance(item, Integral) and not isinstance(item, bool)


def _is_wrapped(item: Mapping[Any, Any]) -> bool:
    return any(name in item for name in _WRAPPED)
