"""The engine: it takes requests, runs them step by step and returns those that have finished."""

from __future__ import annotations

import zlib
from collections import abc, deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import HostCopy, HostOutput, RequestOutput, StepOutput
from batchgen.engine.base.step_timing import StepTimer, timed
from batchgen.engine.base.transfer import release_cached_memory, upload
from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.caches.state_slots import StateSlots
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.engine_models import chunk_multiple, planned_uses
from batchgen.engine.execution.graph_shapes import CHUNK_ROWS
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.memory.memory_plan import MemoryPlan, ModelUse, plan_memory
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.replicas import Abort, Add, Leader, Step
from batchgen.engine.requests import Requests
from batchgen.engine.rows.compile_queue import CompileQueue
from batchgen.engine.rows.context_reader import ContextReader
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
)
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.prefill_inputs import block_tables, prefill_inputs, state_slots
from batchgen.engine.scheduling.prefill_policy import BatchLimits
from batchgen.engine.scheduling.scheduler import Scheduler
from batchgen.engine.step_inputs import JoiningRows
from batchgen.engine.strategy import TARGET, Limits, Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class EngineStats:
    """Counts since the engine started. A mixed step counts as a prefill and as a decode step."""

    prefill_steps: int = 0  # the number of steps that read prompts
    # The number of tokens that prefills computed, including recomputed ones.
    prefill_tokens: int = 0
    # The number of tokens that prefills did not compute, because the prefix cache had them.
    cached_tokens: int = 0
    decode_steps: int = 0  # the number of steps with decoding rows
    # The sum of the numbers of rows over all decode steps; divided by `decode_steps` it is the mean
    # batch size.
    decode_rows: int = 0
    generated_tokens: int = 0  # the number of tokens generated for finished and running requests
    # Maps the name of each of the strategy's counts to its sum over all rows.
    counts: dict[str, int] = field(default_factory=dict)
    # What the strategy reports besides (`Strategy.stats`).
    strategy: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0  # how often a row lost its cache entries to other rows
    peak_kv_usage: float = 0.0  # the largest share of the blocks that rows owned, from 0 to 1


@dataclass(frozen=True, slots=True)
class _Launched:
    """A prefill or decode batch that was launched, and its results on their way to the host."""

    batch: PrefillBatch | DecodeBatch
    copy: HostCopy


