"""The values of one row's columns of context scope, as they arrive on the host.

A column of context scope has a value for every token that the model has read, the prompt's among
them. `ContextReader` copies the values from the device part by part, and each `Sequence` collects
its row's parts in a `ContextRows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.device.transfer import Download
from batchgen.engine.interface.outputs import OutputColumn


class ContextRows:
    """The values of one row's columns of context scope that were read so far.

    Attributes:
        num_tokens: the number of the row's first tokens whose values were read.
    """

    def __init__(
        self, columns: Mapping[str, npt.NDArray[Any]] | None = None, num_tokens: int = 0
    ) -> None:
        """Begin with the values [num_tokens, *tail] of each column, by name, if some are known."""
        self.num_tokens = num_tokens
        self._known = columns or {}
        self._lengths = [num_tokens]  # of what is known, and then of each part
        self._parts: list[Mapping[str, Download]] = []

    def add(self, part: Mapping[str, Download], num_tokens: int) -> None:
        """Append the values of the next `num_tokens` tokens, which may still be on their way.

        Args:
            part: maps each column's name to its values, [num_tokens, *tail].
        """
        self._parts.append(part)
        self._lengths.append(num_tokens)
        self.num_tokens += num_tokens

    def array(self, column: OutputColumn, start: int = 0) -> npt.NDArray[Any]:
        """Return one column from a token on as [num_tokens - start, *tail], waiting for what is
        still on its way."""
        none = np.empty((0, *column.tail_shape), column.dtype)
        arrays, end = [none], 0
        for number, length in enumerate(self._lengths):
            end += length
            if end > start:
                values = self._parts[number - 1][column.name].wait() if number else None
                values = self._known[column.name] if values is None else values
                arrays.append(values[max(length - (end - start), 0) :])
        return np.concatenate(arrays)
