"""Time latent attention beside the floor of its bytes and operations.

    python scripts/bench/bench_latent_attention.py [--shape v2-lite] [--width 1,4]

Needs a GPU. A decode step is timed with the products that absorb the map to keys and values, and a
prefill in both forms: expanded with its gathering and its product, and absorbed. Each time is that
of a launch in a CUDA graph, on the caches of several layers in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_layers import microseconds
from device_rates import Rates, measure_rates
from torch import Tensor

from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.kernels.attention.attention import AttentionMetadata
from batchgen.kernels.attention.kv_gather import upload
from batchgen.kernels.attention.prefill_plan import cut_tiles, tile_tokens
from batchgen.kernels.mla.latent_prepare import prepare_latent
from batchgen.kernels.mla.mla_attention import attend_part

DTYPE = torch.bfloat16
LATENT, ROTATED, BLOCK_SIZE = 512, 64, 16
SCALE = 0.1
DECODES = ((1, 4096), (1, 32768), (32, 1024), (256, 1024), (512, 600), (512, 2048))
"""The rows of a decode step, and the tokens of each one's context."""
PREFILLS = ((8192, 8192, 0), (8192, 1024, 0), (16384, 1536, 0), (512, 512, 2048), (64, 64, 8192))
"""The new tokens of a prefill, those of each of its rows, and the tokens before them in each."""
_LAYERS = 4


class Shape(NamedTuple):
    """Heads, and the values of a head's key that are not rotated and of its value."""

    heads: int
    key: int
    value: int


SHAPES = {"v2-lite": Shape(16, 128, 128), "glm": Shape(20, 192, 256)}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


class Layers:
    """The expansions and caches of some layers for rows of equal lengths, and their queries."""

    def __init__(self, shape: Shape, rows: int, new: int, context: int, width: int | None) -> None:
        where: dict[str, Any] = {"device": torch.device("cuda"), "dtype": DTYPE}
        blocks = -(-context // BLOCK_SIZE)
        order = torch.randperm(rows * blocks, device="cuda") + 1
        self.rows, self.new, self.context = rows, new, context
        positions = torch.arange(context - new, context, device="cuda").repeat(rows)
        self.meta = AttentionMetadata(
            positions, (new,) * rows, (context,) * rows, order.view(rows, blocks),
            decode_width=width,
        )  # fmt: skip
        self.planes = [
            random(rows * blocks + 1, BLOCK_SIZE, LATENT + ROTATED) for _ in range(_LAYERS)
        ]
        self.maps = [
            KVExpansion(shape.heads, LATENT, shape.key, shape.value, **where)
            for _ in range(_LAYERS)
        ]
        for expansion in self.maps:
            expansion.weight.normal_(0, 0.04)
        self.q = random(rows * new, shape.heads, shape.key + ROTATED)

    def absorbed(self) -> None:
        """Let prefills be absorbed, by tiles that are cut as for a captured graph."""
        heads, meta = self.q.shape[1], self.meta
        size = tile_tokens(heads, 1, LATENT + ROTATED, DTYPE)
        tiles = upload(cut_tiles(meta.query_lens, size, meta.context_lens), "cuda")
        self.meta = AttentionMetadata(
            meta.positions, meta.query_lens, meta.context_lens, meta.block_tables, {size: tiles}
        )

    def microseconds(self) -> float:
        runs = [
            partial(attend_part, self.q, plane, expansion, ROTATED, self.meta, SCALE)
            for plane, expansion in zip(self.planes, self.maps, strict=True)
        ]
        return microseconds(list(runs), least_launches=2 * _LAYERS)


def lines(shape: Shape, widths: list[int], rates: Rates) -> Iterator[str]:
    for rows, context in DECODES:
        for width in widths:
            layers = Layers(shape, rows, width, context, width)
            spent = layers.microseconds()
            floor = rows * context * (LATENT + ROTATED) * 2 / rates.bandwidth * 1e6
            yield (
                f"decode {rows} x {context}, width {width}: {spent:.1f} us, "
                f"floor of bytes {floor:.1f} ({floor / spent:.2f})"
            )
    for tokens, new, before in PREFILLS:
        layers = Layers(shape, tokens // new, new, before + new, None)
        spent = layers.microseconds()
        pairs = tokens * (before + new / 2)
        of_pair = 2 * shape.heads * (shape.key + ROTATED + shape.value)
        of_token = 2 * LATENT * shape.heads * (shape.key + shape.value)
        floor = (pairs * of_pair + tokens * of_token) / rates.flops * 1e6
        layers.absorbed()
        yield (
            f"prefill {tokens} of {new} after {before}: {spent:.1f} us, absorbed "
            f"{layers.microseconds():.1f}, floor of operations {floor:.1f} ({floor / spent:.2f})"
        )
    for tokens in (256, 8192):
        merged, plane = random(tokens, LATENT + ROTATED), random(tokens + 16, 1, LATENT + ROTATED)
        q, table = random(tokens, shape.heads, shape.key + ROTATED), random(tokens, ROTATED).float()
        weight, slots = random(LATENT), torch.arange(tokens, device="cuda")
        run = partial(prepare_latent, q, merged, weight, 1e-6, table, plane, slots)
        yield f"prepare {tokens}: {microseconds([run]):.1f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="v2-lite")
    parser.add_argument("--width", default="1,4", help="the tokens of a row in a decode step")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    rates = measure_rates(torch.device("cuda"))
    print(f"{rates.bandwidth / 1e12:.2f} TB/s, {rates.flops / 1e12:.0f} TFLOP/s")
    with torch.inference_mode():
        widths = [int(width) for width in options.width.split(",")]
        for line in lines(SHAPES[options.shape], widths, rates):
            print(line, flush=True)


if __name__ == "__main__":
    main()
