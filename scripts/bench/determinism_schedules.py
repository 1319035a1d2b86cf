"""Runs a row under random schedules and finds the first operation whose result differs.

A digest of each operation's result for a token is kept at the token's KV slot, so those of rejected
drafts are overwritten, and a row that shares a prefix has the digests of the row that computed it.
The digests are made within captured CUDA graphs too. Those of one run of the row alone are the
reference. An operation that is the first to differ, in the order of the layers, at any position, is
the cause: all that it read was equal. A prefill leaves no digests of the last layer, of which it
computes only some tokens. Of the head it is known whether equal hidden states gave equal logits.
"""

from __future__ import annotations

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
from determinism_changes import STAGES, changes
from floors import mixers
from torch import Tensor, nn
from workloads import bare_model, dummy_model, model_config, prompt_vocab

from batchgen.engine.base.engine_config import EngineConfig, ResolvedConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.engine_models import planned_uses
from batchgen.engine.layers import linear as linear_layer
from batchgen.engine.layers import norm as norm_layer
from batchgen.engine.layers.feed_forward import experts as experts_layer
from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.engine.layers.feed_forward import moe as moe_layer
from batchgen.engine.layers.mixers import attention as attention_layer
from batchgen.engine.layers.mixers import gated_delta_net as delta_layer
from batchgen.engine.layers.mixers import mla as latent_layer
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.memory.kernel_warmup import compiling_kernels
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

_OPERATIONS = 256
_BLOCK = 16
_NEW_TOKENS = 24
_PROMPT = 44 * _BLOCK + 1
"""The row's prompt tokens: a shared prefix may leave one, and they are several splits long."""


class Kind(NamedTuple):
    """What an engine is made with."""

    drafts: bool
    graphs: bool

    def __str__(self) -> str:
        return f"{'drafts' if self.drafts else 'plain'}, {'graphs' if self.graphs else 'eager'}"


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
        return cls(
            lengths[:cut],
            lengths[cut:],
            draws.randint(0, 12),
            blocks * _BLOCK,
            draws.choice((256, 512, 1024, 4096)) + 256,
            draws.choice((0, 64, 128, 256)),
        )


class Tape:
    """The digests [operations, slots] of what operations made of the tokens at KV slots.

    Attributes:
        operations: maps (layer, name, how often it ran in the layer before) to a row of `plane`.
        unsteady_heads: how often hidden states gave other logits than before.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        draws = torch.Generator().manual_seed(0)
        factors = torch.randint(2**62, (2**18,), generator=draws) * 2 + 1
        self.plane = torch.zeros(_OPERATIONS, slots, dtype=torch.int64, device=device)
        self.operations: dict[tuple[int, str, int], int] = {}
        self._factors = factors.to(device)
        self._slots: Tensor | None = None
        self._layer: int | None = None
        self._seen: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self._whole = True
        self._heads: dict[int, int] = {}
        self.unsteady_heads = 0

    @contextmanager
    def watching(self, model: CausalLM) -> Iterator[None]:
        """Note the operations of the model's layers within the context."""
        with ExitStack() as stack:
            handles = [
                model.model.register_forward_pre_hook(self._begin),
                model.model.register_forward_hook(self._end),
                model.lm_head.register_forward_hook(self._note_head),
            ]
            for index, layer in enumerate(model.layers):
                last = index == len(model.layers) - 1
                enter = partial(self._enter, index, last)
                handles.append(layer.register_forward_pre_hook(enter))
            for handle in handles:
                stack.callback(handle.remove)
            weight = partial(self._weight_name, model)
            for module, name, label, rows in (
                (linear_layer, "linear", lambda a: weight(a[1]), None),
                (linear_layer, "add_linear_", lambda a: weight(a[2]), None),
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
            ):
                noting = self._noting(getattr(module, name), label, rows)
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
            self._note("last norm", None, hidden)
        self._layer = None

    def _note_head(self, module: nn.Module, args: tuple[Tensor], logits: Tensor) -> None:
        if not logits.is_cuda or not torch.cuda.is_current_stream_capturing():
            rows = zip(*(self._hash(x).tolist() for x in (args[0], logits)), strict=True)
            for hidden, found in rows:
                self.unsteady_heads += self._heads.setdefault(hidden, found) != found

    def _hash(self, values: Tensor) -> Tensor:
        """Return a digest [T] of the bits of each of T rows."""
        values = values.flatten(1).contiguous()
        bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32).long()
        return bits.mul_(self._factors[: bits.shape[1]]).sum(1)

    def _weight_name(self, model: CausalLM, weight: Tensor) -> str:
        if id(weight) not in self._names:
            for path, module in model.named_modules():
                if isinstance(module, linear_layer.Linear):
                    self._names[id(module.weight)] = path.rpartition(".")[2]
        return self._names[id(weight)]

    def _noting(
        self, run: Callable[..., Any], label: Any, rows: Callable[[Any], Tensor] | None
    ) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            found = run(*args, **options)
            if self._layer is not None and found is not None:
                self._note(label if isinstance(label, str) else label(args), rows, found)
            return found

        return noting

    def _note(self, name: str, rows: Callable[[Any], Tensor] | None, found: Any) -> None:
        assert self._slots is not None and self._layer is not None
        values = found if rows is None else rows(found)
        if len(values) != len(self._slots):
            return
        key = self._layer, name, self._seen[name]
        self._seen[name] += 1
        place = self.operations.setdefault(key, len(self.operations))
        self.plane[place].index_copy_(0, self._slots, self._hash(values))


