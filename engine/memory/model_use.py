"""The models that an engine runs, each with how it runs them: the numbers of tokens per row, and
the columns. `EngineParts` and the memory plan read the `ModelUse`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchgen.engine.caches.model_caches import (
    CacheSizes,
    ModelCaches,
    model_page_bytes,
    paged_token_bytes,
)
from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.execution.graph_shapes import GraphShapes, launch_bound_tokens
from batchgen.engine.interface.engine_config import ResolvedConfig
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.models.token_model import TokenModel


class ModelUse(NamedTuple):
    """A model and how a strategy runs it."""

    model: TokenModel  # on its device
    # All numbers of tokens per row that a decode forward of this model can have.
    widths: tuple[int, ...]
    forward_rows: int = 1  # the most rows in a decode forward for each row of the batch
    # The columns that the model records while it computes, for each token of the prompt and of the
    # answer (`context` in `OutputColumn.scope`).
    columns: tuple[OutputColumn, ...] = ()
    all_hidden: bool = False  # whether the hidden states of all prefill tokens are needed

    def caches(self, sizes: CacheSizes) -> ModelCaches:
        """Allocate the caches of the model's layers on its device."""
        model = self.model
        return ModelCaches.allocate(
            model.cache_specs,
            self.columns,
            sizes,
            width=max(self.widths),
            dtype=model.dtype,
            device=model.device,
        )

    def graph_shapes(self, config: ResolvedConfig) -> GraphShapes:
        """Choose the batch sizes that are captured as CUDA graphs for this model."""
        model = self.model
        # A context counts as short only if no layer's attention would split it.
        short_tokens = min(
            (
                config.rules.splits(config.max_num_seqs, shape.num_kv_heads, width=1).tokens
                for shape in model.attention_shapes
            ),
            default=0,
        )
        short_blocks = short_tokens // config.block_size
        if short_blocks >= config.row_blocks:
            short_blocks = 0  # no context is long, so that separate graphs would be equal
        num_layers = len(model.cache_specs)
        return GraphShapes(
            max_rows=config.max_num_seqs * self.forward_rows,
            max_blocks=config.row_blocks,
            chunk_tokens=config.chunk_tokens,
            prefill_tokens=launch_bound_tokens(
                num_layers, model.parameters_per_token, config.max_batched_tokens
            ),
            short_blocks=short_blocks,
            widths=self.widths,
            # Layers record a column's values for all tokens, the last layer too.
            all_tokens=bool(self.columns) or self.all_hidden,
            # If a prefill expands all latents of its contexts, its memory depends on the lengths of
            # the contexts, but the tensors of a graph have fixed sizes.
            reads_prompts=not (config.rules.expand_all_latents and model.has_latents),
        )


def cache_token_bytes(uses: Sequence[ModelUse]) -> int:
    """Return the bytes per token in the paged caches of all models."""
    return sum(
        paged_token_bytes(use.model.cache_specs, use.columns, use.model.dtype) for use in uses
    )


def page_bytes(uses: Sequence[ModelUse], layout: PageLayout, block_size: int) -> int:
    """Return the bytes of one page in the paged caches of all models."""
    return sum(
        model_page_bytes(use.model.cache_specs, use.columns, layout, block_size, use.model.dtype)
        for use in uses
    )


def weight_bytes(uses: Sequence[ModelUse]) -> int:
    """Return the bytes of the parameters of all models."""
    return sum(use.model.weight_bytes for use in uses)
