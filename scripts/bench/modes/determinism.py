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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from measuring import DEVICE, commas
from shapes import MODELS
from torch import Tensor, nn
from workloads import dummy_model, model_config, prompt_vocab

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.layers import linear as linear_layer
from batchgen.engine.layers import norm as norm_layer
from batchgen.engine.layers.feed_forward import experts as experts_layer
from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.engine.layers.feed_forward import moe as moe_layer
from batchgen.engine.layers.mixers import attention as attention_layer
from batchgen.engine.layers.mixers import gated_delta_net as delta_layer
from batchgen.engine.layers.mixers import mla as latent_layer
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

LAYERS = {"qwen3-0.6b": 5, "qwen3-30b-a3b": 4, "hybrid-35b-a3b": 5, "deepseek-v2-lite": 4}
"""The models that run by default, and how many of their layers."""
_OPERATIONS = 256
_BLOCK = 16
_NEW_TOKENS = 24
_PROMPT = 44 * _BLOCK + 1
"""The row's prompt tokens: a shared prefix may leave one, and they are several splits long."""
_OPERATIONS_OF: tuple[tuple[Any, str, str | None, Callable[[Any], Tensor] | None], ...] = (
    (linear_layer, "linear", None, None),
    (linear_layer, "add_linear_", None, None),
    (norm_layer, "rms_norm", "norm", None),
    (norm_layer, "rms_norm_of_sum", "sum and norm", None),
    (mlp_layer, "silu_and_mul", "silu", None),
    (attention_layer, "prepare_qkv", "rotary", None),
    (attention_layer, "paged_attention", "attention", None),
    (attention_layer, "mul_sigmoid", "output gate", None),
    (latent_layer, "prepare_latent", "rotary", None),
    (latent_layer, "latent_attention", "attention", None),
    (delta_layer, "gated_rms_norm", "recurrence", None),
    (moe_layer, "route", "routing", lambda found: found[1]),
    (experts_layer, "grouped_parts", "experts", lambda found: found.transpose(0, 1)),
)
"""Where an operation is called, its function, how it is called here (products by their weights),
and how the rows of its result are found."""


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


class Tape:
    """The digests [operations, slots] of what operations made of the tokens at KV slots.

    Attributes:
        operations: maps (layer, name, how often it ran in the layer before) to a row of `plane`.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        draws = torch.Generator().manual_seed(0)
        self._factors = (torch.randint(2**62, (2**18,), generator=draws) * 2 + 1).to(device)
        self.plane = torch.zeros(_OPERATIONS, slots, dtype=torch.int64, device=device)
        self.operations: dict[tuple[int, str, int], int] = {}
        self._slots = torch.empty(0)
        self._layer: int | None = None
        self._seen: Counter[str] = Counter()
        self._whole = True

    @contextmanager
    def watching(self, model: CausalLM) -> Iterator[None]:
        """Note the operations of the model's layers within the context."""
        weights = {
            id(module.weight): path.rpartition(".")[2]
            for path, module in model.named_modules()
            if isinstance(module, linear_layer.Linear)
        }
        with ExitStack() as stack:
            handles = [
                model.model.register_forward_pre_hook(self._begin),
                model.model.register_forward_hook(self._end),
            ]
            for index, layer in enumerate(model.layers):
                enter = partial(self._enter, index, index == len(model.layers) - 1)
                handles.append(layer.register_forward_pre_hook(enter))
            for handle in handles:
                stack.callback(handle.remove)
            for module, name, label, rows in _OPERATIONS_OF:
                noting = self._noting(getattr(module, name), label, rows, weights)
                stack.enter_context(patch.object(module, name, noting))
            yield

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._slots, self._layer = args[2].kv_slots, None
        self._whole = args[2].outputs is None
        self.plane.index_fill_(1, self._slots, 0)  # what other rows left there

    def _enter(self, layer: int, last: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._layer = layer if self._whole or not last else None
        self._seen.clear()

    def _end(self, module: nn.Module, args: tuple[Any, ...], hidden: Tensor) -> None:
        if self._layer is not None:
            self._note("last norm", hidden)
        self._layer = None

    def _noting(
        self,
        run: Callable[..., Any],
        label: str | None,
        rows: Callable[[Any], Tensor] | None,
        weights: dict[int, str],
    ) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            found = run(*args, **options)
            if self._layer is not None and found is not None:
                names = (weights[id(each)] for each in args[1:] if id(each) in weights)
                self._note(label or next(names), found if rows is None else rows(found))
            return found

        return noting

    def _note(self, name: str, values: Tensor) -> None:
        assert self._layer is not None
        if len(values) != len(self._slots):
            return
        key = self._layer, name, self._seen[name]
        self._seen[name] += 1
        place = self.operations.setdefault(key, len(self.operations))
        values = values.flatten(1).contiguous()
        bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32).long()
        digests = bits.mul_(self._factors[: bits.shape[1]]).sum(1)
        self.plane[place].index_copy_(0, self._slots, digests)


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