class Result(NamedTuple):
    """A row's output, and the digests [operations, tokens] of its KV slots."""

    output: RequestOutput
    digests: Tensor


class Probe:
    """One row in an engine of its own, to be run under schedules."""

    def __init__(self, model: CausalLM, tape: Tape, kind: Kind, tokens: int, rows: int) -> None:
        self._tape, self._vocab = tape, prompt_vocab(model.vocab_size)
        strategy: Strategy = ARStrategy()
        if kind.drafts:
            strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1)
        value = torch.float32.itemsize if model.device.type == "cpu" else 2
        config = EngineConfig(
            max_num_seqs=rows,
            max_batched_tokens=4096 + 256,
            chunk_tokens=256,
            max_model_len=1024,
            kv_cache_gib=tokens * mixers(model.config).kv_bytes * value / 2 / 2**30,
            cuda_graph=kind.graphs,
            block_size=_BLOCK,
        )
        with compiling_kernels(model.device, partial(_planned, model, strategy, config)):
            pass
        self.engine = LLMEngine(model, None, (), strategy, config)
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
        engine, outputs = self.engine, {}
        self._tape.plane.zero_()
        for digest in list(self.blocks._published):
            if self.blocks.states is not None:
                self.blocks.states.forget(digest)
        self.blocks._published.clear()
        self.blocks._hash_of.clear()
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


def _planned(
    model: CausalLM, strategy: Strategy, config: EngineConfig
) -> tuple[list[ModelUse], ResolvedConfig]:
    uses, resolved = planned_uses(bare_model(model.config, model.device), {}, strategy, config, ())
    return list(uses.values()), resolved


def first_difference(tape: Tape, reference: Result, found: Result) -> str | None:
    """Name the first operation whose digests differ at tokens that both runs have in common, and
    where; None if nothing differs."""
    tokens, others = reference.output.token_ids, found.output.token_ids
    equal = next((i for i, pair in enumerate(zip(tokens, others)) if pair[0] != pair[1]), None)  # noqa: B905
    common = _PROMPT + (len(tokens) - 1 if equal is None else equal)
    for (layer, name, _), place in sorted(tape.operations.items(), key=lambda o: (o[0][0], o[1])):
        a, b = reference.digests[place, :common], found.digests[place, :common]
        differs = ((a != b) & (a != 0) & (b != 0)).nonzero()
        if len(differs):
            where = "prompt" if int(differs[0]) < _PROMPT else "generated"
            return f"{name} of layer {layer}, {where}"
    before, now = (each.output.columns["logprobs"] for each in (reference, found))
    differing = ((before != now) | (np.array(tokens) != others)).nonzero()[0].tolist()
    if not differing:
        return None
    where = "first token" if differing[0] == 0 else "later token"
    return f"{'head' if tape.unsteady_heads else 'last layer or sampler'}, {where}"


class Count(NamedTuple):
    """How many of the schedules gave the row other bits, by kind of engine and by first cause."""

    schedules: int
    by_kind: Counter[str]
    by_cause: Counter[str]
    seen: Counter[str]


def run_schedules(
    name: str,
    stage: str,
    count: int,
    device: torch.device,
    *,
    tokens: int,
    rows: int,
    layers: int | None = None,
) -> Count:
    """Run a row under `count` schedules with the changes of a stage.

    Args:
        name: key of `MODELS`.
        stage: key of `STAGES`.
        count: the number of schedules over all kinds of engines.
        device: where the model runs.
        tokens: the room in the paged cache.
        rows: the most rows in flight.
        layers: the number of the model's layers; None means all.
    """
    cuda = device.type == "cuda"
    kinds = [Kind(*each) for each in product((False, True), (False, True)[: 1 + cuda])]
    draws = random.Random(0)
    by_kind, by_cause, seen = Counter[str](), Counter[str](), Counter[str]()
    layers = layers or model_config(name).num_layers
    model = dummy_model(name, device, num_hidden_layers=layers)
    tape, reference = Tape(tokens + 1024, device), None
    with changes(STAGES[stage]), tape.watching(model):
        for number, kind in enumerate(kinds):
            probe = Probe(model, tape, kind, tokens, rows)
            if reference is None:
                reference = probe.run(Schedule(), draws)
            for _ in range(number, count, len(kinds)):
                schedule = Schedule.drawn(draws, rows)
                tape.unsteady_heads = 0
                found = probe.run(schedule, draws)
                seen["prefix hits"] += found.output.num_cached_tokens > 0
                seen["preempted"] += found.output.num_preemptions
                seen["accepted drafts"] += found.output.counts.get("num_accepted_tokens", 0)
                seen["unsteady heads"] += tape.unsteady_heads
                cause = first_difference(tape, reference, found)
                by_cause[cause or ""] += 1
                by_kind[str(kind)] += cause is not None
            del probe
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    del by_cause[""]
    return Count(count, by_kind, by_cause, seen)
