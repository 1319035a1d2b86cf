"""The engine's entry point: `LLMEngine` takes requests, runs them step by step and returns finished
ones.

`LLM` (the Python API) and a job's row generator drive it: they call `add_request` and then `step`
until `has_unfinished` is False.

A *row* is the sequence of a request. An output *column* has values for a row's tokens besides the
ids, such as log-probabilities. A column of *context scope* has a value for each token that the
model reads; it is stored in the paged cache and copied to the host when the row ends. A column of
*answer scope* has a value for each token of an answer that is passed in to be scored. A *replay*
scores such an answer of a diffusion model, step by step (its `Trajectory`). With tensor
parallelism each GPU is a *rank* with an engine of its own: that of rank 0 takes the requests and
sends every step to the others, which run the same.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.device.step_timing import StepTimer
from batchgen.engine.engine_parts import EngineParts
from batchgen.engine.engine_stats import EngineStats
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import Begun, HostCopy, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer, Trajectory
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.replicas import Abort, Add, Leader, StepBegins, tokens_digest
from batchgen.engine.rows.compile_queue import CompileQueue
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    PrefillBatch,
    StateBatch,
)
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.step_costs import CostShares
from batchgen.engine.strategy import TARGET, Strategy
from batchgen.engine.vision.image import Image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched batch, and its results on their way to the host. Of a mixed batch, which decodes
    some rows and prefills others, each of the two parts."""

    batch: PrefillBatch | DecodeBatch | StateBatch
    copy: HostCopy


