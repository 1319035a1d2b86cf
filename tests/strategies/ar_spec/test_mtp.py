"""Drafts by a head of the target. Wrong ones cost only time, so tokens say nothing of a head that
reads the wrong hidden states or finds entries of other tokens in its cache. Here its hidden states
are compared, to the bit, with those that it has of the same tokens when it reads them at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from batchgen.engine.caches.model_caches import CacheSizes, paged_token_bytes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.dense import DenseConfig
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.controller import ForwardSeconds
from batchgen.strategies.ar_spec.mtp import MTPProposer
from batchgen.strategies.ar_spec.step_inputs import Drafts
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.engine.engine_rows import Request, expect_short_rows, run, weights
from tests.support.engine.qwen_mtp import TheirHead
from tests.support.engine.toy_mtp import with_head

VOCAB = 128
NONE = np.empty(0, np.int64)
UNITS = {False: 8, True: 64}
"""Prefixes are looked for at multiples of so many tokens, without row states and with them."""
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 20, "logprobs": True},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.5, "min_new_tokens": 4},
]
Ids = tuple[int, ...]
Models = Mapping[str, CausalLM]


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    qwen = TheirHead("qwen3_5_moe").save(tmp_path_factory.mktemp("qwen"))
    deepseek = TheirHead("deepseek_v3").save(tmp_path_factory.mktemp("deepseek"))
    return {
        "deepseek": load_model(deepseek, device=torch.device("cpu"), heads=("mtp",)),
        "llama": with_head(tiny_model("llama")),
        "qwen": load_model(qwen, device=torch.device("cpu"), heads=("mtp",)),
    }


class HeadAlone:
    """The target and its head, which read the tokens of one row at once."""

    def __init__(self, model: CausalLM) -> None:
        model.pack()
        sizes = CacheSizes(16, 16, 1)
        self._target, self.head = (
            ModelRunner(m, ModelUse(m, (1,)).caches(sizes)) for m in (model, model.heads["mtp"])
        )

    def hidden(self, ids: Sequence[int], prompt: int) -> Tensor:
        """[n, hidden_size], the target's states of the tokens, of which so many are a prompt."""
        inputs = self._inputs(ids, 0)
        if self._target.states is not None and len(ids) > prompt:
            again = np.array([len(ids) - prompt])
            inputs = replace(inputs, replayed=again, replayed_before=np.zeros_like(again))
        hidden = self._target.prefill(PrefillInputs(inputs, NONE, all_hidden=True)).hidden
        assert hidden is not None
        return hidden

    def states(self, ids: Sequence[int], prompt: int) -> Tensor:
        """[n - 1, hidden_size], for each token but the first the head's state behind it."""
        return self._read(self._inputs(ids[1:], 0), self.hidden(ids[:-1], prompt))

    def drafts(self, ids: Sequence[int], prompt: int, k: int) -> list[int]:
        """The k likeliest tokens behind all of these, each behind the ones before it."""
        hidden, drafts = self.states(ids, prompt)[-1:], list[int]()
        for j in range(k):
            drafts.append(int(self.head.compute_logits(hidden).argmax()))
            hidden = self._read(self._inputs(drafts[-1:], len(ids) - 1 + j), hidden)
        return drafts

    def _read(self, inputs: ModelInputs, hidden: Tensor) -> Tensor:
        inputs = replace(inputs, hidden=hidden, state_slots=None)
        found = self.head.prefill(PrefillInputs(inputs, NONE, all_hidden=True)).hidden
        assert found is not None
        return found

    def _inputs(self, ids: Sequence[int], start: int) -> ModelInputs:
        return ModelInputs(
            torch.tensor(ids),
            torch.arange(start, start + len(ids)),
            torch.arange(1, 16).unsqueeze(0),
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
        self._holds = itertools.count()
        self.seen: list[tuple[Ids, Tensor, list[int]]] = []
        self.held: set[int] = set()

    def step_width(self, num_rows: int) -> int:
        return self._random.choice([*self.models["target"].widths, 1 + self.num_spec_tokens])

    def propose(self, batch: DecodeBatch) -> None:
        state = self.step_inputs
        store, entries = state.store, state.rows.store_rows_on_host.tolist()
        ids = [tuple(store.tokens[i, : int(store.lengths[i])].tolist()) for i in entries]
        hidden = state.rows.hidden.clone()
        super().propose(batch)
        k, drafts = batch.width - 1, state.drafts
        lists: list[list[int]] = [[]] * len(ids)
        if drafts is not None:  # without those behind which a row has no room
            counted = zip(drafts.token_ids.tolist(), drafts.counts.tolist(), strict=True)
            lists = [row[:count] for row, count in counted]
        self.seen += zip(ids, hidden, lists, strict=True)
        if k and self._answers is not None:
            forced = [self._forced(self._answers[row[0]][len(row) :], k) for row in ids]
            counts = torch.full((len(ids),), k, dtype=torch.int32)
            state.set_drafts(Drafts(torch.tensor(forced), counts))

    def _forced(self, right: list[int], k: int) -> list[int]:
        """k drafts of which the first are right."""
        hold = next(self._holds) % (k + 1)
        self.held.add(hold)
        padded = [*right, *[0] * k][:k]
        return [token if j < hold else (token + 1) % VOCAB for j, token in enumerate(padded)]


def requests(model: CausalLM, seed: int, count: int = 10) -> list[Request]:
    """Prompts that part where a prefix may end, behind that, and not at all; long and short ones.
    They ask for all that the model can tell of them."""
    rng, unit = random.Random(seed), UNITS[model.has_row_states]
    columns = tuple(column.name for column in model.declared_columns(model.config))
    shared = [rng.randrange(8, VOCAB) for _ in range(2 * unit)]
    rows: list[Request] = []
    for i in range(count):
        own = [rng.randrange(8, VOCAB) for _ in range(rng.choice([1, 3, 9, 30]))]
        prompt = [[*shared[: rng.choice([unit, unit + 2])], *own], own, [*shared, 5]][i % 3]
        options = OPTIONS[i % 4]
        length = rng.choice([1, 4, 12, 24]) if i % 4 < 3 else 16
        params = RequestParams(max_new_tokens=length, seed=i, columns=columns, **options)
        rows.append((prompt, params))
    return rows


def make_engine(model: CausalLM, strategy: ARSpecStrategy | ARStrategy, **config: Any) -> LLMEngine:
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_batched_tokens": 2048,
        "max_model_len": 200,
        "block_size": 4,
        "kv_cache_gib": 0.01,
    }
    columns = [column.name for column in model.declared_columns(model.config)]
    return LLMEngine(
        model, None, (), strategy, EngineConfig(**options | config), context_columns=columns
    )


