"""Linear layers with a common input that share a merged weight, so that they are one matrix
product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from batchgen.engine.layers.four_bit_slot import FourBitSlot
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.linear import Linear, empty_fp8, empty_parameter
from batchgen.engine.layers.packed_format import FourBitFormat
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.lora.lora_targets import LoRATarget
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.fp8.fp8_linear import fp8_linear
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8Weight
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows
from batchgen.kernels.layers.linear import linear
from batchgen.kernels.lora.lora import LoRAPart


class MergedLinear(Linear):
    """A linear layer y = x Wᵀ + b whose weight W stacks several named projections of x.

    A checkpoint may hold each projection in a separate tensor, or all in one under this module's
    name.

    Args:
        parts: maps a projection's name in checkpoints to its output features on this rank, in the
            order of the output.
        arrange: maps a projection's name to a function that reorders a checkpoint's weight or bias
            (features on the first axis) into the order of the output.
        shards: maps a projection's name to this rank's share, in the order of checkpoints.
        unquantised: the last projections, which are never quantised to FP8.

    Attributes:
        tail: the weight of projections that are not quantised, if others are FP8; None while
            `weight` holds all projections.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        where: Placement,
        arrange: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        shards: Mapping[str, Shard] | None = None,
        unquantised: Collection[str] = (),
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, where=where)
        self.parts = dict(parts)
        self._arrange = dict(arrange or {})
        self._shards = dict(shards or {})
        self._unquantised = frozenset(unquantised)
        self._in_fp8: tuple[str, ...] = ()  # the projections in FP8, which are the first ones
        self.tail: nn.Parameter | None = None

    def quantise(self, form: FP8Format | FourBitFormat, path: str) -> None:
        """Keep the weights of the projections in FP8 or 4 bits, as in `Linear.quantise`.

        128 rows share an FP8 scale if all projections have multiples of 128 features in the
        checkpoint's order; otherwise each row has its own. Raises ValueError if a projection is
        excluded and a later one is not.
        """
        if isinstance(form, FourBitFormat):
            # Checkpoints list the merged layer, or each projection.
            parts = (form.excludes(_sibling(path, name)) for name in self.parts)
            if not self._unquantised and not (form.excludes(path) and any(parts)):
                self.keep_four_bits(form)
            return
        names = list(self.parts)
        kept = [name for name in names if self._stays(name, form, path)]
        first = len(names) - len(kept)
        if kept != names[first:]:
            raise ValueError(
                f"modules_to_not_convert excludes {_sibling(path, kept[0])}, which is computed "
                f"together with {', '.join(set(names) - set(kept))}: exclude all of them or none"
            )
        if not first:
            return
        self.form, self._in_fp8 = form, tuple(names[:first])
        if not form.native:
            return
        depth, device = self.in_features, self.weight.device
        sizes = [self.parts[name] for name in self._in_fp8]
        aligned = not self._arrange and all(size % BLOCK == 0 for size in sizes)
        self.weight, self.scales = empty_fp8(
            sum(sizes), depth, device=device, scale_rows=BLOCK if aligned else 1
        )
        if kept:
            rest = self.out_features - sum(sizes)
            self.tail = empty_parameter(rest, depth, device=device, dtype=self._dtype)

    def _stays(self, name: str, form: FP8Format, path: str) -> bool:
        excluded = form.excludes(path) or form.excludes(_sibling(path, name))
        return excluded or name in self._unquantised

    def _compute_fp8(self, x: Tensor | FP8Rows) -> Tensor:
        if self.tail is None:
            return super()._compute_fp8(x)
        assert isinstance(x, Tensor) and self.scales is not None and self.form is not None
        assert self.bias is None, "no layer with a tail needs one"
        rows = quantise_rows(x, powers_of_two=self.form.powers_of_two)
        out = torch.empty((len(x), self.out_features), dtype=self._dtype, device=x.device)
        first, last = out.tensor_split([len(self.weight)], dim=1)
        weight = FP8Weight(self.weight, self.scales)
        fp8_linear(rows, weight, dtype=self._dtype, out=first, rules=self.rules)
        last.copy_(linear(x, self.tail))
        return out

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield a weight slot for each projection, and one for all of them together."""
        start, names = 0, [_sibling(path, part) for part in self.parts]
        for (part, size), name in zip(self.parts.items(), names, strict=True):
            source = f"{name}.weight"
            combine, shard = self._arranged(part, source), self._shards.get(part)
            if (packed := self.in_four_bits) is not None:
                rows, sources = packed.rows(start, start + size), (source,)
                yield FourBitSlot(rows.words, sources, sources, combine, shard=shard, panels=rows)
            else:
                values, scales = self._rows(start, size)
                form = self.form if part in self._in_fp8 else None
                yield WeightSlot(
                    values, (source,), (source,), combine, form=form, scales=scales, shard=shard
                )
            start += size
        whole = f"{path}.weight"
        pieces = tuple(f"{name}.weight" for name in names)
        combine, shard = self._all_arranged(whole), self._whole_shard()
        if (packed := self.in_four_bits) is not None:
            yield FourBitSlot(self.weight, pieces, (whole,), combine, shard=shard, panels=packed)
        elif len(self._in_fp8) in (0, len(self.parts)):
            yield WeightSlot(
                self.weight, pieces, (whole,), combine, form=self.form, scales=self.scales,
                shard=shard,
            )  # fmt: skip
        if self.bias is not None:
            yield from self._bias_slots(self.bias, path, [f"{name}.bias" for name in names])

    def lora_targets(self, path: str) -> Iterator[LoRATarget]:
        """Yield each projection under its own name, and under that of the merged weight."""
        # `start` counts the features on this rank, `first` those of the checkpoint's merged weight.
        start = first = 0
        for name, size in self.parts.items():
            shard, part = self._shards.get(name), LoRAPart(start, size)
            target = LoRATarget(_sibling(path, name), part, self._arrange.get(name), rows=shard)
            yield target
            last = first + target.out_features
            yield replace(target, name=path, within=(first, last))
            start, first = start + size, last

    def _rows(self, start: int, size: int) -> tuple[Tensor, Tensor | None]:
        """Return rows of the weight, with their scales if they are FP8."""
        if self.tail is not None and start >= len(self.weight):
            return self.tail[start - len(self.weight) :][:size], None
        values = self.weight[start : start + size]
        if self.scales is None:
            return values, None
        share = FP8Weight(self.weight, self.scales).scale_rows
        return values, self.scales[start // share : (start + size) // share]

    def _bias_slots(self, bias: Tensor, path: str, names: list[str]) -> Iterator[WeightSlot]:
        slices = bias.split(list(self.parts.values()))
        for part, name, values in zip(self.parts, names, slices, strict=True):
            arranged, shard = self._arranged(part, name), self._shards.get(part)
            yield WeightSlot(values, (name,), (name,), arranged, shard=shard)
        whole = f"{path}.bias"
        combine, shard = self._all_arranged(whole), self._whole_shard()
        yield WeightSlot(bias, tuple(names), (whole,), combine, shard=shard)

    def _whole_shard(self) -> Shard | None:
        """Return this rank's features of a tensor of all projections; None if no projection is
        divided."""
        if not self._shards:
            return None
        start, ranges = 0, []
        for part, size in self.parts.items():
            shard = self._shards.get(part, Shard(0, size, ((0, size),)))
            ranges += [(start + first, start + end) for first, end in shard.ranges]
            start += shard.size
        return Shard(0, start, tuple(ranges))

    def _arranged(self, part: str, name: str) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        """Return a function that reorders a projection's tensor; None if the order is right."""
        arrange = self._arrange.get(part)
        return None if arrange is None else lambda tensors: arrange(tensors[name])

    def _all_arranged(self, name: str) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        """Return a function that reorders a tensor of all projections; None if the order is
        right."""
        if not self._arrange:
            return None

        def combined(tensors: Mapping[str, Tensor]) -> Tensor:
            pieces = tensors[name].split(list(self.parts.values()))
            arranged = (self._arrange.get(part) for part in self.parts)
            pairs = zip(arranged, pieces, strict=True)
            return torch.cat([rows if put is None else put(rows) for put, rows in pairs])

        return combined


def _sibling(path: str, part: str) -> str:
    """Return a projection's name in checkpoints: `path`, the merged layer's name, with its last
    part replaced by `part`, as in "self_attn.qkv_proj", "q_proj" -> "self_attn.q_proj"."""
    return f"{path.rpartition('.')[0]}.{part}"