class LLMEngine:
    """Runs requests over one target model with continuous batching.

    A request's tokens depend only on the model, the prompt and the `RequestParams` (including the
    seed). They depend neither on the other requests in the batch nor on any value of `config`,
    except through the device's floating-point rounding; on a CPU in float32 they are exactly equal.

    Args:
        model: the target with its weights, on its device; the weights are packed in place.
        tokenizer: decodes the output to text. With None, texts are empty, and stop strings and
            constraints are refused.
        timer: measures the steps; None measures nothing.
        others: the strategy's further models that have checkpoints of their own, by name, on the
            same device; their weights are packed in place.
        compiler: compiles constraints for this tokenizer and vocabulary. With None, the engine
            makes a compiler for the first constrained request.
        context_columns: the names of the columns of context scope that requests may ask for; each
            takes memory in the paged cache.
        leader: sends every request and step to the other ranks. None on a single rank, and on every
            rank but 0, where `follow` runs the steps.

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
        # The digest of all tokens read so far. Ranks compare it to detect that their tokens differ.
        self._digest = 0
        parts = EngineParts(
            model,
            others or {},
            strategy,
            config,
            context_columns,
            tokenizer,
            eos_token_ids,
            timer,
        )
        self.config, self.memory, self.images = parts.config, parts.memory, parts.images
        self.scheduler = parts.scheduler
        self.vocab_size, self.tokenizer, self.strategy = model.vocab_size, tokenizer, strategy
        self.stats = EngineStats()
        self._requests, self._launcher = parts.requests, parts.launcher
        self._runners, self._runner = parts.runners, parts.runners[TARGET]
        self._costs: CostShares | None = None
        self._live: dict[Hashable, Sequence] = {}
        special_ids = (*eos_token_ids, *model.config.never_generated)
        self._compiling = CompileQueue(compiler, tokenizer, self.vocab_size, special_ids)
        # Rows that have ended and were not returned yet. The rows in `_leaving` still wait for
        # their columns of context scope, which the last launch began to copy to the host.
        self._finished: list[Sequence] = []
        self._leaving: list[Sequence] = []
        # The parts of each launched batch that was not read yet, the oldest batch first.
        self._launched: deque[list[_Launched]] = deque()

    def capture_graphs(self) -> None:
        """Capture all CUDA graphs that steps may replay. Without this call, most graphs are
        captured during the first steps that need them, which makes these steps slow. With several
        ranks, all ranks must call this at the same point of their work."""
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
        self,
        request_id: Hashable,
        prompt_token_ids: abc.Sequence[int],
        params: RequestParams,
        answer: GivenAnswer | None = None,
        images: abc.Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> bool:
        """Queue a request. Returns whether the request continues from `begun`.

        Args:
            answer: tokens to score after the prompt, instead of generating any; for diffusion
                models, with the steps that unmasked them. The columns of answer scope say how
                likely each token is. Required if `params.max_new_tokens` is 0, and forbidden
                otherwise.
            images: the images of the prompt, in order. For each image the prompt contains as many
                of the model's image tokens as the image takes.
            begun: what another engine has already generated for the request. The request starts
                from the beginning if it cannot continue: if a column is missing, or if the row
                would have ended there.

        Raises:
            RequestError: the request can never be served; its `type` says why.
            ValueError: the parameters cannot be honoured, or the id is in use.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id!r} is already running: ids must be unique")
        if answer is not None and not isinstance(answer, Trajectory):
            answer = list(answer)
        prompt = list(prompt_token_ids)
        seq = self._requests.sequence(request_id, prompt, params, answer, images, begun)
        if params.constraint is None:
            self.scheduler.add(seq)
        else:
            self._compiling.add(seq)
        self._live[request_id] = seq
        if self._leader is not None:
            without_pixels = [image.without_pixels() for image in images]
            self._leader.post(Add(request_id, prompt, params, answer, without_pixels, begun))
        return seq.resumed

    def begun_lengths(self) -> dict[Any, int]:
        """Return how many tokens each unfinished request has generated so far, by request id.
        Requests without generated tokens are left out, and so are replays, which generate none."""
        running, lengths = self.scheduler.running, {}
        for request_id, seq in self._live.items():
            slot = seq.batch_slot
            # The newest tokens of a running row are in the arrays of the batch until `flush`.
            num_tokens = seq.num_tokens if slot is None else int(running.num_tokens[slot])
            if (
                seq.finish_reason is None
                and seq.trajectory is None
                and num_tokens > seq.num_prompt_tokens
            ):
                lengths[request_id] = num_tokens - seq.num_prompt_tokens
        return lengths

    @torch.inference_mode()
    def begun(self, request_id: Hashable, start: int = 0) -> Begun | None:
        """Return what an unfinished request has generated from its output token `start` on, in the
        steps that were read.

        The call waits for the device only to copy columns of context scope. Returns None if some of
        their values are missing, as in a preempted row that is being computed again.
        """
        seq = self._live[request_id]
        counts = self.scheduler.flush(seq)  # moves the newest tokens to seq; the strategy's counts
        # Columns of context scope have a value for each token that was read. Output token `start`
        # was drawn from the read of the token before it.
        context_start = seq.num_prompt_tokens + start - 1 if start else 0
        if seq.context_columns and seq.context.num_tokens < seq.num_tokens - 1:
            return None
        columns = {name: buffer.array(start) for name, buffer in seq.columns.items()}
        for column in seq.requested_columns:
            if column.scope == "context":
                columns[column.name] = seq.context.array(column, context_start)
        return Begun(seq.token_ids[seq.num_prompt_tokens + start :], columns, dict(counts))

    def abort(self, request_id: Hashable) -> bool:
        """Drop a request. Returns False if there is no unfinished request with this id."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        if self._costs is not None:
            self._costs.end(request_id)
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
        """End the other ranks, and stop compiling constraints without waiting for running
        compilations. Afterwards the engine takes no constrained requests, and no requests at all if
        there were other ranks."""
        self._compiling.close()
        if self._leader is not None:
            # The ranks' communicator must outlive the CUDA graphs that captured its operations.
            if self.is_usable:
                for runner in self._runners.values():
                    runner.drop_graphs()
            self._leader.close()

    def measure_costs(self) -> None:
        """Start to measure what each request costs. Must be called before the first request. The
        caller must call `take_costs` from time to time, because costs are stored until then."""
        assert self._costs is None and not self._live
        timer = StepTimer(self._runner.device)
        self._launcher.timer = timer
        self._costs = CostShares(timer, self.max_num_seqs)

    def take_costs(self, *, wait: bool = False) -> list[tuple[Any, float]]:
        """Return pairs of a request id and the seconds of the device that the request took. Each
        call returns the requests that have ended and whose last step was read.

        Args:
            wait: wait for all launched steps, and also return what unfinished requests took so far.
                What they take later is returned by a later call.
        """
        assert self._costs is not None
        if wait:
            self._costs.share(leave=0)
        return self._costs.take(running=wait)

    @property
    def is_usable(self) -> bool:
        """Whether the device can be waited for. If another rank was lost, waiting may never end."""
        return self._leader is None or not self._leader.is_lost

    @property
    def batch_dependence(self) -> str | None:
        """Why the bits of a token's result depend on the rest of its batch, as a sentence for the
        user. None if they do not depend on it, and on a GPU, where batchgen does not promise it."""
        reasons = (runner.model.batch_dependence for runner in self._runners.values())
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def generated_tokens(self) -> int:
        """The number of tokens generated so far, including those of unfinished requests."""
        return self.stats.generated_tokens

    @property
    def num_running(self) -> int:
        """The number of rows that own blocks of the cache. Rows that wait to start, or for their
        constraint to be compiled, do not count."""
        return len(self.scheduler.running)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens each of the `num_running` rows has generated so far."""
        return self.scheduler.running.generated

    @property
    def running_ids(self) -> list[Any]:
        """The ids of the `num_running` rows, in the order of `running_lengths`."""
        return [seq.request_id for seq in self.scheduler.running.rows]

    def has_unfinished(self) -> bool:
        """Whether some request was added and has neither been returned nor aborted."""
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Launch a batch and read one. With overlap, the batch that is read is the one launched
        before; without it, the same one.

        Returns:
            The requests that have finished since the last call.

        Raises:
            RuntimeError: another rank was lost. The engine cannot continue.
        """
        with nullcontext() if self._leader is None else self._leader.step():
            # The engine waits for the compiler only if every row waits for its constraint.
            block = len(self._compiling) == len(self._live)
            compiled = list(self._compiling.take(block=block))
            if self._leader is not None:
                errors = [None if seq.error is None else str(seq.error) for seq in compiled]
                ids = [seq.request_id for seq in compiled]
                self._leader.begin(list(zip(ids, errors, strict=True)), self._digest)
            return self._step(compiled)

    @torch.inference_mode()
    def follow(self, step: StepBegins) -> None:
        """Run the step that the engine of rank 0 runs. Raises RuntimeError if this rank's tokens
        differ from those of rank 0."""
        if step.digest != self._digest:
            raise RuntimeError("the tokens of this rank differ from those of rank 0")
        self._step([self._compiling.take_one(*compiled) for compiled in step.compiled])

    def _step(self, compiled: list[Sequence]) -> list[RequestOutput]:
        """Run a step as `step` describes. `compiled` are the rows whose constraints have just been
        compiled, or have failed to compile."""
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
        self._finished += self.scheduler.take_broken()  # rows whose images cannot be read
        if batch is not None:
            self.stats.count_batch(batch, self.scheduler)
            if self._costs is not None:
                self._costs.begin(batch)
            steps = self._launcher.launch(batch, self._catch_up)
            self._launched.append([_Launched(part, HostCopy(step)) for part, step in steps])
        # With overlap the device works on the new batch while the host reads the one before it.
        num_unread = 1 if batch is not None and self.config.overlap else 0
        while len(self._launched) > num_unread:
            self._read_oldest()
        if batch is None:
            # No later batch will hide the wait for these rows' columns.
            self._finished += self._leaving
            self._leaving = []
        return self._take_finished()

    def _take_finished(self) -> list[RequestOutput]:
        """Return the requests that have ended and drop them from the engine."""
        are_last = len(self._finished) == len(self._live)
        self.stats.count_rows(self.scheduler.running, self.images, are_last=are_last)
        if self._finished:
            self.stats.strategy = dict(self.strategy.stats())
        outputs = [self._requests.output(seq) for seq in self._finished]
        for seq in self._finished:
            del self._live[seq.request_id]
            if self._costs is not None:
                self._costs.end(seq.request_id)
        self._finished = []
        return outputs

    def _read_oldest(self, launching: int = 0) -> None:
        """Wait for the results of the oldest launched batch, and add its tokens to the rows.
        `launching` is the number of batches, 0 or 1, whose launch is in progress."""
        parts = self._launched.popleft()
        for part in parts:
            step = part.copy.wait()
            if self._leader is not None:
                self._leader.check()
            if self._runner.model.parallel.size > 1:
                self._digest = tokens_digest(step, self._digest)
            if isinstance(part.batch, DecodeBatch):
                self.strategy.observe(step, self.scheduler.is_current(part.batch))
            for seq in self.scheduler.update(part.batch, step):
                (self._leaving if seq.context_columns else self._finished).append(seq)
        # The results were copied, so the device has ended the step, and its time can be shared.
        if parts and self._costs is not None:
            self._costs.share(leave=len(self._launched) + launching)

    def _catch_up(self) -> None:
        """Read all steps that were launched before the one that is being launched. The launcher
        calls this before it makes the masks of constraints, which depend on the newest tokens."""
        while self._launched:
            self._read_oldest(launching=1)
