"""A base class for dataclasses that describe the rows of a batch, with `index_select` and `concat`.

`ModelInputs`, `SamplingInputs`, `JoiningRows` and the strategies' states derive from `Batched`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.device.transfer import upload


def row(pad: int | float = 0, *, optional: bool = False) -> Any:
    """Declare a field with one entry per row.

    The value is a Tensor [B, ...] on the device, a numpy array [B] on the host, a tuple of length
    B, or another `Batched` of B rows.

    Args:
        pad: the value that fills up the second axis of narrower tensors when `concat` joins batches
            of different widths.
        optional: the field may be None for the whole batch, and is None by default.
    """
    metadata = {"axis": "row", "pad": pad}
    return field(default=None, metadata=metadata) if optional else field(metadata=metadata)


def token(*, optional: bool = False) -> Any:
    """Declare a field with one entry per token: a Tensor [T, ...], row after row. An `optional`
    field may be None for the whole batch, and is None by default."""
    metadata = {"axis": "token"}
    return field(default=None, metadata=metadata) if optional else field(metadata=metadata)


@dataclass(frozen=True)
class Batched:
    """The base of frozen dataclasses whose fields are all declared with `row` or `token`."""

    def index_select(self, rows: npt.NDArray[np.int64]) -> Self:
        """Return the batch of the rows at the indices `rows` [N], in this order. If the class has a
        token field, all rows must have the same number of tokens."""
        index: Tensor | None = None
        picked: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            if isinstance(value, tuple):
                picked[f.name] = tuple(value[i] for i in rows)
                continue
            if isinstance(value, np.ndarray):
                picked[f.name] = value[rows]
                continue
            if isinstance(value, Batched):
                picked[f.name] = value.index_select(rows)
                continue
            if index is None:
                index = upload(rows, torch.int64, value.device)
            if f.metadata["axis"] == "token":
                per_row = value.unflatten(0, (self.num_rows, -1))
                picked[f.name] = per_row.index_select(0, index).flatten(0, 1)
            else:
                picked[f.name] = value.index_select(0, index)
        return type(self)(**picked)

    def first(self, rows: int, tokens: int) -> Self:
        """Return the first `rows` rows, which have `tokens` tokens together, as views."""
        ends = {"row": rows, "token": tokens}
        values = ((f, getattr(self, f.name)) for f in fields(self))
        cut = {f.name: v[: ends[f.metadata["axis"]]] for f, v in values if v is not None}
        return type(self)(**cut)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join batches into one that has the rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {}
        for f in fields(cls):
            values = [getattr(part, f.name) for part in parts]
            if values[0] is None:
                assert all(v is None for v in values), f"{f.name} of some parts only"
                continue
            if isinstance(values[0], tuple):
                joined[f.name] = sum(values, ())
                continue
            if isinstance(values[0], np.ndarray):
                joined[f.name] = np.concatenate(values)
                continue
            if f.metadata["axis"] == "row" and values[0].dim() > 1:
                width = max(v.shape[1] for v in values)
                pad = f.metadata["pad"]
                # F.pad takes (before, after) of the last axis first: only the second axis grows.
                values = [
                    F.pad(v, (0, 0) * (v.dim() - 2) + (0, width - v.shape[1]), value=pad)
                    for v in values
                ]
            joined[f.name] = torch.cat(values)
        return cls(**joined)

    @property
    def num_rows(self) -> int:
        """B, the number of rows of the batch."""
        for f in fields(self):
            if f.metadata["axis"] == "row":
                return len(getattr(self, f.name))
        raise AssertionError(f"{type(self).__name__} declares no row field")
