"""The engine: requests in, finished requests out, a step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from batchgen.engine.cache.block_manager import BlockManager
from batchgen.engine.cache.memory_plan import (
    MemoryPlan,
    ModelUse,
    allocate_kv,
    graph_shapes,
    plan_memory,
)
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.guide import Guide
from batchgen.engine.constraint.queue import CompileQueue
from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.execution.cuda_graph import CHUNK_ROWS
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.execution.step_timing import StepTimer, timed
from batchgen.engine.execution.transfer import release_cached_memory, upload
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.engine.outputs import HostCopy, RequestOutput, StepOutput
from batchgen.engine.requests import Requests
from batchgen.engine.sampling.inputs import SamplingInputs
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
)
from batchgen.engine.scheduling.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.engine.strategy import JoiningRows, Limits, Strategy


@dataclass
class EngineStats:
    """Counts since the engine started. A mixed step counts as a prefill and as a decode step.

    Attributes:
        prefill_tokens: that went through the model in prefills, recomputed ones included.
        cached_tokens: that did not, because the prefix cache had them.
        generated_tokens: of finished and running requests.
        decode_rows: rows summed over decode steps; divided by steps, the mean batch.
        draft_tokens: proposed; accepted_tokens: of the generated tokens, those that were drafts.
        forwards_per_yield: i → how often it took a row i forwards to yield tokens; those that only
            made KV final do not count.
    """

    prefill_steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    forwards_per_yield: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    peak_kv_usage: float = 0.0


class LLMEngine:
    """Continuous batching of requests over one model.

    A request's tokens depend on the model, its prompt, its `SamplingParams` (the seed among them)
    and nothing else: not on what runs beside it, nor on any value of `config`, up to the floating
    point of the device (on CPU in float32, exactly).

    Args:
        model: loaded, on its device; its weights are packed in place.
        tokenizer: makes texts of the output; None leaves them empty and refuses stop strings.
        eos_token_ids: end a row unless it ignores EOS.
        strategy: the decoding paradigm.
        config: batch and memory sizes.
        timer: measures the steps.
        draft: a smaller model for a strategy that drafts with one, on the same device; its weights
            are packed in place.
        compiler: of constraints, for this tokenizer and vocabulary; made when the first constrained
            request comes if absent.

    Attributes:
        memory: what the device's memory is used for.

    Raises:
        ValueError: the model or device does not allow the configuration, the KV cache does not
            fit, the strategy is not for the model or the draft model does not go with the model.
    """

    def __init__(
        self,
        model: DenseForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: tuple[int, ...],
        strategy: Strategy,
        config: EngineConfig,
        timer: StepTimer | None = None,
        draft: DenseForCausalLM | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        length = strategy.block_length(model.config)  # raises if they do not go together
        model.pack()
        self.config = config.resolve(model.device, model.num_parameters * model.dtype.itemsize)
        if 1 not in strategy.widths:  # prompts are read beside rows of one token only
            self.config = replace(self.config, chunk_tokens=0)
        self.max_model_len = config.model_len(model.config.max_position_embeddings)
        self.max_model_len -= self.max_model_len % length  # a row's last block is a whole one
        self.vocab_size = model.config.vocab_size
        self.tokenizer = tokenizer
        self.strategy = strategy
        self.stats = EngineStats()
        self._timer = timer
        release_cached_memory(model.device)
        limits = Limits(config.max_num_seqs, self.max_model_len, self.vocab_size, model.device)
        strategy.allocate(limits)
        uses = [ModelUse(model, strategy.widths, strategy.forward_rows)]
        if draft is not None:
            _check_draft(draft, self.vocab_size, self.max_model_len)
            draft.pack()
            uses.append(ModelUse(draft, strategy.draft_widths))
        self.memory: MemoryPlan = plan_memory(uses, self.config, self.max_model_len)
        self._block_manager = BlockManager(
            self.memory.num_blocks,
            config.block_size,
            # A block of the cache that ends within one of the attention depends on what follows.
            config.prefix_caching and config.block_size % length == 0,
        )
        self._requests = Requests(
            tokenizer,
            eos_token_ids,
            strategy,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            kv_capacity=self._block_manager.capacity,
        )
        assert self.config.max_batched_tokens is not None and self.config.chunk_tokens is not None
        self._runner, *others = [self._make_runner(use) for use in uses]
        strategy.attach(self._runner, others[0] if others else None)
        self.scheduler = Scheduler(
            self._block_manager,
            config.max_num_seqs,
            self.config.max_batched_tokens,
            self.config.chunk_tokens,
            CHUNK_ROWS,
            strategy,
        )
        self._live: dict[str, Sequence] = {}
        self._compiling = CompileQueue(compiler, tokenizer, self.vocab_size, eos_token_ids)
        self._finished: list[Sequence] = []
        # The parts of each batch that was launched and not read.
        self._launched: deque[list[tuple[PrefillBatch | DecodeBatch, HostCopy]]] = deque()

    def _make_runner(self, use: ModelUse) -> ModelRunner:
        """A model over a KV cache of all blocks."""
        model, config = use.model, self.config
        kv_caches = allocate_kv(
            model.config,
            self.memory.num_blocks,
            config.block_size,
            dtype=model.dtype,
            device=model.device,
        )
        runner = ModelRunner(model, kv_caches, self.strategy.block_length(model.config))
        if config.cuda_graph:
            runner.capture(graph_shapes(use, config, self.max_model_len))
        return runner

    def add_request(
        self, request_id: str, prompt_token_ids: Ids[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served; its `type` says why.
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

    def abort(self, request_id: str) -> bool:
        """Forget a request; False if there is none of that id."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        if not self._compiling.remove(seq):
            self.scheduler.abort(seq)
        return True

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, those of unfinished requests too."""
        return self.stats.generated_tokens

    def has_unfinished(self) -> bool:
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Launch a batch and read the one before it (with overlap; else the same batch).

        Returns the requests that the batch just read finished.
        """
        # If all rows wait to be compiled, so does the engine.
        for seq in self._compiling.take(block=len(self._compiling) == len(self._live)):
            if seq.error is None:
                self.scheduler.add(seq)
            else:
                self._finished.append(seq)
        batch = self.scheduler.schedule()
        if batch is not None:
            self._count(batch)
            steps = self._launch(batch)
            self._launched.append([(part, HostCopy(step)) for part, step in steps])
        # With overlap the device works on the new batch while the host reads the one before it.
        behind = 1 if batch is not None and self.config.overlap else 0
        while len(self._launched) > behind:
            self._read_oldest()
        finished, self._finished = self._finished, []
        self.stats.generated_tokens = self.scheduler.num_generated_tokens
        self.stats.draft_tokens = self.scheduler.num_draft_tokens
        self.stats.accepted_tokens = self.scheduler.num_accepted_tokens
        if finished:
            self.stats.forwards_per_yield = self.scheduler.forwards_per_yield
        for seq in finished:
            del self._live[seq.request_id]
        return [self._requests.output(seq) for seq in finished]

    def _read_oldest(self) -> None:
        """Commit the oldest batch that was launched."""
        for part, copy in self._launched.popleft():
            step = copy.wait()
            if isinstance(part, DecodeBatch):
                self.strategy.observe(step)
            self._finished += self.scheduler.update(part, step)

    def _launch(self, batch: ScheduledBatch) -> list[tuple[PrefillBatch | DecodeBatch, StepOutput]]:
        """What the parts of the batch produce, of those that yield tokens."""
        state, device = self.strategy.step_inputs, self._runner.device
        if isinstance(batch, PrefillBatch):
            with timed(self._timer, "prefill", len(batch.seqs)):
                if not any(batch.lengths):  # all of it was in the prefix cache
                    return self._join(batch, None)
                inputs, rows = _prefill_inputs(batch, device)
                output = self._runner.prefill(inputs, rows, self.strategy.needs_hidden)
                self._see_prefill(batch, inputs, output)
                return self._join(batch, output)
        if isinstance(batch, DecodeBatch):
            with timed(self._timer, "decode", len(batch.slots)):
                return [self._decode(batch)]
        decode, prefill = batch.decode, batch.prefill
        with timed(self._timer, "mixed", len(decode.slots) + len(prefill.seqs)):
            if not any(prefill.lengths):
                return [self._decode(decode), *self._join(prefill, None)]
            self._begin(decode)
            inputs, rows = _prefill_inputs(prefill, device)
            decoded, prefilled = self._runner.mixed(state.model_inputs, inputs, rows)
            step = self._advance(decode, decoded)
            self._see_prefill(prefill, inputs, prefilled)
            return [(decode, step), *self._join(prefill, prefilled)]

    def _decode(self, batch: DecodeBatch) -> tuple[DecodeBatch, StepOutput]:
        """A decode step by itself."""
        self._begin(batch)
        return batch, self._advance(batch, self.strategy.forward(self._runner))

    def _begin(self, batch: DecodeBatch) -> None:
        """Bring the decoding rows in line with the batch."""
        self.strategy.step_inputs.reindex(batch)
        if batch.guide is not None and self.strategy.proposes_from_guide:
            self._catch_up()
        self.strategy.propose(batch)

    def _advance(self, batch: DecodeBatch, output: ModelOutput) -> StepOutput:
        """Decide on the decoding rows' tokens, which the next step reads."""
        if batch.guide is not None:
            self._catch_up()
        step = self.strategy.decide(output, batch.guide)
        self.strategy.step_inputs.step_decode(step)
        return step

    def _catch_up(self) -> None:
        """Read all steps before the one under way: masks are of the newest tokens. The device runs
        its forward meanwhile, or what was launched before."""
        while self._launched:
            self._read_oldest()

    def _see_prefill(self, batch: PrefillBatch, inputs: ModelInputs, output: ModelOutput) -> None:
        hidden = output.hidden if self.strategy.needs_hidden else None
        self.strategy.prefilled(batch, inputs, hidden)

    def _join(
        self, batch: PrefillBatch, output: ModelOutput | None
    ) -> list[tuple[PrefillBatch | DecodeBatch, StepOutput]]:
        """The rows whose prefill is complete decode next. Decide on the first tokens of those that
        yield one.

        Args:
            output: of the prefill's forward; None if there was nothing to compute.
        """
        if not batch.completing:
            return []
        state, device = self.strategy.step_inputs, self._runner.device
        if batch.keep is not None:
            state.keep_rows(batch.keep)
        seqs = [batch.seqs[i] for i in batch.completing]
        hidden = None
        if self.strategy.needs_hidden:
            assert output is not None and output.hidden is not None
            ends = np.cumsum(batch.lengths)[batch.completing] - 1
            hidden = output.hidden[upload(ends, torch.int64, device)]
        rows = JoiningRows(
            seqs,
            upload(_block_tables(seqs), torch.int64, device),
            np.array([seq.num_prefill_tokens for seq in seqs], np.int64),
            self._sampling_inputs(seqs),
            hidden,
            Guide.of(seqs),
        )
        yielding = np.flatnonzero([seq.prefill_yields for seq in seqs])
        newest = upload([seq.token_ids[-1] for seq in seqs], torch.int64, device)
        if not len(yielding):
            state.merge_prefill(rows, newest)
            return []
        assert output is not None
        if len(yielding) == len(seqs):
            step = self.strategy.first_tokens(output, rows)
            newest = step.token_ids[:, 0]
        else:
            step = self.strategy.first_tokens(output, rows.index_select(yielding))
            newest[upload(yielding, torch.int64, device)] = step.token_ids[:, 0]
        state.merge_prefill(rows, newest)
        return [(batch, step)]

    def _sampling_inputs(self, seqs: list[Sequence]) -> SamplingInputs:
        return SamplingInputs.build(
            params=[seq.params for seq in seqs],
            prompt_lens=[seq.num_prompt_tokens for seq in seqs],
            histories=[seq.token_ids for seq in seqs],
            stop_ids=[tuple(seq.stop.stop_ids) for seq in seqs],
            capacities=[seq.max_tokens for seq in seqs],
            device=self._runner.device,
        )

    def _count(self, batch: ScheduledBatch) -> None:
        stats = self.stats
        stats.preemptions = self.scheduler.num_preemptions
        stats.cached_tokens = self.scheduler.num_cached_tokens
        stats.peak_kv_usage = max(stats.peak_kv_usage, self._block_manager.usage)
        if not isinstance(batch, PrefillBatch):
            decode = batch.decode if isinstance(batch, MixedBatch) else batch
            stats.decode_steps += 1
            stats.decode_rows += len(decode.slots)
        if not isinstance(batch, DecodeBatch):
            prefill = batch.prefill if isinstance(batch, MixedBatch) else batch
            stats.prefill_steps += 1
            stats.prefill_tokens += sum(prefill.lengths)


