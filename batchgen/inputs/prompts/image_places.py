"""Assigns the images of a row to the messages of its conversation. `ChatPrompt` uses
`ImagePlaces`.

The messages are those that `checked_messages` returns: a content is a text, or a list of parts
`{type: text, text}` and `{type: image, source}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.dataset_columns import named_path, value_at
from batchgen.inputs.images.image_sources import ImageSource, sources_of
from batchgen.inputs.images.row_images import RowImages
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_templates import RowTemplate

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Row

Messages = list[dict[str, Any]]
USUAL_COLUMNS = ("image", "images")
"""The columns whose images are read if the configuration names no column."""


class ImagePlaces:
    """Finds the images of rows, and the messages to which they belong.

    A message part of type image that names an image gets that image. The parts that name none get
    the images of the row's column, or of `prompt.images`, in order. If a row's messages have no
    such part, these images come before the text of the first user message.

    Args:
        images: reads the images of rows.
        config: names the column with the images, or has templates of their sources.
        columns: the data set's columns with their features.
    """

    def __init__(
        self, images: RowImages, config: ChatPromptConfig, columns: Mapping[str, Any]
    ) -> None:
        self.images = images
        named = config.image_column
        if named is None and config.images is None:
            named = next((name for name in USUAL_COLUMNS if name in columns), None)
        self._path = () if named is None else named_path("prompt.image_column", named, columns)
        self._templates = [
            RowTemplate(f"prompt.images[{index}]", source, columns)
            for index, source in enumerate(config.images or ())
        ]

    def placed(self, row: Row, messages: Messages) -> tuple[Messages, list[ImageSource]]:
        """Return the messages with a part `{type: image}` for each image, and the sources of the
        images in the same order.

        Raises:
            RequestError: bad_images: the number of the row's images differs from the number of
                parts for them, or no user message can take them.
        """
        images = self.row_images(row)
        free = sum(_is_free(part) for message in messages for part in _parts(message))
        if free and free != len(images):
            raise RequestError(
                "bad_images",
                f"the messages have {free} images without a source, and the row has {len(images)} "
                "of its own: their numbers must be equal",
            )
        unassigned, sources = iter(images), list[ImageSource]()
        placed = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                content = [self._part(part, unassigned, sources) for part in content]
                message = {**message, "content": content}
            elif not free and images and message["role"] == "user":
                text = [{"type": "text", "text": content}]
                sources += unassigned
                message = {**message, "content": [{"type": "image"}] * len(images) + text}
                images = []
            placed.append(message)
        if not free and images:
            raise RequestError(
                "bad_images", "the row has images, but no user message to put them in"
            )
        return placed, sources

    def row_images(self, row: Row) -> list[ImageSource]:
        """Return the images of the row's column, or those that `prompt.images` names."""
        if self._templates:
            texts = [template.render(row.fields, row.index) for template in self._templates]
            return [source for text in texts for source in sources_of(text)]
        return sources_of(value_at(row.fields, self._path)) if self._path else []

    def _part(
        self, part: dict[str, Any], unassigned: Iterator[ImageSource], images: list[ImageSource]
    ) -> dict[str, Any]:
        """Return an image part without its source, which is appended to `images`. A part without a
        source takes the next image of `unassigned`. Other parts are returned as they are."""
        if part["type"] != "image":
            return part
        if part["source"] is None:
            images.append(next(unassigned))
        else:
            sources = sources_of(part["source"])
            if len(sources) != 1:
                raise RequestError("bad_images", "a part of a message must name one image")
            images += sources
        return {"type": "image"}


def _parts(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the parts of a message's content; none if it is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_free(part: Mapping[str, Any]) -> bool:
    """Return whether a part stands for an image and does not name one."""
    return part["type"] == "image" and part["source"] is None


def refuse_template_without_images(text: str, mark: str) -> None:
    """Raise ConfigError if a chat template leaves images out.

    Args:
        text: what the template made of a message with one image.
        mark: the model's placeholder of an image, which must be in the text once.
    """
    if text.count(mark) != 1:
        raise ConfigError(
            "prompt: the model's chat template leaves images out (it writes "
            f"{text.count(mark)} times {mark!r} for one): give one that does not with "
            "prompt.template_kwargs={chat_template: …}"
        )
