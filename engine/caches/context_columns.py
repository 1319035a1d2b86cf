"""Collects the values of one row's columns of context scope on the host.

A column of context scope has a value for every token that the model has read, including prompt
tokens. `ContextReader` copies the values from the device part by part; each `Sequence` has a
`ContextRows` that collects its row's parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.device.transfer import Download
from batchgen.engine.interface.outputs import OutputColumn


class ContextRows:
    """The values read so far of one row's columns of context scope.

    Attributes:
        num_tokens: the number of the row's first tokens whose values were read.
    """

    def __init__(
        self, columns: Mapping[str, npt.NDArray[Any]] | None = None, num_tokens: int = 0
    ) -> None:
        """Start with the values [num_tokens, *tail] of each column, by name, of a row that an
        earlier engine began."""
        self.num_tokens = num_tokens
        self._known = columns or {}
        self._lengths = [num_tokens]  # the number of tokens in `_known`, then in each part
        self._parts: list[Mapping[str, Download]] = []

    def add(self, part: Mapping[str, Download], num_tokens: int) -> None:
        """Append the values of the next `num_tokens` tokens, which may still be being copied.

        Args:
            part: maps each column's name to its values, [num_tokens, *tail].
        """
        self._parts.append(part)
        self._lengths.append(num_tokens)
        self.num_tokens += num_tokens

    def array(self, column: OutputColumn, start: int = 0) -> npt.NDArray[Any]:
        """Return one column's values from token `start` on, [num_tokens - start, *tail]. Waits for
        copies that are not finished."""
        empty = np.empty((0, *column.tail_shape), column.dtype)
        arrays, end = [empty], 0
        for number, length in enumerate(self._lengths):
            end += length
            if end > start:  # number 0 is `_known`, then come the parts
                values = self._parts[number - 1][column.name].wait() if number else None
                values = self._known[column.name] if values is None else values
                arrays.append(values[max(length - (end - start), 0) :])
        return np.concatenate(arrays)
