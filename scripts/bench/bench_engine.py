"""The engine of bench_throughput.py: runs workloads, timed by phase, or under the profiler."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from device_rates import H100, Rates
from expert_counts import Routing, Touched, count_touched, expert_layers, set_routing
from kernel_profile import profile_window
from workloads import (
    WORKLOADS,
    BenchRequest,
    Floor,
    bare_model,
    dummy_model,
    floor_seconds,
    model_config,
    prompt_vocab,
    requests,
)

from batchgen.engine.base.engine_config import EngineConfig, ResolvedConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.base.step_timing import PhaseSplit, StepTime, StepTimer
from batchgen.engine.engine_models import planned_uses
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import Quantization
from batchgen.engine.memory.kernel_warmup import compiling_kernels
from batchgen.engine.memory.memory_plan import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.ar.strategy import ARStrategy

FULL_BATCH = 256
"""Rows of the decode steps that are reported on their own, if there were any."""
PROFILED_PREFILLS = 4
PROFILED_DECODES = 20


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of a workload.

    Attributes:
        seconds: from the first request to the last output.
        floor: the floor of the time with the rates of an H100.
        floor_here: the floor with the rates measured on this GPU; None on a CPU.
        prefill, decode, mixed: the steps of each kind; a mixed step does both.
        full_batch: the decode steps of `FULL_BATCH` rows, as `full_batch` chooses them.
        by_batch: the decode steps by ranges of their numbers of rows, such as "1-32".
        preemptions: rows that gave their KV blocks back and were computed again.
        cached_tokens: prompt tokens that came from the prefix cache.
        peak_kv_usage: the largest share of the KV cache in use.
    """

    workload: str
    seconds: float
    prompt_tokens: int
    output_tokens: int
    floor: Floor
    floor_here: Floor | None
    prefill: PhaseSplit
    decode: PhaseSplit
    mixed: PhaseSplit
    full_batch: PhaseSplit
    by_batch: dict[str, PhaseSplit]
    preemptions: int
    cached_tokens: int
    peak_kv_usage: float

    @property
    def idle(self) -> float:
        """Seconds before steps in which the device waited for the host."""
        return sum(phase.idle_before for phase in (self.prefill, self.decode, self.mixed))

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def own_columns(model: CausalLM, columns: Sequence[str]) -> list[str]:
    """Return those of the columns that the model records."""
    own = {column.name for column in model.declared_columns(model.config)}
    return [name for name in columns if name in own]


