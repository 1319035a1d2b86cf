"""Pooled columns: the values that an embedding model or a classifier yields for a whole row.

Such a row generates no tokens. Its hidden states arrive in the order of its tokens, and a
`PooledValue` accumulates them one after another on the host, so that the result does not depend on
the chunks in which the prompt was read. Each `Sequence` has the pooled values of its row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.hidden_columns import CLASS_SCORES, EMBEDDING, Pooling
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.models.model_config import ModelConfig

_LEAST_NORM = 1e-12
"""An embedding is divided by its Euclidean norm, but at least by this number, as in torch's
`normalize`."""


def pooled_columns(config: ModelConfig) -> tuple[OutputColumn, ...]:
    """Return the columns of row scope that a model of this configuration has."""
    dtype = np.dtype(np.float32)
    embedding = OutputColumn(EMBEDDING, dtype, (config.hidden_size,), scope="row")
    if config.labels is None:
        return (embedding,)
    names = tuple((f"label_{i}", name) for i, name in enumerate(config.labels))
    shape = (len(config.labels),)
    return embedding, OutputColumn(CLASS_SCORES, dtype, shape, scope="row", metadata=names)


class PooledValue:
    """The value [*tail] of a column of row scope, accumulated over the tokens read so far.

    Args:
        column: the column, whose `tail_shape` is the shape of the value.
        pooling: how the tokens' values become one: the last token's, the first token's, or the
            mean.
        normalise: whether the value is divided by its Euclidean norm.
    """

    def __init__(self, column: OutputColumn, pooling: Pooling, *, normalise: bool) -> None:
        is_embedding = column.name == EMBEDDING
        self._pooling: Pooling = pooling if is_embedding else "last"
        self._normalise = normalise and is_embedding
        self._value = np.full(column.tail_shape, np.nan, np.float64)
        self._length = 0

    def extend(self, rows: npt.NDArray[Any]) -> None:
        """Add the values [n, *tail] of the next n tokens."""
        for row in rows:
            if self._pooling == "last" or not self._length:
                self._value = row.astype(np.float64)
            elif self._pooling == "mean":
                self._value += row
            self._length += 1

    def __len__(self) -> int:
        return self._length

    def array(self, start: int = 0) -> npt.NDArray[Any]:
        """Return the value, [*tail] float32; NaN if no token was read. `start` must be 0."""
        assert start == 0
        value = self._value
        if self._pooling == "mean" and self._length:
            value = value / self._length
        if self._normalise:
            value = value / max(math.sqrt(float(np.square(value).sum())), _LEAST_NORM)
        result: npt.NDArray[Any] = value.astype(np.float32)
        return result
