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

from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.library import keep_one_order
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy

LAYERS = {
    "qwen3-0.6b": 5, "qwen3-30b-a3b": 4, "sdar-8b": 4, "gemma3-27b": 6, "gemma4-26b-a4b": 6,
    "qwen3-8b-fp8": 4, "qwen3-30b-a3b-fp8": 4, "gpt-oss-20b": 4, "hybrid-35b-a3b": 5,
    "deepseek-v2-lite": 4, "qwen3-vl-8b": 4,
}  # fmt: skip
"""The models that run by default, and how many of their layers."""
_BLOCK = 16
_NEW_TOKENS = 24
_BLOCK_LENGTH = 4
"""The positions of a block of diffusion models."""


class Schedule(NamedTuple):
    """What surrounds a row.

    Attributes:
        before, after: the prompt and output lengths of rows that join before and after it.
        steps: the engine's steps before it joins.
        shared: how many of its prompt's tokens another row has computed.
        most_tokens, chunk_tokens: the most tokens of a prefill alone, and beside decoding rows.
        preempted: how many tokens it has generated when it is preempted; 0 never.
    """

    before: Sequence[tuple[int, int]] = ()
    after: Sequence[tuple[int, int]] = ()
    steps: int = 0
    shared: int = 0
    most_tokens: int = 4096
    chunk_tokens: int = 0
    preempted: int = 0

    @classmethod
    def drawn(cls, draws: random.Random, most_rows: int, most_blocks: int) -> Schedule:
        rows = min(draws.choice((0, 1, 3, 7, 15, 31, 63, 120, 180)), most_rows - 2)
        lengths = [
            (draws.choice((draws.randint(1, 40), draws.randint(40, 400))), draws.randint(1, 40))
            for _ in range(rows)
        ]
        cut = draws.randint(0, rows)
        blocks = draws.choice((0, 0, 0, draws.randint(1, most_blocks), most_blocks))
        most, chunk = draws.choice((256, 512, 1024, 4096)), draws.choice((0, 64, 128, 256))
        before, after = lengths[:cut], lengths[cut:]
        steps, preempted = draws.randint(0, 12), draws.choice((0, 0, draws.randint(1, 20)))
        return cls(before, after, steps, blocks * _BLOCK, most + 256, chunk, preempted)


class Result(NamedTuple):
    """A row's output, and the digests [operations, tokens] of its KV slots."""

    output: RequestOutput
    digests: Tensor


class Sizes(NamedTuple):
    """The room of the paged cache, the most rows in flight, and the blocks of the row's prompt,
    which has one token more: a shared prefix may leave that one."""

    tokens: int
    rows: int
    blocks: int


ON_GPU, ON_CPU = Sizes(90_000, 192, 160), Sizes(3_000, 6, 44)
"""On a GPU the prompt is longer than a split of a context under any rule."""


