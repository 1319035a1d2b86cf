"""A toy model with recurrent layers between layers of attention, as a model file would have it.

Its recurrence is gated and elementwise, s ← a·s + (1 − a)·(x + x₋₁ / 2), with the input of the
token before as a second part of the state. Gates are x / (1 + |x|), so that every operation is
rounded exactly and a token has the same bits wherever it stands in a tensor. Every layer records
two of `ROUTES` numbers for each token, as a router would.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers import PretrainedConfig

from batchgen.engine.caches.cache_specs import CacheSpec, KVSpec, StateSpec, StateTensor
from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens, RowMetadata
from batchgen.engine.caches.row_states import StateCache
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.feed_forward.mlp import GatedMLP
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.mixers.attention import Attention
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.rotary import DefaultRope, RotaryTable
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_config import FamilyConfig, ModelConfig
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import Stream
from batchgen.kernels.fp8.quantise import FP8Rows
from batchgen.kernels.linear_attention.state_rows import StepRows

ARCHITECTURE = "ToyHybridForCausalLM"
ROUTES = 16
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig(FamilyConfig):
    """Attributes:
    num_heads, num_kv_heads, head_dim: of the layers of attention.
    layer_types: of each layer, `a` for attention and `r` for a recurrence.
    chunk_multiple: prefills are cut at multiples of so many tokens.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    layer_types: str = "rarr"
    chunk_multiple: int = 1


def toy_config(*, vocab_size: int = 128, hidden_size: int = 64, **family: Any) -> ModelConfig:
    toy = ToyConfig(**family)
    return ModelConfig(
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        num_layers=len(toy.layer_types),
        vocab_size=vocab_size,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype=torch.float32,
        family=toy,
    )


class ToyHFConfig(PretrainedConfig):
    model_type = "toy_hybrid"


class GatedRecurrence(nn.Module):
    """residual + out(s · gate), with a state per row."""

    def __init__(
        self, layer: int, size: int, chunk_multiple: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        parts = {"decay_proj": size, "value_proj": size, "gate_proj": size}
        self.in_proj = MergedLinear(size, parts, bias=True, where=Placement(device, dtype))
        self.out_proj = Linear(size, size, bias=False, where=Placement(device, dtype))
        one = StateTensor((size,))
        self.cache_spec: CacheSpec | None = StateSpec(
            state={"sum": one, "before": one},
            records={"decay": one, "update": one, "value": one},
            chunk_multiple=chunk_multiple,
        )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos_sin: Tensor | None,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
    ) -> Stream:
        decay, value, gate = self.in_proj(hidden).float().chunk(3, -1)
        decay, gate = _gate(decay), _gate(gate)
        cache, mixed, start = ctx.cache(self.layer, StateCache), torch.empty_like(value), 0
        for part in ctx.rows:
            tokens = slice(start, start := start + len(part.positions))
            inputs = decay[tokens].contiguous(), value[tokens].contiguous()
            if part.width is not None:
                mixed[tokens] = _decode(*inputs, cache, part)
            elif value.is_cuda:
                mixed[tokens] = _prefill_triton(*inputs, cache, part)
            else:
                mixed[tokens] = _prefill(*inputs, cache, part)
        assert start == len(hidden)
        out = (mixed * gate).to(residual.dtype)
        if outputs is not None:
            out, residual = out[outputs.index], residual[outputs.index]
        return self.out_proj.add_to(residual, out)


