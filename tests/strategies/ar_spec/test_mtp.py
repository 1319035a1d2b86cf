"""Drafts by a head of the target. Wrong ones cost only time, so tokens say nothing of a head that
reads the wrong hidden states or finds entries of other tokens in its cache. Here its hidden states
are compared, to the bit, with those that it has of the same tokens when it reads them at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import Request, expect_short_rows, run, weights
from torch import Tensor
from toy_hybrid import ToyHybridForCausalLM, fill, toy_config
from toy_mtp import with_head
from transformers import LlamaConfig, LlamaModel

from batchgen.engine.cache.memory_plan import ModelUse
from batchgen.engine.cache.model_caches import CacheSizes, paged_token_bytes
from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.mtp import MTPHead
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.outputs import RequestOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.scheduled_batch import DecodeBatch
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.step_inputs import Drafts
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

VOCAB = 128
NONE = np.empty(0, np.int64)
Ids = tuple[int, ...]


class HybridWithHead(ToyHybridForCausalLM):
    """Attention and recurrences, and a head whose layer is one of attention."""

    def make_head(self, name: str) -> TokenModel:
        return MTPHead(self, self.make_layer(0)) if name == "mtp" else super().make_head(name)


def hybrid(heads: Sequence[str] = ("mtp",)) -> HybridWithHead:
    config = replace(toy_config(layer_types="ara"), heads=("mtp",))
    model = HybridWithHead(config, device=torch.device("cpu"), dtype=torch.float32, heads=heads)
    fill(model)
    return model


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> CausalLM:
    return with_head(tiny_model("llama"))


class HeadAlone:
    """The target and its head, which read the tokens of one row at once."""

    def __init__(self, model: CausalLM) -> None:
        model.pack()
        sizes = CacheSizes(12, 16, 1)
        self._target, self.head = (
            ModelRunner(m, ModelUse(m, (1,)).caches(sizes)) for m in (model, model.heads["mtp"])
        )

    def states(self, ids: Sequence[int]) -> Tensor:
        """[n - 1, hidden_size], for each token but the first the state behind it."""
        inputs = self._inputs(ids[:-1], 0)
        hidden = self._target.prefill(PrefillInputs(inputs, NONE), all_hidden=True).hidden
        return self._read(self._inputs(ids[1:], 0), hidden)

    def drafts(self, ids: Sequence[int], k: int) -> list[int]:
        """The k likeliest tokens behind all of these, each behind the ones before it."""
        hidden, drafts = self.states(ids)[-1:], []
        for j in range(k):
            drafts.append(int(self.head.compute_logits(hidden).argmax()))
            hidden = self._read(self._inputs(drafts[-1:], len(ids) - 1 + j), hidden)
        return drafts

    def _read(self, inputs: ModelInputs, hidden: Tensor | None) -> Tensor:
        inputs = replace(inputs, hidden=hidden, state_slots=None)
        found = self.head.prefill(PrefillInputs(inputs, NONE), all_hidden=True).hidden
        assert found is not None
        return found

    def _inputs(self, ids: Sequence[int], start: int) -> ModelInputs:
        return ModelInputs(
            torch.tensor(ids),
            torch.arange(start, start + len(ids)),
            torch.arange(1, 12).unsqueeze(0),
            np.array([len(ids)]),
            np.array([start + len(ids)]),
            torch.ones(1, dtype=torch.int64) if self._target.states is not None else None,
        )


class Watched(ARSpecStrategy):
    """Keeps what it drafts, and from what. Each step may have any number of drafts, none too.

    Args:
        answers: what the rows will say, by the first token of their prompt: as many drafts as it
            pleases are changed to it, and then comes a wrong one. None leaves the head's drafts.
    """

    def __init__(self, seed: int, answers: dict[int, list[int]] | None = None, **more: Any) -> None:
        super().__init__("mtp", adaptive=False, **more)
        self._random, self._answers = random.Random(seed), answers
        self.seen: list[tuple[Ids, Tensor, list[int]]] = []
        self.held: set[int] = set()

    def step_width(self, num_rows: int) -> int:
        return self._random.choice([*self.models["target"].widths, 1 + self.num_spec_tokens])

    def propose(self, batch: DecodeBatch) -> None:
        state = self.step_inputs
        store, entries = state.store, state.rows.entries.tolist()
        ids = [tuple(store.tokens[i, : int(store.lengths[i])].tolist()) for i in entries]
        hidden = state.rows.hidden.clone()
        super().propose(batch)
        k, drafts = batch.width - 1, state.drafts
        lists = drafts.token_ids.tolist() if drafts is not None else [[]] * len(ids)
        self.seen += zip(ids, hidden, lists, strict=True)
        if k and self._answers is not None:
            forced = [self._forced(self._answers[row[0]][len(row) :], k) for row in ids]
            counts = torch.full((len(ids),), k, dtype=torch.int32)
            state.set_drafts(Drafts(torch.tensor(forced), counts))

    def _forced(self, right: list[int], k: int) -> list[int]:
        """k drafts of which the first are right."""
        hold = self._random.randint(0, k)
        self.held.add(hold)
        padded = [*right, *[0] * k][:k]
        return [token if j < hold else (token + 1) % VOCAB for j, token in enumerate(padded)]


def requests(seed: int, count: int = 14) -> list[Request]:
    """Prompts that part at the end of a block, inside one, and not at all; short and long ones."""
    rng = random.Random(seed)
    shared = [rng.randrange(8, VOCAB) for _ in range(24)]
    rows: list[Request] = []
    for i in range(count):
        own = [rng.randrange(8, VOCAB) for _ in range(rng.choice([1, 3, 9, 30]))]
        prompt = [[*shared[: rng.choice([8, 16, 18])], *own], own, [*shared, 5]][i % 3]
        options: dict[str, Any] = [
            {"temperature": 0},
            {"temperature": 0.8, "top_k": 20, "logprobs": True},
            {"temperature": 0, "repetition_penalty": 1.3},
            {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.5, "min_new_tokens": 4},
        ][i % 4]
        length = rng.choice([1, 4, 20, 40]) if i % 4 < 3 else 25
        rows.append((prompt, SamplingParams(max_new_tokens=length, seed=i, **options)))
    return rows


def make_engine(model: CausalLM, strategy: ARSpecStrategy | ARStrategy, **config: Any) -> LLMEngine:
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_batched_tokens": 2048,
        "max_model_len": 90,
        "block_size": 4,
        "kv_cache_gib": 0.01,
    }
    return LLMEngine(model, None, (), strategy, EngineConfig(**options | config))


def room(model: CausalLM, tokens: int) -> float:
    """GiB of a cache for so many tokens and the scratch block."""
    both = (model, model.heads["mtp"])
    per_token = sum(paged_token_bytes(m.cache_specs, (), m.dtype) for m in both)
    return (tokens + 6) * per_token / 2**30


def check_states(model: CausalLM, strategy: Watched, rows: Sequence[Sequence[int]]) -> int:
    """Compare what the drafts of these rows came from; return how many states were compared."""
    alone, known = HeadAlone(model), {}
    for ids in rows:
        for length, state in enumerate(alone.states(ids), start=2):
            known[tuple(ids[:length])] = state
    compared = 0
    for seen, state, _ in strategy.seen:
        if seen in known:
            assert torch.equal(state, known[seen]), f"behind {len(seen)} tokens"
            compared += 1
    return compared


def whole(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + output.token_ids for output in outputs]


def assert_rows(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert other.token_ids == one.token_ids
        for name, values in one.columns.items():
            np.testing.assert_array_equal(values, other.columns[name])


def test_the_head_computes_what_it_says(llama: CausalLM) -> None:
    """Against transformers' layers, which read the whole row at once."""
    family = llama.config.family
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=family.num_heads,
        num_key_value_heads=family.num_kv_heads,
        head_dim=family.head_dim,
        rms_norm_eps=family.rms_norm_eps,
        attn_implementation="eager",
    )
    given, theirs = weights(llama), LlamaModel(config)
    theirs.load_state_dict(
        {
            name.removeprefix("mtp."): values
            for name, values in given.items()
            if name.startswith(("mtp.layers", "mtp.norm"))
        }
        | {"embed_tokens.weight": given["model.embed_tokens.weight"]}
    )
    ids = torch.tensor([(7 * i * i + 3) % VOCAB for i in range(50)])
    alone = HeadAlone(llama)
    inputs = alone._inputs(ids[:-1].tolist(), 0)
    hidden = alone._target.prefill(PrefillInputs(inputs, NONE), all_hidden=True).hidden
    assert hidden is not None

    def normed(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * given[name]

    merged = torch.cat(
        (
            normed(given["model.embed_tokens.weight"][ids[1:]], "mtp.pre_fc_norm_embedding.weight"),
            normed(hidden, "mtp.pre_fc_norm_hidden.weight"),
        ),
        -1,
    )
    with torch.inference_mode():
        projected = merged @ given["mtp.fc.weight"].T
        wanted = theirs(inputs_embeds=projected.unsqueeze(0)).last_hidden_state[0]
    torch.testing.assert_close(alone.states(ids.tolist()), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "k", "config"),
    [
        ("llama", 3, {}),
        ("llama", 1, {"max_batched_tokens": 7, "chunk_tokens": 5, "overlap": False}),
        ("llama", 5, {"max_batched_tokens": 16, "chunk_tokens": 8, "prefix_caching": False}),
        ("hybrid", 2, {"max_batched_tokens": 13, "chunk_tokens": 6}),
        ("hybrid", 4, {"max_num_seqs": 3}),
    ],
)
def test_the_head_has_read_every_token(
    llama: CausalLM, kind: str, k: int, config: dict[str, Any]
) -> None:
    """In prompts and after steps with any number of drafts, of which any number holds."""
    model = llama if kind == "llama" else hybrid()
    # The first token of each prompt tells the rows apart.
    rows = [([i, *prompt[1:]], params) for i, (prompt, params) in enumerate(requests(k))]
    expected = run(make_engine(model, ARStrategy()), rows)
    strategy = Watched(k, dict(enumerate(whole(expected))), num_spec_tokens=k)
    assert_rows(run(make_engine(model, strategy, **config), rows), expected)
    assert check_states(model, strategy, whole(expected)) > 60
    assert strategy.held == set(range(k + 1))


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_the_head_finds_what_others_have_read(
    llama: CausalLM, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rows share prefixes, are preempted, and find their own blocks again."""
    model = llama if kind == "llama" else hybrid()
    rows = requests(7)
    expected = run(make_engine(model, ARStrategy()), rows)
    expect_short_rows(monkeypatch)
    strategy = Watched(1, num_spec_tokens=3)
    engine = make_engine(
        model, strategy, kv_cache_gib=room(model, 140), max_batched_tokens=17, chunk_tokens=8
    )
    assert_rows(run(engine, rows), expected)
    assert check_states(model, strategy, whole(expected)) > 60
    assert engine.stats.preemptions and engine.stats.cached_tokens