class Bench:
    """A model of random weights and its engine.

    Attributes:
        weights: the model.
        load_seconds, engine_seconds: what it took to make the model, and then the engine.
        timer: times the engine's steps.
        max_num_seqs, max_batched_tokens: the engine's limits, as it resolved them.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        device: torch.device,
        *,
        routing: Routing = "model",
        columns: tuple[str, ...] = (),
        quantization: Quantization | None = None,
        most_requests: int | None = None,
    ) -> None:
        """Make both.

        Args:
            model: key of `MODELS`.
            config: the engine's settings.
            device: where both are.
            routing: who chooses the experts of tokens.
            columns: the names of the output columns that every request asks for.
            quantization: as for `load_model`.
            most_requests: how many requests of a workload are run; None runs all.
        """
        self.device, self._columns, self._most_requests = device, columns, most_requests
        start = time.perf_counter()
        strategy, self.model_config = ARStrategy(), model_config(model)

        def plan() -> tuple[list[ModelUse], ResolvedConfig]:
            bare = bare_model(self.model_config, device, quantization=quantization)
            uses, resolved = planned_uses(bare, {}, strategy, config, own_columns(bare, columns))
            return list(uses.values()), resolved

        with compiling_kernels(device, plan):
            self.weights = weights = dummy_model(model, device, quantization=quantization)
        set_routing(weights, routing)
        self.synchronize()
        self.load_seconds = time.perf_counter() - start

        start = time.perf_counter()
        self.timer = StepTimer(device)
        self.engine = LLMEngine(
            weights,
            None,
            (),
            strategy,
            config,
            timer=self.timer,
            context_columns=own_columns(weights, columns),
        )
        self.synchronize()
        self.engine_seconds = time.perf_counter() - start
        resolved = self.engine.config
        assert resolved.max_batched_tokens is not None
        self.max_num_seqs = resolved.max_num_seqs
        self.max_batched_tokens = resolved.max_batched_tokens
        self._runs = 0

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def load(self, name: str) -> list[BenchRequest]:
        """Make the requests of a workload, with prompts that the prefix cache does not have.

        All workloads are drawn with one seed, so their prompts begin alike. Therefore all ids are
        shifted, by one more in every run.
        """
        vocab = prompt_vocab(self.model_config.vocab_size)
        shift, self._runs = self._runs, self._runs + 1
        return [
            replace(r, prompt=[(i + shift) % vocab for i in r.prompt])
            for r in requests(name, vocab)[: self._most_requests]
        ]

    def add(self, load: list[BenchRequest], temperature: float) -> None:
        for index, request in enumerate(load):
            params = SamplingParams(
                temperature=temperature,
                max_new_tokens=request.output_len,
                ignore_eos=True,
                seed=index,
                columns=self._columns,
            )
            self.engine.add_request(str(index), request.prompt, params)

    def finish(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while self.engine.has_unfinished():
            outputs += self.engine.step()
        self.synchronize()
        return outputs

    def first_token(self, temperature: float) -> None:
        self.add([BenchRequest(list(range(64)), 1)], temperature)
        self.finish()

    def warm_up(self, names: list[str], temperature: float) -> float:
        """Capture all graphs, and run rows that make the engine compile all that the workloads will
        need.

        The rows end one after another, so that decode steps have every number of rows from the
        largest down. Returns the seconds that it took.
        """
        start = time.perf_counter()
        self.engine.capture_graphs()
        rows = min(self.max_num_seqs, max(WORKLOADS[name].num_requests for name in names))
        longest = max(WORKLOADS[name].input_lens[1] for name in names)
        sizes = [*range(rows, 8, -4), *range(min(rows, 8), 0, -1)]
        draws = random.Random("warm-up")
        load = []
        for row in range(rows):
            length = draws.randint(16, 64) if row % 8 else draws.randint(longest // 2, longest)
            prompt = [draws.randrange(self.model_config.vocab_size) for _ in range(length)]
            load.append(BenchRequest(prompt, 1 + sum(size > row for size in sizes)))
        self.add(load, temperature)
        self.finish()
        return time.perf_counter() - start

    def run(self, name: str, temperature: float, here: Rates | None) -> Run:
        """Run a workload once and time it.

        Args:
            name: key of `WORKLOADS`.
            temperature: of the sampling.
            here: the rates measured on this GPU; None on a CPU.

        Raises:
            RuntimeError: if a request did not yield the tokens that were asked for.
        """
        load = self.load(name)
        before = replace(self.engine.stats)
        self.engine.stats.peak_kv_usage = 0.0
        self.timer.reset()
        gc.collect()
        self.synchronize()
        start = time.perf_counter()
        self.add(load, temperature)
        outputs = self.finish()
        seconds = time.perf_counter() - start

        for output in outputs:
            wanted = load[int(output.request_id)].output_len
            if output.finish_reason != "length" or len(output.token_ids) != wanted:
                raise RuntimeError(
                    f"request {output.request_id} ended with {output.finish_reason} "
                    f"({output.error}) after {len(output.token_ids)} of {wanted} tokens"
                )
        if len(outputs) != len(load):
            raise RuntimeError(f"{len(outputs)} of {len(load)} requests came back")
        steps, stats = self.timer.steps(), self.engine.stats
        return Run(
            workload=name,
            seconds=seconds,
            prompt_tokens=sum(len(r.prompt) for r in load),
            output_tokens=sum(r.output_len for r in load),
            floor=self.floor(load, H100),
            floor_here=self.floor(load, here) if here else None,
            prefill=PhaseSplit.of(s for s in steps if s.kind == "prefill"),
            decode=PhaseSplit.of(s for s in steps if s.kind == "decode"),
            mixed=PhaseSplit.of(s for s in steps if s.kind == "mixed"),
            full_batch=full_batch(steps),
            by_batch=by_batch(steps),
            preemptions=stats.preemptions - before.preemptions,
            cached_tokens=stats.cached_tokens - before.cached_tokens,
            peak_kv_usage=stats.peak_kv_usage,
        )

    def free(self) -> None:
        """Drop the engine, so that its memory is there for another one; no more runs after that."""
        del self.engine
        gc.collect()

    def touched(self, name: str) -> list[Touched]:
        """Count the experts that steps with the first rows of a workload touch.

        The list is empty for a model without experts. The memory may hold one engine alone, so
        `free` comes first.
        """
        if not expert_layers(self.weights):
            return []
        gib = 2.5 if self.device.type == "cuda" else 0.02
        return count_touched(self.weights, self.load(name), self.max_num_seqs, gib)

    def floor(self, load: list[BenchRequest], rates: Rates) -> Floor:
        return floor_seconds(
            self.model_config,
            load,
            bandwidth=rates.bandwidth,
            flops=rates.flops,
            in_fp8=self.weights.form is not None and self.weights.form.native,
        )

    def profile(self, name: str, temperature: float, path: Path, after: int) -> None:
        """Print which kernels take the time of the first prefills, and of full decode steps.

        Args:
            name: key of `WORKLOADS`.
            temperature: of the sampling.
            path: its folder gets the two traces, named WORKLOAD-prefill-NAME and
                WORKLOAD-decode-NAME, where NAME is the path's.
            after: decode steps before the profiled ones; contexts grow meanwhile.
        """
        length = after + 2 * PROFILED_DECODES  # no row ends before the window does
        load = [replace(r, output_len=length) for r in self.load(name)[: self.max_num_seqs]]
        self.add(load, temperature)
        try:
            tokens = sum(len(r.prompt) for r in load)
            full_prefills = max(1, tokens // self.max_batched_tokens)
            self._profile("prefill", min(PROFILED_PREFILLS, full_prefills), path, name)
            # All rows that fit have been prefilled when a step reads no prompt any more.
            stats = self.engine.stats
            prefills = -1
            while stats.prefill_steps != prefills:
                prefills = stats.prefill_steps
                self.engine.step()
            for _ in range(after):
                self.engine.step()
            self._profile("decode", PROFILED_DECODES, path, name)
        finally:
            for index in range(len(load)):
                self.engine.abort(str(index))

    def _profile(self, kind: str, count: int, path: Path, name: str) -> None:
        self.synchronize()
        self.timer.reset()
        trace = path.with_name(f"{name}-{kind}-{path.name}")
        window = profile_window(lambda: self._steps(count), trace)
        steps = self.timer.steps()
        kinds = {step.kind for step in steps}
        rows = statistics.mean(step.rows for step in steps)
        title = f"{name}: {len(steps)} {'+'.join(sorted(kinds))} steps of {rows:.1f} rows"
        print(window.table(title, len(steps)))

    def _steps(self, count: int) -> None:
        while len(self.timer) < count and self.engine.has_unfinished():
            self.engine.step()


def full_batch(steps: list[StepTime]) -> PhaseSplit:
    """Sum up the decode steps of `FULL_BATCH` rows that follow another decode step.

    If there are none, the steps of the largest number of rows take their place.
    """
    following = [b for a, b in pairwise(steps) if a.kind == b.kind == "decode"]
    sizes = {step.rows for step in following}
    rows = FULL_BATCH if FULL_BATCH in sizes else max(sizes, default=0)
    return PhaseSplit.of(step for step in following if step.rows == rows)


def by_batch(steps: list[StepTime], width: int = 32) -> dict[str, PhaseSplit]:
    """Sum up the decode steps by ranges of `width` numbers of rows, such as "1-32"."""
    groups: dict[int, list[StepTime]] = defaultdict(list)
    for step in steps:
        if step.kind == "decode":
            groups[(step.rows - 1) // width].append(step)
    return {
        f"{group * width + 1}-{(group + 1) * width}": PhaseSplit.of(members)
        for group, members in sorted(groups.items())
    }
