"""The engine: it takes requests, runs them step by step and returns those that have finished."""

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
    """A batch, or the part of one, that was launched, and its results on their way to the host."""

    batch: PrefillBatch | DecodeBatch | StateBatch
    copy: HostCopy


class LLMEngine:
    """Runs requests over one target model with continuous batching.

    A request's tokens depend only on the model, the prompt and the `RequestParams` (including the
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
        # The digest of all tokens that were read, by which ranks see that they have the same.
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
        # Both hold rows that have ended and were not returned yet. Those in `_leaving` wait for
        # their columns of context scope, which are on their way to the host since the last launch.
        self._finished: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._launched: deque[list[_Launched]] = deque()  # Batches that were not read yet.

    def capture_graphs(self) -> None:
        """Capture all CUDA graphs that steps may replay. Most are else captured while steps run,
        which the times of these steps show. With other ranks, all of them must do this at the same
        point of their work."""
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
        """Queue a request. Returns whether it goes on from what was `begun`.

        Args:
            answer: tokens behind the prompt that are scored instead of generating any, of diffusion
                models with their steps: the columns of answer scope say how likely each of them is.
                They must be given if `params.max_new_tokens` is 0, and not otherwise.
            images: the pictures of the prompt, in order. For each the prompt has as many of the
                model's image tokens as the picture takes.
            begun: what another engine has generated of the request. The request begins again if
                that cannot be: if a column is missing, or it would have ended there.

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
            known = [image.without_pixels() for image in images]
            self._leader.post(Add(request_id, prompt, params, answer, known, begun))
        return seq.resumed

    def begun_lengths(self) -> dict[Any, int]:
        """How many tokens each request that has not ended has generated so far, by its id, of those
        that have some. Replays generate none."""
        running, lengths = self.scheduler.running, {}
        for request_id, seq in self._live.items():
            slot = seq.batch_slot
            known = seq.num_tokens if slot is None else int(running.num_tokens[slot])
            if (
                seq.finish_reason is None
                and seq.trajectory is None
                and known > seq.num_prompt_tokens
            ):
                lengths[request_id] = known - seq.num_prompt_tokens
        return lengths

    @torch.inference_mode()
    def begun(self, request_id: Hashable, start: int = 0) -> Begun | None:
        """What one of these requests has generated from the token `start` on, as far as steps were
        read. It waits for columns of context scope alone. None if some of those are not there yet,
        as in a row that is computed again."""
        seq = self._live[request_id]
        counts = self.scheduler.flush(seq)
        known = seq.num_prompt_tokens + start - 1 if start else 0
        if seq.context_columns and seq.context.num_tokens < seq.num_tokens - 1:
            return None
        columns = {name: buffer.array(start) for name, buffer in seq.columns.items()}
        for column in seq.requested_columns:
            if column.scope == "context":
                columns[column.name] = seq.context.array(column, known)
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
        """End the other ranks, and stop compiling constraints, without waiting for those that are
        being compiled. After that the engine takes no further constrained requests, and none at all
        if there were other ranks."""
        self._compiling.close()
        if self._leader is not None:
            # The ranks' communicator must outlive what was captured of it.
            for runner in self._runners.values() if self.is_usable else ():
                runner.drop_graphs()
            self._leader.close()

    def measure_costs(self) -> None:
        """Begin to measure what each request costs, before the first one. Whoever asks for this
        must call `take_costs` from time to time, because costs are kept until then."""
        assert self._costs is None and not self._live
        timer = StepTimer(self._runner.device)
        self._launcher.timer = timer
        self._costs = CostShares(timer, self.max_num_seqs)

    def take_costs(self, *, wait: bool = False) -> list[tuple[Any, float]]:
        """Return the seconds of the device that requests took, by their ids, of those that have
        ended and whose last step was read. With `wait` it waits for all steps that were launched,
        and tells of requests that have not ended what they took so far; what they take from then on
        comes later."""
        assert self._costs is not None
        if wait:
            self._costs.share(leave=0)
        return self._costs.take(running=wait)

    @property
    def is_usable(self) -> bool:
        """Whether the device answers. It may wait for ever if another rank was lost."""
        return self._leader is None or not self._leader.is_lost

    @property
    def batch_dependence(self) -> str | None:
        """Why the bits of a token's result depend on what else is in its batch, in words for the
        user. None if they do not, and on a GPU, where batchgen makes no such promise."""
        reasons = (runner.model.batch_dependence for runner in self._runners.values())
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

    @property
    def running_ids(self) -> list[Any]:
        """The ids of these rows, in the order of `running_lengths`."""
        return [seq.request_id for seq in self.scheduler.running.rows]

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
    def follow(self, step: StepBegins) -> None:
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
        self._finished += self.scheduler.take_broken()
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
        if batch is None:  # No later batch will come that would hide the wait.
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
        """Wait for the results of the oldest batch that was launched, and commit its tokens. While
        another batch is being launched, `launching` is 1."""
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
        if parts and self._costs is not None:  # the copy came behind the step, which is over
            self._costs.share(leave=len(self._launched) + launching)

    def _catch_up(self) -> None:
        """Read all steps that were launched before the one that is being launched."""
        while self._launched:
            self._read_oldest(launching=1)