class LLMEngine:
    """Runs requests over one target model with continuous batching.

    A request's tokens depend only on the model, the prompt and the `SamplingParams` (including the
    seed). They depend neither on the requests beside it nor on any value of `config`, except
    through the device's floating-point rounding; on a CPU in float32 they are exactly equal.

    Args:
        model: the target with its weights, on its device; the weights are packed in place.
        tokenizer: decodes the output to text; None leaves texts empty and refuses stop strings and
            constraints.
        timer: measures the steps; None measures nothing.
        others: the strategy's other models that have checkpoints of their own, by name, on the same
            device; their weights are packed in place.
        compiler: compiles constraints for this tokenizer and vocabulary; None makes one when the
            first constrained request comes.
        context_columns: the names of the columns of context scope that requests may ask for; each
            takes room in the paged cache.
        leader: the other ranks, which do what this engine does; None if there are none, or if this
            engine does what another one does (`follow`).

    Attributes:
        config: the settings with all defaults filled in.
        vocab_size: the number of token ids of the target.
        tokenizer: the tokenizer; None if there is none.
        strategy: the decoding paradigm.
        scheduler: plans the batches.
        stats: counts since the engine started.
        memory: how the device's memory is used.

    Raises:
        ValueError: the model or device does not allow the configuration, the caches do not fit into
            memory, the strategy does not fit the model, or another model does not fit the target.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: tuple[int, ...],
        strategy: Strategy,
        config: EngineConfig,
        timer: StepTimer | None = None,
        others: Mapping[str, CausalLM] | None = None,
        compiler: GrammarCompiler | None = None,
        context_columns: abc.Sequence[str] = (),
        leader: Leader | None = None,
    ) -> None:
        self._leader = leader
        # Of all tokens that were read, by which ranks see that they have the same.
        self._digest = 0
        # This raises an error if the strategy does not fit the model.
        self._block_length = strategy.block_length(model.config)
        model.pack()
        uses, self.config = planned_uses(model, others or {}, strategy, config, context_columns)
        max_model_len = self.config.max_model_len
        self.vocab_size = model.vocab_size
        self.tokenizer = tokenizer
        self.strategy = strategy
        self.stats = EngineStats()
        self._timer = timer
        release_cached_memory(model.device)
        limits = Limits(self.max_num_seqs, max_model_len, self.vocab_size, model.device)
        strategy.allocate(limits)
        self.memory: MemoryPlan = plan_memory(list(uses.values()), self.config)
        multiple = chunk_multiple(model)
        self._block_manager = BlockManager(
            self.memory.num_blocks,
            config.block_size,
            # No row may share a block of the cache that ends inside a block of the attention.
            config.prefix_caching and config.block_size % self._block_length == 0,
            StateSlots(self.max_num_seqs, self.memory.num_checkpoints)
            if model.has_row_states
            else None,
            multiple,
            max(role.tokens_ahead for role in strategy.models.values()),
        )
        self._requests = Requests(
            tokenizer,
            eos_token_ids,
            strategy,
            vocab_size=self.vocab_size,
            max_model_len=max_model_len,
            cache_capacity=self._block_manager.capacity,
            context_columns=uses[TARGET].columns,
        )
        self._runners = {name: self._make_runner(use) for name, use in uses.items()}
        self._runner = self._runners[TARGET]
        self._models = [use.model for use in uses.values()]
        reader = ContextReader(self._runner.caches.columns, config.block_size)
        graph_shapes = uses[TARGET].graph_shapes(self.config)
        batch_limits = BatchLimits(
            self.max_num_seqs,
            self.config.max_batched_tokens,
            # Prompts are read only beside decoding rows of one token each.
            self.config.chunk_tokens if 1 in strategy.models[TARGET].widths else 0,
            CHUNK_ROWS,
            graph_shapes.prefill_tokens if self.config.cuda_graph else 0,
        )
        self.scheduler = Scheduler(
            self._block_manager,
            batch_limits,
            strategy,
            chunk_multiple=multiple,
            counts=[count.name for count in strategy.counts],
            before_free=reader.read,
        )
        strategy.attach(self._runners)
        self._live: dict[str, Sequence] = {}
        special_ids = (*eos_token_ids, *model.config.never_generated)
        self._compiling = CompileQueue(compiler, tokenizer, self.vocab_size, special_ids)
        # Both hold rows that have ended and were not returned yet. Those in `_leaving` wait for
        # their columns of context scope, which are on their way to the host since the last launch.
        self._finished: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._launched: deque[list[_Launched]] = deque()  # Batches that were not read yet.

    def _make_runner(self, use: ModelUse) -> ModelRunner:
        """Allocate a model's caches and make its runner, with CUDA graphs if they are on."""
        memory, config = self.memory, self.config
        sizes = CacheSizes(
            memory.num_blocks,
            config.block_size,
            config.max_num_seqs,
            memory.num_checkpoints,
            config.most_pending,
        )
        runner = ModelRunner(use.model, use.caches(sizes), self._block_length)
        if config.cuda_graph:
            runner.capture(use.graph_shapes(config))
        return runner

    def capture_graphs(self) -> None:
        """Capture all CUDA graphs that steps may replay.

        Most are else captured while steps run, which the times of these steps show. With other
        ranks, all of them must do this at the same point of their work.
        """
        for runner in self._runners.values():
            runner.capture_all()

    @property
    def max_num_seqs(self) -> int:
        """The most rows in flight."""
        return self.config.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """The most prompt and output tokens of a row together."""
        return self.config.max_model_len

    def add_request(
        self, request_id: str, prompt_token_ids: abc.Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never be served; its `type` says why.
            ValueError: the parameters cannot be honoured, or the id is in use.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id!r} is already running: ids must be unique")
        seq = self._requests.sequence(request_id, list(prompt_token_ids), params)
        if params.constraint is None:
            self.scheduler.add(seq)
        else:
            self._compiling.add(seq)
        self._live[request_id] = seq
        if self._leader is not None:
            self._leader.post(Add(request_id, list(prompt_token_ids), params))

    def abort(self, request_id: str) -> bool:
        """Drop a request. Returns False if there is no unfinished request with this id."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        if self._leader is not None:
            self._leader.post(Abort(request_id))
        # The row may have ended in a step that raised an error before it could return the row.
        for ended in (self._finished, self._leaving):
            if seq in ended:
                ended.remove(seq)
                return True
        if not self._compiling.remove(seq):
            self.scheduler.abort(seq)
        return True

    def close(self) -> None:
        """End the other ranks, and stop compiling constraints, without waiting for those that are
        being compiled.

        After that the engine takes no further constrained requests, and none at all if there were
        other ranks.
        """
        self._compiling.close()
        if self._leader is not None:
            # The ranks' communicator must outlive what was captured of it.
            for runner in self._runners.values() if self.is_usable else ():
                runner.drop_graphs()
            self._leader.close()

    @property
    def is_usable(self) -> bool:
        """Whether the device answers. It may wait for ever if another rank was lost."""
        return self._leader is None or not self._leader.is_lost

    @property
    def batch_dependence(self) -> str | None:
        """Why the bits of a token's result depend on what else is in its batch, in words for the
        user. None if they do not, and on a GPU, where batchgen makes no such promise."""
        reasons = (model.batch_dependence for model in self._models)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def generated_tokens(self) -> int:
        """The number of tokens generated so far, including those of unfinished requests."""
        return self.stats.generated_tokens

    @property
    def num_running(self) -> int:
        """The number of rows that own blocks of the cache. Rows that wait for their turn or for
        their constraint to compile are not among them."""
        return len(self.scheduler.running)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens each of the `num_running` rows has generated so far."""
        return self.scheduler.running.generated

    def has_unfinished(self) -> bool:
        """Whether some request was added and neither returned nor aborted yet."""
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Launch a batch and read one: with overlap the batch before it, else the same batch.
        Returns the requests that have finished and were not returned yet. Raises RuntimeError if
        another rank was lost. The engine can do nothing after that."""
        with nullcontext() if self._leader is None else self._leader.step():
            # The engine waits for the compiler only if all rows wait for their constraints.
            block = len(self._compiling) == len(self._live)
            compiled = list(self._compiling.take(block=block))
            if self._leader is not None:
                errors = [None if seq.error is None else str(seq.error) for seq in compiled]
                ids = [seq.request_id for seq in compiled]
                self._leader.begin(list(zip(ids, errors, strict=True)), self._digest)
            return self._step(compiled)

    @torch.inference_mode()
    def follow(self, step: Step) -> None:
        """Make the step that the engine of rank 0 makes. Raises RuntimeError if this engine's
        tokens differ from those of rank 0."""
        if step.digest != self._digest:
            raise RuntimeError("the tokens of this rank differ from those of rank 0")
        self._step([self._compiling.take_one(*compiled) for compiled in step.compiled])

    def _step(self, compiled: list[Sequence]) -> list[RequestOutput]:
        """Make a step, as `step` says, after the constraints of some rows were compiled."""
        for seq in compiled:
            if seq.error is None:
                self.scheduler.add(seq)
            else:
                self._finished.append(seq)
        # The copies of these rows' columns were enqueued before the batch that the device now runs,
        # so waiting for them costs nothing.
        self._finished += self._leaving
        self._leaving = []
        batch = self.scheduler.schedule()
        if batch is not None:
            self._count(batch)
            steps = self._launch(batch)
            self._launched.append([_Launched(part, HostCopy(step)) for part, step in steps])
        # With overlap the device works on the new batch while the host reads the one before it.
        behind = 1 if batch is not None and self.config.overlap else 0
        while len(self._launched) > behind:
            self._read_oldest()
        if batch is None:  # No later batch will come that would hide the wait.
            self._finished += self._leaving
            self._leaving = []
        return self._take_finished()

    def _take_finished(self) -> list[RequestOutput]:
        """Return the requests that have ended and drop them from the engine."""
        stats = self.stats
        stats.generated_tokens = self.scheduler.running.num_committed
        stats.counts = dict(self.scheduler.running.totals)
        if self._finished:
            stats.strategy = dict(self.strategy.stats())
        outputs = [self._requests.output(seq) for seq in self._finished]
        for seq in self._finished:
            del self._live[seq.request_id]
        self._finished = []
        return outputs

    def _read_oldest(self) -> None:
        """Wait for the results of the oldest batch that was launched, and commit its tokens."""
        for part in self._launched.popleft():
            step = part.copy.wait()
            if self._leader is not None:
                self._leader.check()
            if self._runner.model.parallel.size > 1:
                self._digest = _digest(step, self._digest)
            if isinstance(part.batch, DecodeBatch):
                self.strategy.observe(step, self.scheduler.is_current(part.batch))
            for seq in self.scheduler.update(part.batch, step):
                (self._leaving if seq.context_columns else self._finished).append(seq)

    def _launch(self, batch: ScheduledBatch) -> list[tuple[PrefillBatch | DecodeBatch, StepOutput]]:
        """Enqueue a step on the device. Returns the parts of the batch that yield tokens, each with
        what it produces."""
        if isinstance(batch, DecodeBatch):
            with timed(self._timer, "decode", batch.num_rows):
                step, _ = self._decode(batch, None)
                return [(batch, step)]
        prefill = batch.prefill if isinstance(batch, MixedBatch) else batch
        inputs = self._prefill_inputs(prefill)
        if isinstance(batch, PrefillBatch):
            with timed(self._timer, "prefill", len(batch.seqs)):
                output = None
                if inputs is not None:  # Otherwise the prefix cache had all of it.
                    output = self._runner.prefill(inputs, self.strategy.needs_hidden)
                return self._join(batch, inputs, output)
        decode = batch.decode
        with timed(self._timer, "mixed", decode.num_rows + len(prefill.seqs)):
            step, prefilled = self._decode(decode, inputs)
            return [(decode, step), *self._join(prefill, inputs, prefilled)]

    def _decode(
        self, batch: DecodeBatch, prefill: PrefillInputs | None
    ) -> tuple[StepOutput, ModelOutput | None]:
        """Enqueue a decode step, with a prefill beside it if there is one. Returns what the step
        produces for the decoding rows, and the forward's output for the prefill, which is None
        without one."""
        self.strategy.step_inputs.reindex(batch)
        if batch.guide is not None and self.strategy.proposes_from_guide:
            self._catch_up()
        self.strategy.propose(batch)
        decoded, prefilled = self.strategy.forward(self._runner, prefill)
        return self._advance(batch, decoded), prefilled

    def _advance(self, batch: DecodeBatch, output: ModelOutput) -> StepOutput:
        """Decide the decoding rows' tokens on the device, and prepare the next step's inputs."""
        if batch.guide is not None:
            self._catch_up()
        step = self.strategy.decide(output, batch.guide)
        state, states = self.strategy.step_inputs, self._runner.states
        if states is not None:
            assert state.state_slots is not None
            states.advance(state.state_slots, step.num_tokens)
        state.step_decode(step)
        return step

    def _catch_up(self) -> None:
        """Read all steps before the current one, because masks depend on the newest tokens.

        The device meanwhile runs the current step's forward, or what was launched before.
        """
        while self._launched:
            self._read_oldest()

    def _prefill_inputs(self, batch: PrefillBatch) -> PrefillInputs | None:
        """Make the inputs of a prefill's forward, and put the rows' states in place.

        Rows that start from a snapshot get a copy of its state in their own state slot. Returns the
        inputs, without rows that have no tokens to compute; None if no row has any.
        """
        seqs, states = batch.seqs, self._runner.states
        if states is not None:
            started = [seq for seq in seqs if seq.restore_from is not None]
            if started:
                sources = np.array([seq.restore_from for seq in started], np.int64)
                states.copy(sources, np.array([seq.state_slot for seq in started], np.int64))
                for seq in started:
                    seq.restore_from = None
            slots = [seq.state_slot for seq in seqs]
            states.begin(upload(slots, torch.int64, self._runner.device))
        return prefill_inputs(batch, self._runner.device, states is not None)

    def _join(
        self, batch: PrefillBatch, prefill: PrefillInputs | None, output: ModelOutput | None
    ) -> list[tuple[PrefillBatch | DecodeBatch, StepOutput]]:
        """Tell the strategy of a prefill, and let the rows that it completes decode from the next
        step on.

        The first tokens of those whose prefill yields one are decided here. Returns the batch with
        its first tokens; empty if no row's prefill yields a token.

        Args:
            prefill: the inputs of its forward; None if there was nothing to compute.
            output: the output of its forward; None likewise.
        """
        state, device = self.strategy.step_inputs, self._runner.device
        if batch.completing and batch.keep is not None:
            state.keep_rows(batch.keep)
        seqs = [batch.seqs[i] for i in batch.completing]
        rows = self._joining_rows(seqs) if seqs else None
        newest = upload([seq.token_ids[-1] for seq in seqs], torch.int64, device)
        yielding = np.flatnonzero([seq.prefill_yields for seq in seqs])
        step = None
        if len(yielding):
            assert rows is not None and output is not None
            if len(yielding) == len(seqs):
                step = self.strategy.first_tokens(output, rows)
                newest = step.token_ids[:, 0]
            else:
                step = self.strategy.first_tokens(output, rows.index_select(yielding))
                newest[upload(yielding, torch.int64, device)] = step.token_ids[:, 0]
        if prefill is not None:
            assert output is not None
            hidden = output.hidden if self.strategy.needs_hidden else None
            self.strategy.prefilled(batch, prefill.inputs, hidden, newest)
        if rows is not None:
            state.merge_prefill(rows, newest)
        return [] if step is None else [(batch, step)]

    def _joining_rows(self, seqs: list[Sequence]) -> JoiningRows:
        """Describe rows whose prefill is complete, from what the host knows of them."""
        device = self._runner.device
        return JoiningRows(
            seqs,
            upload(block_tables(seqs), torch.int64, device),
            np.array([seq.num_prefill_tokens for seq in seqs], np.int64),
            self._sampling_inputs(seqs),
            None if self._runner.states is None else state_slots(seqs, device),
            Guide.of(seqs),
        )

    def _sampling_inputs(self, seqs: list[Sequence]) -> SamplingInputs:
        """Make the sampler's inputs for rows, from what the host knows of them."""
        return SamplingInputs.build(
            params=[seq.params for seq in seqs],
            prompt_lens=[seq.num_prompt_tokens for seq in seqs],
            histories=[seq.token_ids for seq in seqs],
            stop_ids=[tuple(seq.stop.stop_ids) for seq in seqs],
            capacities=[seq.max_tokens for seq in seqs],
            device=self._runner.device,
        )

    def _count(self, batch: ScheduledBatch) -> None:
        """Add a scheduled batch to the engine's counts."""
        stats = self.stats
        stats.preemptions = self.scheduler.num_preemptions
        stats.cached_tokens = self.scheduler.num_cached_tokens
        stats.peak_kv_usage = max(stats.peak_kv_usage, self._block_manager.usage)
        if not isinstance(batch, PrefillBatch):
            decode = batch.decode if isinstance(batch, MixedBatch) else batch
            stats.decode_steps += 1
            stats.decode_rows += decode.num_rows
        if not isinstance(batch, DecodeBatch):
            prefill = batch.prefill if isinstance(batch, MixedBatch) else batch
            stats.prefill_steps += 1
            stats.prefill_tokens += sum(prefill.lengths)


def _digest(step: HostOutput, before: int) -> int:
    """Return a digest of the tokens of a step and of all before it."""
    width = step.token_ids.shape[1]
    valid = np.arange(width) < step.num_tokens[:, np.newaxis]
    return zlib.crc32(np.where(valid, step.token_ids, -1).tobytes(), before)
