"""Builds the engine that a job would have, without weights: models, settings and memory plan.

The forecast and the planner call `estimate_engine` and read sizes from the `EngineEstimate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.caches.model_caches import row_bytes, window_token_bytes
from batchgen.engine.engine_models import model_uses
from batchgen.engine.interface.engine_config import ResolvedConfig, Sizes
from batchgen.engine.layers.mxfp4_format import Units, format_name
from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.engine.memory.expected_memory import expected_memory
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.engine.memory.model_use import ModelUse, cache_token_bytes, weight_bytes
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.strategy import TARGET
from batchgen.inputs.model.engine_recipe import bare
from batchgen.inputs.model.other_models import strategy_heads
from batchgen.jobs.forecast.step_cost import ModelSizes
from batchgen.util.text.text_table import size_text

if TYPE_CHECKING:
    from batchgen.jobs.resolve.opened_job import OpenedJob


@dataclass(frozen=True)
class EngineEstimate:
    """An engine as it would be built, with models on the device `meta`, which have no memory.

    Attributes:
        uses: each model by its name, `TARGET` and those of a strategy, with the way it is used.
        settings: the engine's settings, with the device's defaults.
        sizes: the sizes of the target model.
        file_bytes: bytes of the target's weights in the checkpoint's files; 0 if these are not on
            this machine.
    """

    uses: dict[str, ModelUse]
    settings: ResolvedConfig
    sizes: ModelSizes
    file_bytes: int

    def memory(self, gpu_bytes: int | None) -> MemoryPlan:
        """The expected division of a device's `gpu_bytes` of memory; None stands for a CPU.

        Raises:
            ValueError: the model does not fit; see `expected_memory`.
        """
        return expected_memory(list(self.uses.values()), self.settings, gpu_bytes)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights of all models."""
        return weight_bytes(list(self.uses.values()))

    @property
    def weights_text(self) -> str:
        """The size of all models' weights in words, and the format of the target's."""
        model, text = self.uses[TARGET].model, size_text(self.weight_bytes)
        assert isinstance(model, CausalLM)
        packed, form, parameters = model.config.form, model.form, model.parameters()
        if not isinstance(packed, PackedFormat):
            return text if form is None or not form.native else f"{text} in {format_name(form)}"
        # Weights that stay in 4 bits are packed into int32.
        packed_bytes = sum(one.nbytes for one in parameters if one.dtype == torch.int32)
        how = f"{size_text(packed_bytes)} of it in" if packed_bytes else "dequantised from"
        files = f" ({size_text(self.file_bytes)} in the files)" if self.file_bytes else ""
        return f"{text}, {how} {packed.name}{files}"

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in the paged caches of all models, except in layers with a
        window."""
        return cache_token_bytes(list(self.uses.values()))

    @property
    def window(self) -> int:
        """The longest window of any layer in tokens; 0 without such layers."""
        return max(use.model.window or 0 for use in self.uses.values())

    @property
    def window_bytes(self) -> int:
        """The bytes of a whole window of tokens in the layers that have one."""
        models = [use.model for use in self.uses.values()]
        return self.window * sum(window_token_bytes(m.cache_specs, m.dtype) for m in models)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row's recurrent states and their records over all models; 0 without
        recurrent layers."""
        return sum(
            row_bytes(use.model.cache_specs, max(use.widths), self.settings.fold)
            for use in self.uses.values()
        )


def estimate_engine(
    opened: OpenedJob, config: JobConfig, gpu_bytes: int | None, units: Units
) -> EngineEstimate:
    """Estimate the engine of a job on a GPU with `gpu_bytes` of memory, or on a CPU for None.

    `units` are the weight formats from which the device computes; they decide the parameters.
    """
    on = "cpu" if gpu_bytes is None else "cuda"
    dtype = opened.model.dtype(config.model.dtype, "cpu")
    if on == "cuda" and config.model.dtype == "auto":  # the GPU need not be here
        dtype = opened.model.config.dtype
    heads = strategy_heads(opened.strategy, opened.model)
    ranks = config.engine.tensor_parallel
    target = bare(opened.model, dtype, heads, ranks, units=units)
    target.weight_bytes += opened.model.adapter_bytes(
        target, config.engine.lora_slots, on_cpu=on == "cpu"
    )
    others = {
        name: bare(other, dtype, [], ranks, units=units) for name, other in opened.others.items()
    }
    columns = tuple(opened.context_columns)
    uses = model_uses(target, others, opened.strategy, columns, opened.max_model_len)
    sizes = Sizes(
        weights=target.weight_bytes,
        weights_per_token=target.weight_bytes_per_token,
        memory=gpu_bytes or 0,
        width=max(uses[TARGET].widths),
    )
    settings = config.engine.resolve(torch.device(on), sizes, opened.max_model_len)
    return EngineEstimate(uses, settings, ModelSizes.of(uses[TARGET]), opened.model.file_bytes)
