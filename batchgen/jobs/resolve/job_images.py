"""Finds out whether the rows of a job have images, and makes the `RowImages` that loads them."""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.config.groups.dataset_config import STDIN, DatasetConfig
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.prompt_config import ChatPromptConfig, OpenAIPromptConfig
from batchgen.inputs.dataset.dataset_columns import json_cell, named_path, value_at
from batchgen.inputs.images.image_sizes import image_sizes
from batchgen.inputs.images.image_sources import ImageFolder
from batchgen.inputs.images.row_images import MOST_IMAGES, RowImages
from batchgen.inputs.model.open_model import OpenedModel
from batchgen.inputs.prompts.image_places import USUAL_COLUMNS
from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME, find_in_package
from batchgen.util.paths import short_user_path, user_path

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Source

_PEEKED = 100
"""The number of rows that are read to find out whether conversations have images."""


def image_columns(config: JobConfig, model: OpenedModel) -> Collection[str]:
    """The columns of the data set that may hold images.

    Raises:
        ConfigError: the configuration names images, and the model does not read images.
    """
    prompt = config.prompt
    if not isinstance(prompt, ChatPromptConfig):
        return ()
    named = [k for k in ("image_column", "images") if getattr(prompt, k) is not None]
    if model.config.vision is None:
        if named:
            raise ConfigError(f"prompt.{named[0]}: {_reads_text_only(model)}")
        return ()
    if prompt.image_column is not None:
        # A dot may separate a column from a field in it, or belong to the column's name.
        return {prompt.image_column, prompt.image_column.split(".")[0]}
    return () if prompt.images is not None else USUAL_COLUMNS


def row_images(config: JobConfig, model: OpenedModel, source: Source) -> RowImages | None:
    """Make the object that loads the images of the job's rows.

    Returns:
        None if no row has images, or if the model does not read images; then a row with images
        becomes an error row.

    Raises:
        ConfigError: all conversations have images and the model reads none; Pillow is not
            installed; or the model's folder does not say how large images may be.
    """
    prompt, columns = config.prompt, source.features
    if not isinstance(prompt, ChatPromptConfig | OpenAIPromptConfig):
        return None
    parts = _parts_in(prompt, source)  # of each of the first conversations
    vision = model.config.vision
    if vision is None:
        if parts and all(parts) and isinstance(prompt, ChatPromptConfig):
            raise ConfigError(
                f"the conversations of the rows have images, and {_reads_text_only(model)}"
            )
        return None
    if not any(parts):
        if not isinstance(prompt, ChatPromptConfig):
            return None
        uses_default = prompt.image_column is None and prompt.images is None
        if uses_default and not any(name in columns for name in USUAL_COLUMNS):
            return None
    return RowImages(
        ImageFolder(_root(config.dataset, prompt.image_root)),
        image_sizes(model.path, vision, prompt.max_pixels),
        vision.rules,
        prompt.max_images or MOST_IMAGES,
    )


def _reads_text_only(model: OpenedModel) -> str:
    return (
        f"the model {model.path} ({model.config.architecture}) reads no images: take one that "
        "does, such as Qwen3-VL"
    )


def _parts_in(prompt: ChatPromptConfig | OpenAIPromptConfig, source: Source) -> list[bool]:
    """Whether each of the first conversations of the data set has images among the parts of its
    messages. Empty if no column has conversations."""
    body = isinstance(prompt, OpenAIPromptConfig)
    column = prompt.body_column if isinstance(prompt, OpenAIPromptConfig) else None
    if isinstance(prompt, ChatPromptConfig):
        column = prompt.messages_column
    if column is None:
        return []
    key = "prompt.body_column" if body else "prompt.messages_column"
    path = named_path(key, column, source.features)
    # A job that still runs may not have finished more than one row.
    rows = islice(source.rows(), 1 if source.follows else _PEEKED)

    def messages(value: Any) -> Any:
        try:
            value = json_cell(value) if body else value
        except ValueError:  # the row's own error
            return None
        return value.get("messages") if isinstance(value, Mapping) else value

    conversations = (messages(value_at(row.fields, path)) for row in rows)
    return [
        any(
            _is_image(part)
            for message in _mappings(conversation)
            for part in _mappings(message.get("content"))
        )
        for conversation in conversations
    ]


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; empty if the value is not a list."""
    items = value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, Mapping)]


def _is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is an image, in the form of transformers or of OpenAI."""
    kind = part.get("type")
    if kind is None:
        return any(part.get(name) is not None for name in ("image", "image_url"))
    return kind in ("image", "image_url", "input_image")


def _root(dataset: DatasetConfig, image_root: str | None) -> Path | None:
    """The folder below which rows may name image files; None if they may not name files."""
    if image_root is not None:
        root = user_path(image_root, "prompt.image_root")
        if not root.is_dir():
            raise ConfigError(
                f"prompt.image_root: {root} is not a folder: name the one with the images"
            )
        return root
    if dataset.kind != "files" or not isinstance(dataset.path, str) or dataset.path == STDIN:
        return None
    if dataset.path.startswith(PACKAGE_SCHEME):
        return find_in_package(dataset.path, "dataset.path:").parent
    path = short_user_path(dataset.path, "dataset.path")
    while glob.has_magic(str(path)) and not path.exists():
        path = path.parent
    return path if path.is_dir() else path.parent
