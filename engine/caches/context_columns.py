"""The values of a row's columns of context scope, as they arrive on the host."""

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

    def __init__(self) -> None:
        self.num_tokens = 0
        self._parts: list[Mapping[str, Download]] = []

    def add(self, part: Mapping[str, Download], num_tokens: int) -> None:
        """Append the values of the next `num_tokens` tokens, which may still be on their way.

        Args:
            part: maps each column's name to its values, [num_tokens, *tail].
        """
        self._parts.append(part)
        self.num_tokens += num_tokens

    def array(self, column: OutputColumn) -> npt.NDArray[Any]:
        """Return one column as [num_tokens, *tail], waiting for what is still on its way."""
        none = np.empty((0, *column.tail_shape), column.dtype)
        return np.concatenate([none, *(part[column.name].wait() for part in self._parts)])
