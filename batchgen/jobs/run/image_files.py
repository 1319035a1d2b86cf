"""The image files that rows name. Their content counts as part of the rows: a changed image makes
another data set. The digests of a job's rows use `content_of`, its manifest `content_fingerprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import pyarrow as pa

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.images.image_sources import ImageSource
from batchgen.inputs.images.row_images import RowImages, file_names
from batchgen.inputs.prompts.chat_prompt import ChatPrompt
from batchgen.inputs.prompts.openai_bodies import BodyPrompt
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.util.fingerprint import fingerprint_text

_PEEKED = 16
"""The rows that are read to find out whether rows name files."""


class ImageFiles:
    """The image files that the rows of a data set name.

    A row whose images cannot be found counts as a row without images, because it becomes an error
    row anyway.
    """

    def __init__(
        self, data: Source, images: RowImages, sources: Callable[[Row], list[ImageSource]]
    ) -> None:
        self._data, self._images, self._sources = data, images, sources

    @staticmethod
    def of(source: Source, prompt: Prompt) -> ImageFiles | None:
        """The image files of a job's rows; None if the first rows name none."""
        if not isinstance(prompt, ChatPrompt | BodyPrompt) or prompt.images is None:
            return None
        data = source.data
        if data.follows:  # its rows come from a job that still runs
            return None
        files = ImageFiles(data, prompt.images, prompt.image_sources)
        first_rows = islice(files._data.rows(), _PEEKED)
        return files if any(files._of_row(row, file_names) for row in first_rows) else None

    @property
    def num_ready(self) -> int | None:
        """The number of rows; None for a stream."""
        return self._data.num_ready

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """The rows before `stop` in tables of `size` rows; the last table may be shorter. One more
        column has the digests of the files that each row names."""
        rows, digests = self._data.rows(), self._images.file_digests
        for table in self._data.tables(stop, size):
            digest_rows = [self._of_row(row, digests) for row in islice(rows, table.num_rows)]
            yield table.append_column("\0image files", pa.array(digest_rows, pa.list_(pa.string())))

    def stamp(self) -> str:
        """A digest of names, sizes and times of all files. While it is the same, their content is
        not read again."""
        stamps = (self._of_row(row, self._images.file_stamps) for row in self._data.rows())
        return fingerprint_text(*(stamp for row_stamps in stamps for stamp in row_stamps))

    def _of_row(
        self, row: Row, describe: Callable[[Sequence[ImageSource]], list[str]]
    ) -> list[str]:
        """The texts that `describe` makes of the images of a row; empty if they cannot be read."""
        try:
            return describe(self._sources(row))
        except (RequestError, OSError):
            return []


def content_of(source: Source, prompt: Prompt) -> Source | ImageFiles:
    """The rows of a job's data set, together with the image files that they name."""
    return ImageFiles.of(source, prompt) or source.data


def content_fingerprint(source: Source, prompt: Prompt) -> str:
    """The fingerprint of a job's data set. It changes if image files that rows name may have
    changed."""
    data = source.data  # rows that steps choose cannot be counted before the folder is open
    fingerprint = data.fingerprint
    files = None if data.num_rows is None else ImageFiles.of(source, prompt)
    return fingerprint if files is None else fingerprint_text(fingerprint, files.stamp())