def _check_draft(draft: DenseForCausalLM, vocab_size: int, max_model_len: int) -> None:
    if draft.config.vocab_size != vocab_size:
        raise ValueError(
            f"the draft model's vocabulary has {draft.config.vocab_size} ids and the model's has "
            f"{vocab_size}: choose a draft model with the same tokenizer"
        )
    if draft.config.max_position_embeddings < max_model_len:
        raise ValueError(
            f"the draft model has positions for {draft.config.max_position_embeddings} tokens and "
            f"rows may get {max_model_len}: lower max_model_len or choose another draft model"
        )


def _prefill_inputs(
    batch: PrefillBatch, device: torch.device
) -> tuple[ModelInputs, npt.NDArray[np.int64]]:
    """What the forward reads, without rows of no tokens, and which of its rows yield a token."""
    chosen = np.flatnonzero(batch.lengths)
    seqs = [batch.seqs[i] for i in chosen]
    lengths = np.array(batch.lengths, np.int64)[chosen]
    starts = np.array(batch.starts, np.int64)[chosen]
    ends = starts + lengths
    input_ids: list[int] = []
    for seq, start, end in zip(seqs, starts.tolist(), ends.tolist(), strict=True):
        input_ids += seq.token_ids[start:end]
    # Counts up within a row, from one row's end to the next one's start.
    positions = np.arange(len(input_ids)) + np.repeat(ends - lengths.cumsum(), lengths)
    inputs = ModelInputs(
        upload(input_ids, torch.int64, device),
        upload(positions, torch.int64, device),
        upload(_block_tables(seqs), torch.int64, device),
        lengths,
        ends,
    )
    yielding = [i for i in batch.completing if batch.seqs[i].prefill_yields]
    return inputs, np.searchsorted(chosen, np.array(yielding, np.int64)).astype(np.int64)


def _block_tables(seqs: Ids[Sequence]) -> npt.NDArray[np.int64]:
    """[B, N], unused entries 0, the scratch block."""
    tables = np.zeros((len(seqs), max(len(seq.block_table) for seq in seqs)), np.int64)
    for table, seq in zip(tables, seqs, strict=True):
        table[: len(seq.block_table)] = seq.block_table
    return tables
