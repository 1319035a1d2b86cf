"""Makes the parts of an engine in the right order: the division of its memory, the caches and
runners of its models, and the parts that check requests, plan steps and launch them.

`LLMEngine` makes one `EngineParts` when it starts and works with its attributes.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.caches.state_slots import StateSlots
from batchgen.engine.device.step_timing import StepTimer
from batchgen.engine.device.transfer import release_cached_memory
from batchgen.engine.engine_models import check_products, chunk_multiple, planned_uses
from batchgen.engine.execution.graph_shapes import CHUNK_ROWS
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.interface.engine_config import EngineConfig, bit_rules
from batchgen.engine.lora.layer_lora import num_slots
from batchgen.engine.memory.largest_steps import max_scored_tokens
from batchgen.engine.memory.memory_plan import plan_memory
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.requests import ImageLimits, Requests
from batchgen.engine.rows.context_reader import ContextReader
from batchgen.engine.scheduling.adapter_slots import AdapterSlots
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.image_store import ImageStore
from batchgen.engine.scheduling.prefill_policy import BatchLimits
from batchgen.engine.scheduling.scheduler import Scheduler
from batchgen.engine.step_launcher import StepLauncher
from batchgen.engine.strategy import TARGET, Limits, Strategy
from batchgen.engine.vision.image_span import ImageRules
from batchgen.kernels.rules import BY_ROW

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PATIENCE = 4
"""How long a row may wait until its adapter is loaded into an adapter slot, in multiples of
`max_num_seqs`: this is how many other rows may start before it."""


class EngineParts:
    """The parts of an engine, made in the order in which they take memory of the device.

    Attributes:
        config: the engine's settings with all defaults filled in.
        memory: how the device's memory is divided.
        images: the images that rows are about to read; None if the model reads none.
        runners: the runners of the strategy's models, by name.
    """

    def __init__(
        self,
        model: CausalLM,
        others: abc.Mapping[str, CausalLM],
        strategy: Strategy,
        config: EngineConfig,
        context_columns: abc.Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: tuple[int, ...],
        timer: StepTimer | None,
    ) -> None:
        """Allocate caches and make the parts; errors are those of `LLMEngine`."""
        self._strategy = strategy
        # Checked first: this raises ValueError if the strategy does not fit the model.
        self._block_length = strategy.block_length(model.config)
        rules = bit_rules(config.deterministic, model.device)
        model.pack(rules)
        if rules is BY_ROW:  # the setting `deterministic`, on a GPU
            check_products(model)
        uses, self.config = planned_uses(model, others, strategy, config, context_columns)
        max_num_seqs, max_model_len = self.config.max_num_seqs, self.config.max_model_len
        release_cached_memory(model.device)
        strategy.allocate(Limits(max_num_seqs, max_model_len, model.vocab_size, model.device))
        self.memory = plan_memory(list(uses.values()), self.config)
        manager = self._block_manager(model)
        self.images: ImageStore | None = None
        image_limits = None
        if model.visual is not None:
            max_image_tokens = self.config.image_tokens
            self.images = ImageStore(model.visual, max_image_tokens, model.device, model.parallel)
            image_limits = self._image_limits(model.visual.config.rules, manager)
        self._adapters = _adapter_slots(model, config.lora_slots, max_num_seqs)
        self.requests = Requests(
            tokenizer,
            eos_token_ids,
            strategy,
            config=model.config,
            max_model_len=max_model_len,
            cache_capacity=manager.capacity,
            context_columns=uses[TARGET].columns,
            images=image_limits,
            lora=model.lora,
        )
        self.runners = {name: self._runner(use) for name, use in uses.items()}
        self.scheduler = self._scheduler(manager, model, uses[TARGET])
        strategy.attach(self.runners)
        scored_tokens = max_scored_tokens(model, self.config)
        windows = manager.window is not None
        runner = self.runners[TARGET]
        self.launcher = StepLauncher(
            strategy,
            runner,
            scored_tokens,
            timer,
            self.images,
            self._adapters,
            windows=windows,
            rules=self.config.rules,
        )

    def _image_limits(self, rules: ImageRules, manager: BlockManager) -> ImageLimits:
        config = self.config
        return ImageLimits(rules, config.image_tokens, config.max_batched_tokens, manager.needs)

    def _block_manager(self, model: CausalLM) -> BlockManager:
        config, states = self.config, None
        if model.has_row_states:
            states = StateSlots(config.max_num_seqs, self.memory.num_checkpoints)
        needs = self.memory.pages
        if needs is None:
            needs = PageNeeds(PageLayout(self.memory.num_blocks), config.block_size)
        return BlockManager(
            needs,
            # A row must not share a cache block that ends inside a block of block-causal attention.
            config.prefix_caching and config.block_size % self._block_length == 0,
            states,
            chunk_multiple(model),
            max(role.tokens_ahead for role in self._strategy.models.values()),
            # Generated tokens are computed with other bits than prompts, so that their blocks
            # cannot be shared.
            prompts_only=config.rules.replay,
        )

    def _scheduler(self, manager: BlockManager, model: CausalLM, use: ModelUse) -> Scheduler:
        config, strategy, shapes = self.config, self._strategy, use.graph_shapes(self.config)
        limits = BatchLimits(
            config.max_num_seqs,
            config.max_batched_tokens,
            # Prompts are read together with decoding rows only if these have one token each and a
            # CUDA graph holds both. Without a graph, a step of few prompt tokens would wait for the
            # host.
            config.chunk_tokens if 1 in use.widths and shapes.reads_prompts else 0,
            CHUNK_ROWS,
            shapes.alone_tokens if config.cuda_graph else 0,
        )
        columns = self.runners[TARGET].caches.columns
        return Scheduler(
            manager,
            limits,
            strategy,
            chunk_multiple=chunk_multiple(model),
            counts=[count.name for count in strategy.counts],
            before_free=ContextReader(columns, config.block_size).read,
            images=self.images,
            adapters=self._adapters,
        )

    def _runner(self, use: ModelUse) -> ModelRunner:
        """Allocate a model's caches and make its runner, with CUDA graphs if they are on."""
        memory, config = self.memory, self.config
        sizes = CacheSizes(
            memory.num_blocks,
            config.block_size,
            config.max_num_seqs,
            memory.num_checkpoints,
            config.fold,
            None if memory.pages is None else memory.pages.layout,
        )
        runner = ModelRunner(use.model, use.caches(sizes), self._block_length, config.rules)
        if config.cuda_graph:
            runner.capture(use.graph_shapes(config))
        return runner


def _adapter_slots(
    model: CausalLM, lora_slots: int | None, max_num_seqs: int
) -> AdapterSlots | None:
    """Return the object that decides which adapters are in the adapter slots; None for a model
    without adapters. Raises ValueError if the model was loaded with another number of slots than
    `lora_slots`."""
    lora = model.lora
    number = 0 if lora is None else num_slots(len(lora.names), lora_slots)
    if lora_slots is not None and (lora is None or lora.num_slots != number):
        has = (
            ("no adapters that are computed beside its weights")
            if lora is None
            else f"{lora.num_slots} slots"
        )
        raise ValueError(f"lora_slots is {lora_slots}, and the model has {has}: set it to null")
    if lora is None:
        return None
    return AdapterSlots(len(lora.names), lora.num_slots, _PATIENCE * max_num_seqs)
