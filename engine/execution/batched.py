"""One generic `index_select` and `concat` for every dataclass that describes a batch's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.execution.transfer import upload


def row(pad: int | float = 0) -> Any:
    """A field with one entry per row: a Tensor [B, ...] on the device, or on the host a numpy
    array [B] or a tuple of length B.

    Rows of different widths are padded at the end of their second axis with `pad` when batches
    are joined.
    """
    return field(metadata={"axis": "row", "pad": pad})


def token() -> Any:
    """A Tensor field with one entry per token: [T, ...], the rows' tokens one after another."""
    return field(metadata={"axis": "token"})


@dataclass(frozen=True)
class Batched:
    """Base of frozen dataclasses whose every field was declared with `row` or `token`."""

    def index_select(self, rows: npt.NDArray[np.int64]) -> Self:
        """The batch of these rows, in this order. All rows must have the same number of tokens."""
        index: Tensor | None = None
        picked: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple):
                picked[f.name] = tuple(value[i] for i in rows)
                continue
            if isinstance(value, np.ndarray):
                picked[f.name] = value[rows]
                continue
            if index is None:
                index = upload(rows, torch.int64, value.device)
            if f.metadata["axis"] == "token":
                per_row = value.unflatten(0, (self.num_rows, -1))
                picked[f.name] = per_row.index_select(0, index).flatten(0, 1)
            else:
                picked[f.name] = value.index_select(0, index)
        return type(self)(**picked)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {}
        for f in fields(cls):
            values = [getattr(part, f.name) for part in parts]
            if isinstance(values[0], tuple):
                joined[f.name] = sum(values, ())
                continue
            if isinstance(values[0], np.ndarray):
                joined[f.name] = np.concatenate(values)
                continue
            if f.metadata["axis"] == "row" and values[0].dim() > 1:
                width = max(v.shape[1] for v in values)
                pad = f.metadata["pad"]
                values = [
                    F.pad(v, (0, 0) * (v.dim() - 2) + (0, width - v.shape[1]), value=pad)
                    for v in values
                ]
            joined[f.name] = torch.cat(values)
        return cls(**joined)

    @property
    def num_rows(self) -> int:
        for f in fields(self):
            if f.metadata["axis"] == "row":
                return len(getattr(self, f.name))
        raise AssertionError(f"{type(self).__name__} declares no row field")
