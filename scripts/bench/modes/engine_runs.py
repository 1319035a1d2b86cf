"""An engine of random weights that runs workloads, timed by phase."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from floors import Floor, floor_seconds
from measuring import DEVICE, H100, Rates, synchronize
from modes.routing import Routing, run_rows, set_routing
from modes.row_probe import Pictures
from workloads import (
    WORKLOADS,
    BenchRequest,
    bare_model,
    dummy_model,
    model_config,
    prompt_vocab,
    requests,
)

from batchgen.engine.device.step_timing import PhaseSplit, StepTime, StepTimer
from batchgen.engine.engine_models import planned_uses
from batchgen.engine.interface.engine_config import EngineConfig, ResolvedConfig
from batchgen.engine.layers.mxfp4_format import MXFP4Format
from batchgen.engine.layers.packed_format import FourBitFormat
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import Quantization
from batchgen.engine.memory.kernel_warmup import compiling_kernels
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.model_config import KVCacheDtype
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.four_bit.layouts import layout_of
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy

FULL_BATCH = 256
"""Rows of the decode steps that are reported on their own, if there were any."""
PICTURE_SIDE = 24
"""The most tokens of a picture's side."""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of a workload, from the first request to the last output.

    `floor` is the least time at the rates of an H100, `floor_here` at those measured on this GPU
    (None on a CPU). `prefill`, `decode` and `mixed` are the times of steps of that kind; mixed
    steps do both. `full_batch` are decode steps of one number of rows (see the function).
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
    preemptions: int
    cached_tokens: int
    peak_kv_usage: float

    @property
    def idle(self) -> float:
        """Seconds before steps in which the device waited for the host."""
        return sum(phase.idle_before for phase in (self.prefill, self.decode, self.mixed))


