"""The mode determinism of bench_engine.py: does a row keep its bits, whatever else is in the batch?

A digest of each operation's result for a token is kept at the token's KV slot, so those of rejected
drafts are overwritten, and a row that shares a prefix has the digests of the row that computed it.
The digests are made within captured CUDA graphs too. Those of one run of the row alone are the
reference. An operation that is the first to differ, in the order of the layers, at any position, is
the cause: all that it read was equal. A prefill leaves no digests of the last layer, of which it
computes only some tokens.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from measuring import DEVICE, commas
from modes.digests import Tape
from shapes import MODELS
from torch import Tensor
from workloads import dummy_model, model_config, prompt_vocab

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

LAYERS = {"qwen3-0.6b": 5, "qwen3-30b-a3b": 4, "hybrid-35b-a3b": 5, "deepseek-v2-lite": 4}
"""The models that run by default, and how many of their layers."""
_BLOCK = 16
_NEW_TOKENS = 24
_PROMPT = 44 * _BLOCK + 1
"""The row's prompt tokens: a shared prefix may leave one, and they are several splits long."""


class Schedule(NamedTuple):
    """What surrounds a row.

    Attributes:
        before, after: the prompt and output lengths of rows that join before and after it.
        steps: the engine's steps before it joins.
        shared: how many of its prompt's tokens another row has computed.
        most_tokens, chunk_tokens: the most tokens of a prefill alone, and beside decoding rows.
    """

    before: Sequence[tuple[int, int]] = ()
    after: Sequence[tuple[int, int]] = ()
    steps: int = 0
    shared: int = 0
    most_tokens: int = 4096
    chunk_tokens: int = 0

    @classmethod
    def drawn(cls, draws: random.Random, most_rows: int) -> Schedule:
        rows = min(draws.choice((0, 1, 3, 7, 15, 31, 63, 120, 180)), most_rows - 2)
        lengths = [
            (draws.choice((draws.randint(1, 40), draws.randint(40, 400))), draws.randint(1, 40))
            for _ in range(rows)
        ]
        cut = draws.randint(0, rows)
        blocks = draws.choice((0, 0, 0, draws.randint(1, _PROMPT // _BLOCK), _PROMPT // _BLOCK))
        most, chunk = draws.choice((256, 512, 1024, 4096)), draws.choice((0, 64, 128, 256))
        before, after = lengths[:cut], lengths[cut:]
        return cls(before, after, draws.randint(0, 12), blocks * _BLOCK, most + 256, chunk)


class Result(NamedTuple):
    """A row's output, and the digests [operations, tokens] of its KV slots."""

    output: RequestOutput
    digests: Tensor


class Probe:
    """One row in an engine of its own, to be run under schedules."""

    def __init__(
        self, model: CausalLM, tape: Tape, tokens: int, rows: int, *, drafts: bool, graphs: bool
    ) -> None:
        self._tape, self._vocab = tape, prompt_vocab(model.vocab_size)
        each = paged_token_bytes(model.cache_specs, (), model.dtype)
        config = EngineConfig(
            max_num_seqs=rows,
            max_batched_tokens=4096 + 256,
            chunk_tokens=256,
            max_model_len=1024,
            kv_cache_gib=tokens * each / 2**30,
            cuda_graph=graphs,
            block_size=_BLOCK,
        )
        spec = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1)
        self.engine = LLMEngine(model, None, (), spec if drafts else ARStrategy(), config)
        assert self.engine.memory.num_blocks * _BLOCK <= tape.plane.shape[1]
        self.blocks = self.engine.scheduler.block_manager
        self._free = self.blocks.free
        self.blocks.free = self._keep  # type: ignore[assignment, method-assign]
        draws = random.Random("probe")
        self._prompt = [draws.randrange(self._vocab) for _ in range(_PROMPT)]
        self._digests = torch.empty(0)

    def _keep(self, row: Row) -> None:
        if row.request_id == "probe":
            slots = torch.tensor(row.block_table, device=self._tape.plane.device)[:, None] * _BLOCK
            slots = (slots + torch.arange(_BLOCK, device=slots.device)).flatten()
            self._digests = self._tape.plane[:, slots].clone()
        self._free(row)

    def run(self, schedule: Schedule, draws: random.Random) -> Result:
        """Run the row to its end under a schedule, and drop the others then."""
        engine, outputs = self.engine, dict[str, RequestOutput]()
        self._forget()
        engine.scheduler.limits = replace(
            engine.scheduler.limits,
            max_batched_tokens=schedule.most_tokens,
            chunk_tokens=schedule.chunk_tokens,
        )

        def step() -> None:
            outputs.update({output.request_id: output for output in engine.step()})

        def add(lengths: Sequence[tuple[int, int]], name: str) -> None:
            for index, (prompt, new) in enumerate(lengths):
                ids = [draws.randrange(self._vocab) for _ in range(prompt)]
                params = SamplingParams(temperature=0.8, max_new_tokens=new, seed=index)
                engine.add_request(f"{name} {index}", ids, params)

        if schedule.shared:
            ids = [*self._prompt[: schedule.shared], draws.randrange(self._vocab)]
            engine.add_request("sharing", ids, SamplingParams(max_new_tokens=1))
            while engine.has_unfinished():
                step()
        add(schedule.before, "before")
        for _ in range(schedule.steps):
            step()
        # The penalties let the row repeat itself, so that drafts hold.
        params = SamplingParams(
            temperature=0, presence_penalty=-2, frequency_penalty=-2, max_new_tokens=_NEW_TOKENS,
            logprobs=True,
        )  # fmt: skip
        engine.add_request("probe", self._prompt, params)
        add(schedule.after, "after")
        while "probe" not in outputs:
            step()
        for name, lengths in (("before", schedule.before), ("after", schedule.after)):
            for index in range(len(lengths)):
                engine.abort(f"{name} {index}")
        while engine.has_unfinished():
            step()
        return Result(outputs["probe"], self._digests.cpu())

    def _forget(self) -> None:
        """Empty the tape and the prefix cache."""
        self._tape.plane.zero_()
        for digest in list(self.blocks._published):
            if self.blocks.states is not None:
                self.blocks.states.forget(digest)
        self.blocks._published.clear()
        self.blocks._hash_of.clear()


def first_difference(tape: Tape, reference: Result, found: Result) -> str | None:
    """Name the first operation whose digests differ at tokens that both runs have in common, and
    where; None if nothing differs."""
    tokens, others = (np.array(each.output.token_ids) for each in (reference, found))
    equal = int(np.cumprod(tokens == others).sum())
    common = _PROMPT + min(equal, len(tokens) - 1)
    for (layer, name, _), place in sorted(tape.operations.items(), key=lambda o: (o[0][0], o[1])):
        a, b = reference.digests[place, :common], found.digests[place, :common]
        differs = ((a != b) & (a != 0) & (b != 0)).nonzero()
        if len(differs):
            where = "prompt" if int(differs[0]) < _PROMPT else "generated"
            return f"{name} of layer {layer}, {where}"
    before, now = (each.output.columns["logprobs"] for each in (reference, found))
    differing = ((before != now) | (tokens != others)).nonzero()[0].tolist()
    if not differing:
        return None
    return f"last layer, head or sampler, {'later' if differing[0] else 'first'} token"


def run_schedules(
    name: str, count: int, *, tokens: int, rows: int, layers: int | None = None
) -> dict[str, dict[str, int]]:
    """Run a row of a model under `count` schedules over four kinds of engines, two on a CPU.

    `tokens` is the room of the paged cache, `rows` the most rows in flight. Counted are schedules
    that gave the row other bits, by kind of engine and by first cause, and what they have met.
    """
    on_gpu, draws = DEVICE.type == "cuda", random.Random(0)
    by_kind, by_cause, seen = Counter[str](), Counter[str](), Counter[str]()
    layers = layers or model_config(name).num_layers
    model = dummy_model(name, DEVICE, num_hidden_layers=layers)
    tape, reference = Tape(tokens + 1024, DEVICE), None
    kinds = [*product((False, True), (False, True)[: 1 + on_gpu])]
    with tape.watching(model):
        for number, (drafts, graphs) in enumerate(kinds):
            probe = Probe(model, tape, tokens, rows, drafts=drafts, graphs=graphs)
            reference = reference or probe.run(Schedule(), draws)
            kind = f"{'drafts' if drafts else 'plain'}, {'graphs' if graphs else 'eager'}"
            for _ in range(number, count, len(kinds)):
                found = probe.run(Schedule.drawn(draws, rows), draws)
                seen["prefix hits"] += found.output.num_cached_tokens > 0
                seen["preempted"] += found.output.num_preemptions
                seen["accepted drafts"] += found.output.counts.get("num_accepted_tokens", 0)
                if cause := first_difference(tape, reference, found):
                    by_cause[cause] += 1
                    by_kind[kind] += 1
            del probe
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    return {"by_cause": dict(by_cause.most_common()), "by_kind": dict(by_kind), "seen": dict(seen)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=commas(str, MODELS), default=[*LAYERS])
    parser.add_argument("--schedules", type=int, default=200)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a row beside random other rows, cut into random chunks, with CUDA graphs or not, with
    drafts or not, after a prefix hit or not; say how often it keeps the bits that it has alone, and
    else the first operation whose result differs.

    It needs a GPU for figures; on a CPU, with smaller batches, no bit may differ.
    """
    tokens, rows = (60_000, 192) if DEVICE.type == "cuda" else (3_000, 6)
    results = []
    for name in options.models:
        layers, count = LAYERS.get(name), options.schedules
        found = run_schedules(name, count, tokens=tokens, rows=rows, layers=layers)
        equal = count - sum(found["by_kind"].values())
        print(f"{name}, {layers or 'all'} layers: {equal} of {count} schedules equal; {found}")
        results.append({"model": name, "layers": layers, "schedules": count, **found})
    return results