def _gate(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * (x / (1 + x.abs()))


def _update(decay: Tensor, value: Tensor, before: Tensor) -> Tensor:
    return (1 - decay) * (value + 0.5 * before)


def _decode(decay: Tensor, value: Tensor, cache: StateCache, rows: RowMetadata) -> Tensor:
    """[B · W, size] each: fold the pending records, then run W tokens and leave theirs."""
    assert rows.width is not None
    slots, width = rows.slots, rows.width
    step = StepRows(slots, cache.pending, cache.first, width, cache.fold)
    ring = cache.records["decay"].shape[1]
    pending, entries, new = step.ring_entries(ring)
    pending = pending.unsqueeze(1)
    written = pending - pending % cache.fold  # so many are in the state that is written back
    state, before = cache.state["sum"][slots], cache.state["before"][slots]
    back = state, before
    records = {name: values[slots[:, None], entries] for name, values in cache.records.items()}
    for j in range(ring):
        folded = records["decay"][:, j] * state + records["update"][:, j]
        state = torch.where(j < pending, folded, state)
        before = torch.where(j < pending, records["value"][:, j], before)
        back = torch.where(j < written, state, back[0]), torch.where(j < written, before, back[1])
    for name, values in zip(("sum", "before"), back, strict=True):
        cache.state[name].index_copy_(0, slots, values)
    decay, value = decay.unflatten(0, (-1, width)), value.unflatten(0, (-1, width))
    out = []
    for j in range(width):
        update = _update(decay[:, j], value[:, j], before)
        state, before = decay[:, j] * state + update, value[:, j]
        out.append(state)
        for name, made in (("decay", decay[:, j]), ("update", update), ("value", value[:, j])):
            cache.records[name][slots, new[:, j]] = made
    return torch.stack(out, 1).flatten(0, 1)


def _prefill(decay: Tensor, value: Tensor, cache: StateCache, rows: RowMetadata) -> Tensor:
    """[T, size] each: token by token, row by row."""
    assert rows.query_lens is not None
    out, first = torch.empty_like(value), 0
    for row, length in enumerate(rows.query_lens):
        slot = int(rows.slots[row])
        state, before = cache.state["sum"][slot].clone(), cache.state["before"][slot].clone()
        if not rows.positions[first]:
            state, before = torch.zeros_like(state), torch.zeros_like(before)
        wanted = [] if rows.snapshots is None else rows.snapshots[row].tolist()
        for count, t in enumerate(range(first, first + length), start=1):
            state = decay[t] * state + _update(decay[t], value[t], before)
            before = value[t]
            out[t] = state
            for tokens, target in wanted:
                if tokens == count:
                    cache.state["sum"][target], cache.state["before"][target] = state, before
        cache.state["sum"][slot], cache.state["before"][slot] = state, before
        first += length
    return out


def _prefill_triton(decay: Tensor, value: Tensor, cache: StateCache, rows: RowMetadata) -> Tensor:
    """`_prefill`, with rows whose numbers of tokens are known on the device only."""
    out = torch.zeros_like(value)
    none = torch.zeros((len(rows.slots), 1, 2), dtype=torch.int64, device=value.device)
    snapshots = none if rows.snapshots is None else rows.snapshots
    _scan[(len(rows.slots),)](
        decay, value, out, cache.state["sum"], cache.state["before"], rows.slots, rows.starts,
        rows.positions, snapshots, cache.state["sum"].stride(0), snapshots.shape[1],
        SIZE=value.shape[1],
    )  # fmt: skip
    return out


@triton.jit
def _scan(
    decay_ptr, value_ptr, out_ptr, sum_ptr, before_ptr, slots_ptr, starts_ptr, positions_ptr,
    snapshots_ptr, stride, num_snapshots, SIZE: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0), tl.arange(0, SIZE)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if start < end:
        slot = tl.load(slots_ptr + row) * stride
        fresh = tl.load(positions_ptr + start) == 0
        state = tl.where(fresh, 0.0, tl.load(sum_ptr + slot + lane))
        before = tl.where(fresh, 0.0, tl.load(before_ptr + slot + lane))
        for t in range(start, end):
            decay = tl.load(decay_ptr + t * SIZE + lane)
            value = tl.load(value_ptr + t * SIZE + lane)
            update = (1 - decay) * (value + 0.5 * before)
            state = decay * state + update
            before = value
            tl.store(out_ptr + t * SIZE + lane, state)
            for i in range(num_snapshots):
                entry = snapshots_ptr + (row * num_snapshots + i) * 2
                if tl.load(entry) == t - start + 1:
                    target = tl.load(entry + 1) * stride
                    tl.store(sum_ptr + target + lane, state)
                    tl.store(before_ptr + target + lane, before)
        tl.store(sum_ptr + slot + lane, state)
        tl.store(before_ptr + slot + lane, before)


class RecordingMLP(GatedMLP):
    """An MLP that says of each token which two of its first inputs are largest."""

    def __init__(self, layer: int, column: OutputColumn, size: int, **more: Any) -> None:
        super().__init__(size, 2 * size, bias=False, **more)
        self.layer, self.column = layer, column

    def forward(self, x: Tensor | FP8Rows, residual: Tensor | None, ctx: ForwardContext) -> Stream:
        if self.column.name in ctx.columns:
            assert isinstance(x, Tensor)
            ctx.record(self.column, x[:, :ROUTES].topk(2).indices, self.layer)
        return super().forward(x, residual, ctx)


class ToyHybridForCausalLM(CausalLM):
    """Attention and recurrences, in any order."""

    @classmethod
    def hf_config(cls) -> type[PretrainedConfig]:
        return ToyHFConfig

    @classmethod
    def config_from_hf(cls, hf: PretrainedConfig) -> ModelConfig:
        return replace(
            toy_config(
                vocab_size=hf.vocab_size,
                hidden_size=hf.hidden_size,
                layer_types=hf.toy_layer_types,
                chunk_multiple=hf.toy_chunk_multiple,
            )
        )

    @classmethod
    def declared_columns(cls, config: ModelConfig) -> tuple[OutputColumn, ...]:
        return (OutputColumn("toy_route", np.dtype(np.uint8), (config.num_layers, 2), "context"),)

    def make_layer(self, index: int) -> DecoderLayer:
        toy, size = self.config.family_as(ToyConfig), self.config.hidden_size
        device, dtype = self.device, self.dtype
        mixer: Attention | GatedRecurrence
        if toy.layer_types[index] == "a":
            shape = KVSpec(toy.num_heads, toy.num_kv_heads, toy.head_dim)
            mixer = Attention(
                index,
                size,
                shape,
                qkv_bias=False,
                output_bias=False,
                where=self.where,
            )
        else:
            mixer = GatedRecurrence(index, size, toy.chunk_multiple, device, dtype)
        (column,) = self.declared_columns(self.config)
        return DecoderLayer(
            mixer,
            RecordingMLP(index, column, size, where=self.where),
            before=(self.make_norm(), self.make_norm()),
            mixer_name="self_attn" if toy.layer_types[index] == "a" else "recurrence",
        )

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, EPS, where=self.where)

    def make_rotaries(self) -> list[RotaryTable | None]:
        toy = self.config.family_as(ToyConfig)
        positions = self.config.max_position_embeddings
        table = RotaryTable(DefaultRope(10000.0), toy.head_dim, positions, self.device)
        return [table] * self.config.num_layers


