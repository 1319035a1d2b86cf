"""Random rows for the tests of linear attention, and how a row is run token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.linear_attention.delta_inputs import DeltaInputs, DeltaRecords
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads of a layer: nk, nv, dk, dv."""

    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    erases: bool = True  # else the rule is Mamba2's

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state(self, slots: int, fill: float = 0.0) -> Tensor:
        shape = (slots, self.value_heads, self.value_dim, self.key_dim)
        return torch.full(shape, fill, device=DEVICE)

    def records(self, slots: int, ring: int) -> DeltaRecords:
        """Records that hold NaN, so that one is noticed which is read but was not written."""
        shapes = (
            (self.value_heads, self.value_dim), (self.key_heads, self.key_dim), (self.value_heads,)
        )  # fmt: skip
        return DeltaRecords(
            *(torch.full((slots, ring, *shape), NAN, device=DEVICE) for shape in shapes)
        )

    def inputs(self, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> DeltaInputs:
        """Tokens whose decays and strengths are anything from nearly 0 to nearly 1."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(size, generator=generator) * scale

        # a and b stand in one tensor, as two projections that are computed together do.
        gates = normal(tokens, 2 * self.value_heads, scale=2.0).to(DEVICE, dtype)
        return DeltaInputs(
            normal(tokens, self.width).to(DEVICE, dtype),
            gates[:, self.value_heads :],
            gates[:, : self.value_heads] if self.erases else None,
            normal(self.value_heads).to(DEVICE),
            normal(self.value_heads).to(DEVICE),
            None if self.erases else normal(self.value_heads).to(DEVICE),
        )


def take(inputs: DeltaInputs, tokens: slice | list[int]) -> DeltaInputs:
    return inputs.take(torch.tensor(tokens) if isinstance(tokens, list) else tokens)


def prefill_rows(
    lengths: Sequence[int],
    first: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    snapshots: Sequence[Sequence[tuple[int, int]]] | None = None,
    *,
    on_host: bool = True,
) -> PrefillRows:
    """Rows of these lengths, which start at position 0 and in the slots 1, 2, … if not said."""
    first = [0] * len(lengths) if first is None else first
    slots = range(1, 1 + len(lengths)) if slots is None else slots
    positions = [torch.arange(p, p + n) for p, n in zip(first, lengths, strict=True)]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return PrefillRows(
        torch.tensor(list(slots), device=DEVICE),
        torch.cat(positions).to(DEVICE),
        starts.to(DEVICE),
        None if snapshots is None else torch.tensor(snapshots, device=DEVICE),
        tuple(lengths) if on_host else None,
    )


class Pending:
    """How many records of each slot are pending, and where they begin, as `RowStates` counts them.

    The ring is as long as steps of `width` tokens need it.
    """

    def __init__(self, slots: int, width: int, fold: int, device: str = DEVICE) -> None:
        self.ring, self.fold = fold - 1 + 2 * width, fold
        self.count, self.first = (
            torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2)
        )

    def rows(self, slots: Sequence[int], width: int) -> StepRows:
        index = torch.tensor(list(slots), device=self.count.device)
        return StepRows(index, self.count, self.first, width, self.fold)

    def accept(self, counts: Mapping[int, int]) -> None:
        """Keep so many of the records that each of these slots got in the last step."""
        for slot, count in counts.items():
            pending = int(self.count[slot])
            folded = pending // self.fold * self.fold
            self.first[slot] = (self.first[slot] + folded) % self.ring
            self.count[slot] = pending - folded + count

    def settle(self, slots: Sequence[int]) -> StepRows:
        """The rows of a step without tokens that folds all that is pending."""
        return self.rows(slots, 0)._replace(fold=1)


def prefill_on_cpu(rows: PrefillRows) -> PrefillRows:
    snapshots = None if rows.snapshots is None else rows.snapshots.cpu()
    return rows._replace(
        slots=rows.slots.cpu(),
        positions=rows.positions.cpu(),
        starts=rows.starts.cpu(),
        snapshots=snapshots,
    )


def inputs_on_cpu(inputs: DeltaInputs) -> DeltaInputs:
    moved = (None if x is None else x.cpu() for x in inputs)
    return DeltaInputs(*moved)  # type: ignore[arg-type]  # b alone may be None


def plain_row(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """[T, nv, dv] and the state after the row, token by token in float64.

    Args:
        state: [nv, dv, dk], the state before the row.
    """
    state = state.double().cpu()
    value_heads, value_dim, key_dim = state.shape
    values = value_heads * value_dim
    keys = (inputs.qkv.shape[1] - values) // 2
    qkv, a, b, a_log, dt_bias, skip = (None if x is None else x.double().cpu() for x in inputs)
    assert qkv is not None and a is not None and a_log is not None and dt_bias is not None
    out = torch.zeros(len(qkv), value_heads, value_dim, dtype=torch.float64)
    for t in range(len(qkv)):
        for head in range(value_heads):
            at = head * keys // (key_dim * value_heads) * key_dim
            q, k = (qkv[t, base + at : base + at + key_dim] for base in (0, keys))
            if b is not None:
                q = q / (q.square().sum() + 1e-6).sqrt() / math.sqrt(key_dim)
                k = k / (k.square().sum() + 1e-6).sqrt()
            v = qkv[t, 2 * keys + head * value_dim :][:value_dim]
            step = torch.nn.functional.softplus(a[t, head] + dt_bias[head])
            decayed = state[head] * torch.exp(-a_log[head].exp() * step)
            update = step * v if b is None else torch.sigmoid(b[t, head]) * (v - decayed @ k)
            state[head] = decayed + update[:, None] * k
            out[t, head] = state[head] @ q + (0 if skip is None else skip[head] * v)
    return out, state
