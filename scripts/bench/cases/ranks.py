"""Cases of bench_kernels.py: a layer's experts divided among ranks (GPUs), in two ways. A rank has
all experts, each cut in width, or fewer whole ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from cases import experts, mxfp4
from cases.experts import ROUTINGS, SHAPES, Batch, Shape
from measuring import Case, Launch
from torch import Tensor

from batchgen.kernels.moe.experts_triton import grouped_mlp_triton
from batchgen.kernels.moe.moe_align_triton import moe_align
from batchgen.kernels.moe.tiled_layout import PANEL


def rank_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield three cases of one rank's work: experts cut in width, to whole panels of 64 columns;
    whole experts, on average over the ranks; and whole experts on the rank with the most tiles."""
    shape = SHAPES[options.shape]
    for ranks, tokens in product((2, 4), options.tokens):
        batch, share = Batch(shape, tokens), shape.experts // ranks  # share: experts of a rank

        def rank_ids(ids: Tensor, rank: int) -> Tensor:  # indices; `share` for other ranks' experts
            return (ids % share).masked_fill_(ids // share != rank, share)  # noqa: B023

        def num_tiles(ids: Tensor) -> int:
            return int(moe_align(ids, share, 16, some_elsewhere=True).num_tiles)  # noqa: B023

        cut = shape._replace(inner=-(-shape.inner // (PANEL * ranks)) * PANEL)
        whole = shape._replace(experts=share)
        all_ranks = [rank_ids(ids, rank) for rank in range(ranks) for ids in batch.ids]
        busiest = [max(all_ranks[i::ROUTINGS], key=num_tiles) for i in range(ROUTINGS)]
        yield batch.case(f"{ranks} ranks, cut", _launch(options.shape, cut, batch, batch.ids))
        mean = batch.case("  whole, mean", _launch(options.shape, whole, batch, all_ranks))
        yield replace(mean, count=len(all_ranks))
        yield batch.case("  whole, busiest", _launch(options.shape, whole, batch, busiest))


def _launch(name: str, shape: Shape, batch: Batch, ids: Sequence[Tensor]) -> Launch:
    """Make a layer of experts, of gpt-oss in MXFP4, and return what computes it for `ids[i]`."""
    layer, routed = (mxfp4 if "gpt-oss" in name else experts).make_layer(shape), batch.shape.experts

    def launch(i: int) -> Tensor:
        inputs = batch.x, layer.experts, ids[i], batch.weights[i % ROUTINGS]
        return grouped_mlp_triton(*inputs, epilogues=layer.epilogues, num_routed=routed)

    return launch
