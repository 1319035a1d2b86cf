"""Digests of the files that rows name as their images, which belong to the content of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import pyarrow as pa

from batchgen.dataset.source import Row, Source
from batchgen.engine.base.outputs import RequestError
from batchgen.prompts.chat_prompt import ChatPrompt
from batchgen.prompts.openai_bodies import BodyPrompt
from batchgen.prompts.row_prompts import Prompt
from batchgen.row_index.open_rows import data_of


class WithImageFiles:
    """The tables of a source with one more column: the digests of the files that each row names.

    A row whose images cannot be found has none, as it gets an error in any case.
    """

    def __init__(self, source: Source, file_digests: Callable[[Row], list[str]]) -> None:
        self._source, self._file_digests = source, file_digests

    @property
    def num_rows(self) -> int | None:
        """How many rows there are; None for a stream."""
        return self._source.num_rows

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """The rows before `stop` in tables of `size` rows, of which the last one may have fewer."""
        rows = self._source.rows()
        for table in self._source.tables(stop, size):
            found = [self._digests(row) for row in islice(rows, table.num_rows)]
            yield table.append_column("\0image files", pa.array(found, pa.list_(pa.string())))

    def _digests(self, row: Row) -> list[str]:
        try:
            return self._file_digests(row)
        except RequestError:
            return []


def content_of(source: Source, prompt: Prompt) -> Source | WithImageFiles:
    """The rows of a job's data set, with the files that they name as their images."""
    data = data_of(source)
    if isinstance(prompt, ChatPrompt | BodyPrompt) and prompt.has_images:
        return WithImageFiles(data, prompt.file_digests)
    return data