class Bench:
    """A model of random weights and its engine, with a timer of its steps.

    Every request asks for `columns`, and at most `most_requests` of a workload run. `scored`: rows
    score a given answer, as long as their output would be, and generate nothing. `pictures`: a
    picture stands before each prompt.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        routing: Routing = "model",
        columns: tuple[str, ...] = (),
        quantization: Quantization | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        most_requests: int | None = None,
        scored: bool = False,
        pictures: bool = False,
    ) -> None:
        self._columns, self._most_requests, self._runs = columns, most_requests, 0
        self._scored, self._draws = scored, random.Random(0)
        start = time.perf_counter()
        strategy: Strategy = ARStrategy()
        self.model_config = replace(model_config(model), kv_cache_dtype=kv_cache_dtype)
        if self.model_config.diffusion is not None:
            strategy = DLLMStrategy(4, unmasking="low_confidence_static", denoising_steps=2)
        model_type = model_class(self.model_config.architecture, Path())
        declared = {column.name for column in model_type.declared_columns(self.model_config)}
        context_columns = [name for name in columns if name in declared]

        def plan() -> tuple[list[ModelUse], ResolvedConfig]:
            bare = bare_model(self.model_config, DEVICE, quantization=quantization)
            uses, resolved = planned_uses(bare, {}, strategy, config, context_columns)
            return list(uses.values()), resolved

        with compiling_kernels(DEVICE, plan):
            self.weights = weights = dummy_model(
                model,
                DEVICE,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                vision=pictures,
            )
        set_routing(weights, routing)
        self._vocab, self._pictures = prompt_vocab(self.model_config.vocab_size), None
        if pictures:
            assert weights.visual is not None
            self._pictures = Pictures(weights.visual.config.rules, PICTURE_SIDE)
            self._vocab = self._pictures.vocab(self._vocab)
        synchronize()
        self.load_seconds = time.perf_counter() - start

        start = time.perf_counter()
        self.timer = StepTimer(DEVICE)
        self.engine = LLMEngine(
            weights, None, (), strategy, config, timer=self.timer, context_columns=context_columns
        )
        synchronize()
        self.engine_seconds = time.perf_counter() - start

    def load(self, name: str) -> list[BenchRequest]:
        """Make the requests of a workload, with prompts that the prefix cache does not have.

        One seed draws all workloads, so their prompts begin alike. Therefore all ids are shifted,
        by one more in every run.
        """
        shift, self._runs = self._runs, self._runs + 1
        return [
            replace(r, prompt=[(i + shift) % self._vocab for i in r.prompt])
            for r in requests(name, self._vocab)[: self._most_requests]
        ]

    def rows(self, load: Iterable[BenchRequest], temperature: float) -> list[tuple[Any, ...]]:
        """Make the arguments of `LLMEngine.add_request` after the id."""
        params = RequestParams(temperature=temperature, ignore_eos=True, columns=self._columns)
        rows = list[tuple[Any, ...]]()
        for index, request in enumerate(load):
            prompt, images, answer, new = request.prompt, [], None, request.output_len
            if self._pictures is not None:
                tokens, image = self._pictures.draw(self._draws)
                prompt, images = [*tokens, *prompt], [image]
            if self._scored:
                answer, new = [(7 * i + self._runs) % self._vocab for i in range(new)], 0
            rows.append((prompt, replace(params, max_new_tokens=new, seed=index), answer, images))
        return rows

    def warm_up(self, names: list[str], temperature: float) -> float:
        """Capture all graphs, and run rows that make the engine compile all that the workloads will
        need; returns the seconds that it took.

        The rows end one after another, so that decode steps have every number of rows from the
        largest down.
        """
        start = time.perf_counter()
        self.engine.capture_graphs()
        most = max(WORKLOADS[name].num_requests for name in names)
        rows = min(self.engine.config.max_num_seqs, most, self._most_requests or most)
        # Prompts of more than 2048 tokens launch the same kernels.
        longest = min(2048, max(WORKLOADS[name].input_lens[1] for name in names))
        sizes = [*range(rows, 8, -4), *range(min(rows, 8), 0, -1)]
        draws = random.Random("warm-up")
        load = []
        for row in range(rows):
            length = draws.randint(16, 64) if row % 8 else draws.randint(longest // 2, longest)
            prompt = [draws.randrange(self._vocab) for _ in range(length)]
            load.append(BenchRequest(prompt, 1 + sum(size > row for size in sizes)))
        run_rows(self.engine, self.rows(load, temperature))
        return time.perf_counter() - start

    def run(self, name: str, temperature: float, here: Rates | None) -> Run:
        """Run a workload once and time it; `here` are the rates measured on this GPU."""
        load, before = self.load(name), replace(self.engine.stats)
        self.engine.stats.peak_kv_usage = 0.0
        self.timer.reset()
        seconds, outputs = run_rows(self.engine, self.rows(load, temperature))
        for output, request in zip(outputs, load, strict=True):
            ended = output.finish_reason == "length" and len(output.token_ids) == request.output_len
            if not (ended or self._scored):
                raise RuntimeError(
                    f"request {output.request_id} ended with {output.finish_reason} "
                    f"({output.error}) after {len(output.token_ids)} of {request.output_len} tokens"
                )
        steps, stats = self.timer.steps(), self.engine.stats
        return Run(
            workload=name,
            seconds=seconds,
            prompt_tokens=sum(len(r.prompt) for r in load),
            output_tokens=sum(r.output_len for r in load),
            floor=self._floor(load, H100),
            floor_here=self._floor(load, here) if here else None,
            prefill=PhaseSplit.of(s for s in steps if s.kind == "prefill"),
            decode=PhaseSplit.of(s for s in steps if s.kind == "decode"),
            mixed=PhaseSplit.of(s for s in steps if s.kind == "mixed"),
            full_batch=full_batch(steps),
            preemptions=stats.preemptions - before.preemptions,
            cached_tokens=stats.cached_tokens - before.cached_tokens,
            peak_kv_usage=stats.peak_kv_usage,
        )

    def _floor(self, load: list[BenchRequest], rates: Rates) -> Floor:
        form = self.weights.form
        native = form is not None and form.native
        in_mxfp4, in_four_bits = isinstance(form, MXFP4Format), None
        if isinstance(form, FourBitFormat):
            in_four_bits = layout_of(form.code, torch.bfloat16, 4096, form.group or 4096)
        return floor_seconds(
            self.model_config,
            load,
            rates,
            in_fp8=native and not in_mxfp4 and in_four_bits is None,
            in_four_bits=in_four_bits,
            in_mxfp4=native and in_mxfp4,
        )


def full_batch(steps: list[StepTime]) -> PhaseSplit:
    """Sum up the decode steps of `FULL_BATCH` rows that follow another decode step.

    If there are none, sum up the steps of the largest number of rows instead.
    """
    following = [step for last, step in pairwise(steps) if last.kind == step.kind == "decode"]
    sizes = {step.rows for step in following}
    rows = FULL_BATCH if FULL_BATCH in sizes else max(sizes, default=0)
    return PhaseSplit.of(step for step in following if step.rows == rows)