def room(model: CausalLM, tokens: int) -> float:
    """GiB of a cache for so many tokens and the scratch block."""
    columns = model.declared_columns(model.config)
    per_token = paged_token_bytes(model.cache_specs, columns, model.dtype)
    per_token += paged_token_bytes(model.heads["mtp"].cache_specs, (), model.dtype)
    return (tokens + 6) * per_token / 2**30


def check_states(model: CausalLM, strategy: Watched, rows: Sequence[RequestOutput]) -> int:
    """Compare what the drafts of these rows came from; return how many states were compared."""
    alone, known = HeadAlone(model), {}
    for row, ids in zip(rows, whole(rows), strict=True):
        for length, state in enumerate(alone.states(ids, len(row.prompt_token_ids)), start=2):
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
        assert {*one.columns, "draft_accepted", "step_map"} == {*other.columns}
        for name, values in one.columns.items():
            np.testing.assert_array_equal(values, other.columns[name])


def test_the_toy_head_computes_what_it_says(models: Models) -> None:
    """Against transformers' layers, which read the whole row at once."""
    llama = models["llama"]
    family = llama.config.family_as(DenseConfig)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=family.num_heads,
        num_key_value_heads=family.num_kv_heads,
        head_dim=family.head_dim,
        rms_norm_eps=family.rms_norm_eps,
    )
    config._attn_implementation = "eager"
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
    hidden = alone.hidden(ids[:-1].tolist(), len(ids))

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
    torch.testing.assert_close(alone.states(ids.tolist(), len(ids)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "k", "config"),
    [
        ("llama", 1, {"max_batched_tokens": 7, "chunk_tokens": 5, "overlap": False}),
        ("llama", 5, {"max_batched_tokens": 16, "chunk_tokens": 8, "prefix_caching": False}),
        pytest.param("llama", 2, {"max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"chunk_tokens": 3}, marks=pytest.mark.slow),
        ("qwen", 3, {"max_batched_tokens": 64, "chunk_tokens": 64}),
        pytest.param("qwen", 1, {"max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param("qwen", 2, {"overlap": False}, marks=pytest.mark.slow),
        pytest.param("qwen", 4, {"chunk_tokens": 0}, marks=pytest.mark.slow),
        pytest.param("qwen", 5, {"max_batched_tokens": 128}, marks=pytest.mark.slow),
        pytest.param("deepseek", 3, {"chunk_tokens": 5}, marks=pytest.mark.slow),
        pytest.param("deepseek", 2, {"max_batched_tokens": 9}, marks=pytest.mark.slow),
    ],
)
def test_the_head_has_read_every_token(
    models: Models, kind: str, k: int, config: dict[str, Any]
) -> None:
    """In prompts and after steps with any number of drafts, of which any number holds."""
    model = models[kind]
    # The first token of each prompt tells the rows apart.
    rows = [([i, *prompt[1:]], params) for i, (prompt, params) in enumerate(requests(model, k))]
    expected = run(make_engine(model, ARStrategy()), rows)
    strategy = Watched(k, dict(enumerate(whole(expected))), num_spec_tokens=k)
    assert_rows(run(make_engine(model, strategy, **config), rows), expected)
    assert check_states(model, strategy, expected) > 40
    assert strategy.held == set(range(k + 1))


@pytest.mark.quick(0, thorough=1)
@pytest.mark.parametrize("kind", ["llama", "qwen", "deepseek"])
def test_the_head_finds_what_others_have_read(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rows share prefixes, are preempted, and find their own blocks again."""
    model = models[kind]
    rows, unit = requests(model, 7), UNITS[model.has_row_states]
    expected = run(make_engine(model, ARStrategy()), rows)
    expect_short_rows(monkeypatch)
    strategy = Watched(1, num_spec_tokens=3)
    config = {"max_batched_tokens": 2 * unit, "chunk_tokens": unit}
    cache = {"max_model_len": 60 + 2 * unit, "kv_cache_gib": room(model, 60 + 3 * unit)}
    engine = make_engine(model, strategy, **config, **cache)
    assert_rows(run(engine, rows), expected)
    assert check_states(model, strategy, expected) > 40
    assert engine.stats.preemptions and engine.stats.cached_tokens


@pytest.mark.thorough
def test_later_drafts_come_from_the_head_s_own_states(models: Models) -> None:
    model = models["llama"]
    greedy = RequestParams(temperature=0, max_new_tokens=9)
    rows = [(prompt, greedy) for prompt, _ in requests(model, 3, count=5)]
    strategy = Watched(2, num_spec_tokens=5)
    outputs = run(make_engine(model, strategy), rows)
    alone, compared = HeadAlone(model), 0
    known = {tuple(ids[:n]) for ids in whole(outputs) for n in range(len(ids))}
    for seen, _, drafts in strategy.seen:
        if seen in known:
            assert alone.drafts(seen, len(seen), len(drafts)) == drafts
            compared += len(drafts)
    assert compared > 30


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_head_that_is_always_right_is_accepted_whole(
    tiny_model: Callable[..., Path], k: int
) -> None:
    """The target's next token depends on the newest alone, and the head goes by that as well."""
    model = with_head(tiny_model("llama"))
    for name, values in weights(model).items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()
        elif name.endswith("embedding.weight"):
            values.fill_(1)
        elif name == "mtp.fc.weight":
            values[:, len(values) :].zero_()
    rows = requests(model, 5)
    outputs = run(make_engine(model, ARSpecStrategy("mtp", k, adaptive=False)), rows)
    assert_rows(outputs, run(make_engine(model, ARStrategy()), rows))
    for output in outputs:
        if output.finish_reason == "length":
            assert output.counts["num_accepted_tokens"] == output.counts["num_draft_tokens"]
            assert output.counts["num_forwards"] == 1 - (1 - len(output.token_ids)) // (1 + k)


@pytest.mark.thorough
def test_rejection_gives_a_row_the_same_tokens_whatever_runs_beside_it(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens depend on the drafts, so those must depend on the row alone."""
    model = models["llama"]
    rows = requests(model, 9, count=5)

    def outputs(**config: Any) -> list[RequestOutput]:
        strategy = ARSpecStrategy("mtp", 3, "rejection", adaptive=False)
        return run(make_engine(model, strategy, **config), rows)

    alone = outputs(max_num_seqs=1, prefix_caching=False, overlap=False)
    expect_short_rows(monkeypatch)
    assert_rows(outputs(kv_cache_gib=room(model, 84), max_model_len=76, chunk_tokens=8), alone)
    plain = run(make_engine(model, ARStrategy()), rows)
    same = [one.token_ids == other.token_ids for one, other in zip(plain, alone, strict=True)]
    greedy = [params.temperature == 0 for _, params in rows]
    assert all(s for s, is_greedy in zip(same, greedy, strict=True) if is_greedy)
    assert not all(same)


def test_the_cost_of_a_step_has_the_head_in_it(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the tokens of every step; each draft takes logits, and each but the first a
    forward."""
    forward, logits = (
        ForwardSeconds([1, 1000], [1.001, 2.0]),
        ForwardSeconds([1, 1000], [4.001, 5.0]),
    )

    def measure(
        runner: Any, rows: int, widths: Any, run: Any = ModelRunner.decode
    ) -> ForwardSeconds:
        return logits if run is ModelRunner.decode else forward

    monkeypatch.setattr(ForwardSeconds, "measure", measure)
    head = HeadAlone(models["llama"]).head
    seconds = MTPProposer(head, for_rejection=False).costs(8, (0, 1, 2, 3))
    assert seconds(100, 0) == pytest.approx(1.1)
    assert seconds(100, 1) == pytest.approx(1.2 + 3.0)
    assert seconds(100, 3) == pytest.approx(1.4 + 3.0 + 2 * 4.1)


def test_the_plan_has_room_for_the_head(models: Models) -> None:
    model = models["llama"]
    engine = make_engine(model, ARSpecStrategy("mtp", 1, adaptive=False))
    per_token = 2 * (2 * 16) * 4 * (3 + 1)  # keys and values of the target's layers and the head's
    assert engine.memory.kv_cache == engine.memory.num_blocks * 4 * per_token
    target, head = model.num_parameters, model.heads["mtp"].num_parameters
    assert engine.memory.weights == 4 * (target + head)


def test_a_head_that_was_not_loaded_is_missed(tiny_model: Callable[..., Path]) -> None:
    model = with_head(tiny_model("llama"), heads=())
    with pytest.raises(ValueError, match="needs the model's head 'mtp', which was not loaded"):
        make_engine(model, ARSpecStrategy("mtp", 1, adaptive=False))
    with pytest.raises(ValueError, match="has no head 'other': it has mtp"):
        with_head(tiny_model("llama"), heads=["other"])