class Probe:
    """One row in an engine of its own, to be run under schedules."""

    def __init__(
        self,
        model: CausalLM,
        tape: Tape,
        sizes: Sizes,
        *,
        drafts: bool,
        graphs: bool,
        deterministic: bool,
    ) -> None:
        self._tape, self._vocab = tape, prompt_vocab(model.vocab_size)
        each = paged_token_bytes(model.cache_specs, (), model.dtype)
        config = EngineConfig(
            max_num_seqs=sizes.rows,
            max_batched_tokens=4096 + 256,
            chunk_tokens=256,
            max_model_len=1024 * (1 + sizes.blocks // 64),
            kv_cache_gib=sizes.tokens * each / 2**30,
            cuda_graph=graphs,
            block_size=_BLOCK,
            deterministic=deterministic,
        )
        self._diffuses = model.config.diffusion is not None
        strategy: Strategy = ARStrategy()
        if self._diffuses:
            strategy = DLLMStrategy(_BLOCK_LENGTH)
        elif drafts:
            strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1)
        self.engine = LLMEngine(model, None, (), strategy, config)
        assert self.engine.memory.num_blocks * _BLOCK <= tape.plane.shape[1]
        self.blocks = self.engine.scheduler.block_manager
        self._free = self.blocks.free
        self.blocks.free = self._keep  # type: ignore[assignment, method-assign]
        draws = random.Random("probe")
        self.prompt = [draws.randrange(self._vocab) for _ in range(sizes.blocks * _BLOCK + 1)]
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
            ids = [*self.prompt[: schedule.shared], draws.randrange(self._vocab)]
            engine.add_request("sharing", ids, SamplingParams(max_new_tokens=1))
            while engine.has_unfinished():
                step()
        add(schedule.before, "before")
        for _ in range(schedule.steps):
            step()
        # The penalties let the row repeat itself, so that drafts hold.
        params = SamplingParams(temperature=0, max_new_tokens=_NEW_TOKENS, logprobs=True)
        if not self._diffuses:
            params = replace(params, presence_penalty=-2, frequency_penalty=-2)
        engine.add_request("probe", self.prompt, params)
        add(schedule.after, "after")
        preempted = schedule.preempted
        while "probe" not in outputs:
            step()
            if preempted and self._preempt(preempted):
                preempted = 0
        for name, lengths in (("before", schedule.before), ("after", schedule.after)):
            for index in range(len(lengths)):
                engine.abort(f"{name} {index}")
        while engine.has_unfinished():
            step()
        return Result(outputs["probe"], self._digests.cpu())

    def _preempt(self, generated: int) -> bool:
        """Preempt the row if it has generated so many tokens."""
        scheduler = self.engine.scheduler
        for seq in scheduler.running.rows:
            tokens = scheduler.running.num_tokens[seq.batch_slot]
            ready = not seq.is_prefilling and tokens - len(self.prompt) >= generated
            if seq.request_id == "probe" and ready:
                scheduler._preempt(seq)
                return True
        return False

    def scores(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of these tokens behind the prompt, scored."""
        params = SamplingParams(max_new_tokens=0)
        self.engine.add_request("scored", self.prompt, params, answer_token_ids=tokens)
        while True:
            for output in self.engine.step():
                return [float(x) for x in output.columns["answer_logprobs"]]

    def _forget(self) -> None:
        """Empty the tape and the prefix cache."""
        self._tape.plane.zero_()
        for digest in list(self.blocks._published):
            if self.blocks.states is not None:
                self.blocks.states.forget(digest)
        self.blocks._published.clear()
        self.blocks._hash_of.clear()


def first_difference(tape: Tape, reference: Result, found: Result, prompt: int) -> str | None:
    """Name the first operation whose digests differ at tokens that both runs have in common, and
    where; None if nothing differs."""
    tokens, others = (np.array(each.output.token_ids) for each in (reference, found))
    equal = int(np.cumprod(tokens == others).sum())
    common = prompt + min(equal, len(tokens) - 1)
    for (layer, name, _), place in sorted(tape.operations.items(), key=lambda o: (o[0][0], o[1])):
        a, b = reference.digests[place, :common], found.digests[place, :common]
        differs = ((a != b) & (a != 0) & (b != 0)).nonzero()
        if len(differs):
            where = "prompt" if int(differs[0]) < prompt else "generated"
            return f"{name} of layer {layer}, {where}"
    before, now = (each.output.columns["logprobs"] for each in (reference, found))
    differing = ((before != now) | (tokens != others)).nonzero()[0].tolist()
    if not differing:
        return None
    return f"last layer, head or sampler, {'later' if differing[0] else 'first'} token"


def fewer_layers(name: str, layers: int) -> dict[str, Any]:
    """Return the changes of config.json that leave the first layers of a model."""
    whole = MODELS[name]
    inner = whole.get("text_config", whole)
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if (kinds := inner.get("layer_types")) is not None:
        changes["layer_types"] = kinds[:layers]
    return changes if inner is whole else {"text_config": inner | changes}


def run_schedules(
    name: str,
    count: int,
    sizes: Sizes,
    *,
    layers: int | None = None,
    deterministic: bool = False,
) -> dict[str, dict[str, int]]:
    """Run a row of a model under `count` schedules over four kinds of engines, two on a CPU.

    Counted are schedules that gave the row other bits, by kind of engine and by first cause, and
    what they have met. The row's tokens are scored, too, which is no schedule.
    """
    on_gpu, draws = DEVICE.type == "cuda", random.Random(0)
    by_kind, by_cause, seen = Counter[str](), Counter[str](), Counter[str]()
    layers = layers or model_config(name).num_layers
    model = dummy_model(name, DEVICE, **fewer_layers(name, layers))
    tape, reference = Tape(sizes.tokens + 1024, DEVICE), None
    drafts_too = (False,) if model.config.diffusion is not None else (False, True)
    kinds = [*product(drafts_too, (False, True)[: 1 + on_gpu])]
    with tape.watching(model):
        for number, (drafts, graphs) in enumerate(kinds):
            probe = Probe(
                model, tape, sizes, drafts=drafts, graphs=graphs, deterministic=deterministic
            )
            reference = reference or probe.run(Schedule(), draws)
            seen["other scores"] += 0
            if model.config.diffusion is None and not drafts:
                scored = probe.scores(reference.output.token_ids)
                same = scored == reference.output.columns["logprobs"].tolist()
                seen["other scores"] += not same
            kind = f"{'drafts' if drafts else 'plain'}, {'graphs' if graphs else 'eager'}"
            for _ in range(number, count, len(kinds)):
                found = probe.run(Schedule.drawn(draws, sizes.rows, sizes.blocks), draws)
                seen["prefix hits"] += found.output.num_cached_tokens > 0
                seen["preempted"] += found.output.num_preemptions
                seen["accepted drafts"] += found.output.counts.get("num_accepted_tokens", 0)
                if cause := first_difference(tape, reference, found, len(probe.prompt)):
                    by_cause[cause] += 1
                    by_kind[kind] += 1
            print(f"{name}, {kind}: {by_kind[kind]} schedules with other bits", flush=True)
            del probe
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    return {"by_cause": dict(by_cause.most_common()), "by_kind": dict(by_kind), "seen": dict(seen)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=commas(str, MODELS), default=[*LAYERS])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--deterministic", action="store_true", help="with engine.deterministic")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a row beside random other rows, cut into random chunks, with CUDA graphs or not, with
    drafts or not, after a prefix hit or not; say how often it keeps the bits that it has alone, and
    else the first operation whose result differs.

    It needs a GPU for figures; on a CPU, with smaller batches, no bit may differ.
    """
    sizes, results = ON_GPU if DEVICE.type == "cuda" else ON_CPU, []
    if options.deterministic and DEVICE.type == "cuda":
        keep_one_order()
    for name in options.models:
        layers, count = LAYERS.get(name), options.schedules
        found = run_schedules(
            name, count, sizes, layers=layers, deterministic=options.deterministic
        )
        equal = count - sum(found["by_kind"].values())
        print(f"{name}, {layers or 'all'} layers: {equal} of {count} schedules equal; {found}")
        results.append({"model": name, "layers": layers, "schedules": count, **found})
    return results