def fill(model: CausalLM, seed: int = 0) -> None:
    """Random weights under which tokens differ and depend on what came before."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for slot in model.checkpoint_slots():
            if len(slot.pieces) == 1:
                values = torch.randn(slot.parameter.shape, generator=generator) * 0.25
                slot.parameter.copy_(values + 1 if slot.dummy == 1.0 else values)


def make_toy(device: str = "cpu", **config: Any) -> ToyHybridForCausalLM:
    """A toy of random weights, the same on every call and device."""
    model = ToyHybridForCausalLM(
        toy_config(**config), device=torch.device(device), dtype=torch.float32
    )
    fill(model)
    return model


def write_toy(folder: Path, *, layer_types: str = "rarr", vocab_size: int = 128) -> Path:
    """A folder that a job can open, with weights."""
    from safetensors.torch import save_file

    model = make_toy(layer_types=layer_types, vocab_size=vocab_size)
    tensors = {
        slot.sources[0]: slot.parameter.detach().clone().contiguous()
        for slot in model.checkpoint_slots()
        if len(slot.pieces) == 1
    }
    save_file(tensors, folder / "model.safetensors")
    values = {
        "architectures": [ARCHITECTURE],
        "model_type": "toy_hybrid",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "toy_layer_types": layer_types,
        "toy_chunk_multiple": 1,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def naive_logits(model: ToyHybridForCausalLM, ids: list[int]) -> tuple[Tensor, Tensor]:
    """[T, vocab] logits and [T, layers, 2] routes of a whole row, in float64 and without caches."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    toy = model.config.family_as(ToyConfig)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weights[name]

    rotary = model.model.rotaries[0]
    assert rotary is not None
    cos, sin = rotary(torch.arange(len(ids))).double().chunk(2, -1)
    x = weights["model.embed_tokens.weight"][ids]
    routes = []
    for i, kind in enumerate(toy.layer_types):
        at = f"model.layers.{i}."
        h = norm(x, at + "mixer_norm.weight")
        if kind == "r":
            projected = h @ weights[at + "mixer.in_proj.weight"].T
            projected = projected + weights[at + "mixer.in_proj.bias"]
            decay, value, gate = projected.chunk(3, -1)
            decay, gate = _gate(decay), _gate(gate)
            state, before, out = torch.zeros_like(value[0]), torch.zeros_like(value[0]), []
            for t in range(len(ids)):
                state = decay[t] * state + _update(decay[t], value[t], before)
                before = value[t]
                out.append(state * gate[t])
            x = x + torch.stack(out) @ weights[at + "mixer.out_proj.weight"].T
        else:
            qkv = (h @ weights[at + "mixer.qkv_proj.weight"].T).unflatten(-1, (-1, toy.head_dim))
            q, k, v = qkv.split([toy.num_heads, toy.num_kv_heads, toy.num_kv_heads], 1)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            group = toy.num_heads // toy.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            score = torch.einsum("ihd,jhd->hij", q, k) * toy.head_dim**-0.5
            unseen = torch.ones(len(ids), len(ids)).triu(1).bool()
            weight = score.masked_fill(unseen, float("-inf")).softmax(-1)
            out_ = torch.einsum("hij,jhd->ihd", weight, v).flatten(1)
            x = x + out_ @ weights[at + "mixer.o_proj.weight"].T
        h = norm(x, at + "mlp_norm.weight")
        routes.append(h[:, :ROUTES].topk(2).indices)
        inner, up = (h @ weights[at + "mlp.gate_up_proj.weight"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(inner) * up) @ weights[at + "mlp.down_proj.weight"].T
    x = norm(x, "model.norm.weight")
    return x @ weights["lm_head.weight"].T, torch.stack(routes, 1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)
