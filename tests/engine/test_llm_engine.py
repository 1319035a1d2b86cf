"""The engine's promise: a row's tokens depend on the row alone, and equal transformers'."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from batchgen.engine.caches.forward_context import ImageFeatures
from batchgen.engine.execution.cuda_graph import ForwardGraphs
from batchgen.engine.execution.graph_shapes import CHUNK_ROWS
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.cases import some_slow
from tests.support.engine.engine_rows import block_bytes, expect_short_rows

EOS = 7
VOCAB = 128
ROOMY = EngineConfig(max_num_seqs=64, max_batched_tokens=512, chunk_tokens=64, kv_cache_gib=0.01)
SIMPLE = replace(ROOMY, chunk_tokens=0, overlap=False, cuda_graph=False, prefix_caching=False)
Request = tuple[list[int], RequestParams]

PLAIN = {"overlap": False}
OVERLAP = {"overlap": True}
GPU_MODES: list[dict[str, Any]] = [
    {"cuda_graph": graph, "overlap": overlap}
    for graph in (False, True)
    for overlap in (False, True)
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on_every_device(changes: Sequence[dict[str, Any]], on_gpu: int) -> pytest.MarkDecorator:
    """Parameters (device, changes of the configuration), each with every mode of the loop; a GPU
    gets the first `on_gpu` changes only. On a CPU each of several changes is quick with one mode.
    """
    several, slow = len(changes) > 1, [pytest.mark.slow]
    cpu = [
        pytest.param("cpu", change | mode, marks=slow if several and i % 2 == j else [])
        for j, mode in enumerate((PLAIN, OVERLAP))
        for i, change in enumerate(changes)
    ]
    gpu = [
        pytest.param("cuda", change | mode, marks=pytest.mark.gpu)
        for mode in GPU_MODES
        for change in changes[:on_gpu]
    ]
    return pytest.mark.parametrize(("device", "changes"), [*cpu, *gpu], ids=str)


both_loops = pytest.mark.parametrize("mode", [PLAIN, OVERLAP], ids=["plain", "overlap"])


def load(folder: Path, device: str = "cpu") -> CausalLM:
    return load_model(folder, device=torch.device(device), dtype=torch.float32)


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> CausalLM:
    return load(tiny_model("llama"))


def make_engine(
    model: CausalLM,
    config: EngineConfig = ROOMY,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> LLMEngine:
    return LLMEngine(model, tokenizer, (EOS,), ARStrategy(), config)


def small_cache(model: CausalLM, tokens: int, **changes: Any) -> EngineConfig:
    """A configuration whose cache holds so many tokens: rows fight for it."""
    gib = (tokens + 4) * block_bytes(1, model) / 2**30
    base = EngineConfig(
        max_num_seqs=64, max_batched_tokens=24, chunk_tokens=16, block_size=4, kv_cache_gib=gib
    )
    return replace(base, **changes)


def run(engine: LLMEngine, requests: Sequence[Request]) -> list[RequestOutput]:
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        running = engine.scheduler.running.rows
        engine.scheduler.block_manager.check_integrity(running)
    assert engine.scheduler.block_manager.usage == 0
    assert len(engine.scheduler.running) == 0
    return [outputs[str(i)] for i in range(len(requests))]


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission takes every row to end with its next token, so that rows are preempted."""
    expect_short_rows(monkeypatch)


@dataclass
class MixedStep:
    """Its tokens, those of its prefill, and whether a CUDA graph ran it."""

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    replayed: bool = False


@pytest.fixture
def mixed_steps(monkeypatch: pytest.MonkeyPatch) -> list[MixedStep]:
    """All from now on."""
    steps: list[MixedStep] = []
    run_mixed, replay = ModelRunner.mixed, ForwardGraphs.mixed

    def record(
        self: ModelRunner, decode: ModelInputs, prefill: PrefillInputs
    ) -> tuple[ModelOutput, ModelOutput]:
        inputs = prefill.inputs
        steps.append(MixedStep(decode.num_rows, inputs.num_rows, len(inputs.input_ids)))
        return run_mixed(self, decode, prefill)

    def record_replay(
        self: ForwardGraphs,
        decode: ModelInputs,
        prefill: ModelInputs,
        images: ImageFeatures | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps[-1].replayed = True
        return replay(self, decode, prefill, images)

    monkeypatch.setattr(ModelRunner, "mixed", record)
    monkeypatch.setattr(ForwardGraphs, "mixed", record_replay)
    return steps


def assert_same(one: RequestOutput, other: RequestOutput, atol: float = 0.0) -> None:
    """Equal in every bit, or the floats within `atol`."""
    assert one.token_ids == other.token_ids
    assert (one.finish_reason, one.stop) == (other.finish_reason, other.stop)
    assert one.columns.keys() == other.columns.keys()
    for name in one.columns:
        np.testing.assert_allclose(
            one.columns[name], other.columns[name], rtol=0, atol=atol, err_msg=name
        )


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.7, "top_k": 5, "seed": 1},
    {"temperature": 1.3, "top_p": 0.8, "seed": 2, "logprobs": True, "logprobs_mode": "processed"},
    {"min_p": 0.1, "seed": 3, "top_logprobs": 7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4, "frequency_penalty": 0.7},
    {"min_new_tokens": 12, "seed": 5, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    {"ignore_eos": True, "seed": 2**64 - 1, "repetition_penalty": 0.8},
    {"seed": 6, "logprobs": True, "stop_token_ids": (1, 2, 3)},
]


def mixed_requests(count: int, seed: int = 0) -> list[Request]:
    """Rows with every option, some with a common prefix, of many lengths."""
    rng = random.Random(seed)
    shared = [rng.randrange(8, VOCAB) for _ in range(13)]
    requests = []
    for i, options in zip(range(count), itertools.cycle(OPTIONS)):
        own = [rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 40))]
        prompt = shared + own if i % 3 == 0 else own
        new_tokens = max(rng.randint(1, 30), int(str(options.get("min_new_tokens", 0))))
        requests.append((prompt, RequestParams(max_new_tokens=new_tokens, **options)))
    return requests


@pytest.fixture(scope="module")
def alone(tiny: CausalLM) -> Callable[[int, int], RequestOutput]:
    """`alone(seed, i)` → row i of `mixed_requests(_, seed)`, run by itself."""

    @functools.cache
    def run_alone(seed: int, i: int) -> RequestOutput:
        return run(make_engine(tiny, SIMPLE), [mixed_requests(i + 1, seed)[i]])[0]

    return run_alone


NUM_ROWS = 30


@pytest.fixture(scope="module")
def one_by_one(
    tiny_model: Callable[..., Path],
) -> Callable[[str], tuple[CausalLM, list[RequestOutput]]]:
    """`one_by_one(device)` → the tiny model there, and what `mixed_requests(NUM_ROWS)` gives in the
    simplest loop.
    """

    @functools.cache
    def run_simple(device: str) -> tuple[CausalLM, list[RequestOutput]]:
        model = load(tiny_model("llama"), device)
        return model, run(make_engine(model, SIMPLE), mixed_requests(NUM_ROWS))

    return run_simple


def tolerance(device: str) -> float:
    """A GPU's matrix products round differently at different sizes."""
    return 0.0 if device == "cpu" else 1e-4


@pytest.mark.quick(1)
@both_loops
def test_every_option_mixed_in_one_batch_equals_each_alone(
    tiny: CausalLM, alone: Callable[[int, int], RequestOutput], mode: dict[str, Any]
) -> None:
    together = run(make_engine(tiny, replace(ROOMY, **mode)), mixed_requests(12))
    for i, output in enumerate(together):
        assert_same(alone(0, i), output)


@pytest.mark.quick(1, thorough=3)
@on_every_device(
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_seqs": 17, "block_size": 16, "max_batched_tokens": 100},
        {"prefix_caching": False},
        {"max_batched_tokens": 7, "block_size": 2},
        {"chunk_tokens": 0},
        {"chunk_tokens": 3},
    ],
    on_gpu=3,
)
@pytest.mark.usefixtures("hopeful")
def test_chunking_preemption_and_caching_change_nothing(
    one_by_one: Callable[[str], tuple[CausalLM, list[RequestOutput]]],
    mixed_steps: list[MixedStep],
    device: str,
    changes: dict[str, Any],
) -> None:
    model, expected = one_by_one(device)
    assert not mixed_steps
    engine = make_engine(model, small_cache(model, 120, **changes))
    outputs = run(engine, mixed_requests(20))
    for one, other in zip(outputs, expected[:20], strict=True):
        assert_same(one, other, tolerance(device))
    if changes.get("max_num_seqs") != 3:
        assert engine.stats.preemptions > 0
    assert bool(mixed_steps) == (changes.get("chunk_tokens") != 0)


@pytest.mark.quick(2, thorough=3)
@on_every_device([{}, {"max_num_seqs": 40, "block_size": 16}], on_gpu=2)
@pytest.mark.parametrize(
    ("chunk_tokens", "used"),
    [
        (48, {}),
        (7, {}),
        (7, {"alone_tokens": 0}),
        (7, {"chunk_tokens": 60, "chunk_rows": 3}),
        (250, {"chunk_tokens": 250, "chunk_rows": CHUNK_ROWS + 5}),
    ],
    ids=str,
)
def test_prompts_that_are_read_beside_decoding_rows_change_nothing(
    one_by_one: Callable[[str], tuple[CausalLM, list[RequestOutput]]],
    mixed_steps: list[MixedStep],
    device: str,
    changes: dict[str, Any],
    chunk_tokens: int,
    used: dict[str, int],
) -> None:
    """Rows come one after another; chunks are as configured, or as no graph was captured for, or
    decoding rows take part in larger prefills."""
    model, expected = one_by_one(device)
    requests = mixed_requests(NUM_ROWS)
    engine = make_engine(model, small_cache(model, 1500, chunk_tokens=chunk_tokens, **changes))
    limits = engine.scheduler.limits
    engine.scheduler.limits = replace(limits, **{"alone_tokens": 10**6} | used)
    outputs: dict[str, RequestOutput] = {}
    coming = deque(enumerate(requests))
    rng = random.Random(chunk_tokens)
    while coming or engine.has_unfinished():
        for _ in range(rng.choice([0, 1, 2, 12]) if mixed_steps or len(coming) < 40 else 4):
            if coming:
                i, request = coming.popleft()
                engine.add_request(str(i), *request)
        outputs |= {output.request_id: output for output in engine.step()}
    for i, other in enumerate(expected):
        assert_same(outputs[str(i)], other, tolerance(device))
    limit = engine.scheduler.limits.chunk_tokens
    assert len(mixed_steps) > 3
    most_tokens = max(step.prefill_tokens for step in mixed_steps)
    most_rows = max(step.prefill_rows for step in mixed_steps)
    if "alone_tokens" in used:
        assert most_tokens > 3 * limit
    else:
        assert limit // 2 < most_tokens <= limit
        assert most_rows <= engine.scheduler.limits.chunk_rows
        assert most_rows > CHUNK_ROWS or engine.scheduler.limits.chunk_rows <= CHUNK_ROWS
    for step in mixed_steps:
        fits = step.prefill_tokens <= chunk_tokens and step.prefill_rows <= CHUNK_ROWS
        assert step.replayed == (bool(changes.get("cuda_graph")) and fits)


@pytest.mark.thorough
@settings(max_examples=settings().max_examples // 10, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_rows(
    tiny: CausalLM, alone: Callable[[int, int], RequestOutput], data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 1), label="rows")
    requests = mixed_requests(8, seed)
    order = data.draw(st.permutations(range(8)), label="order")
    config = small_cache(
        tiny,
        data.draw(st.integers(84, 200), label="cache"),
        max_num_seqs=data.draw(st.integers(1, 9), label="max_num_seqs"),
        max_batched_tokens=data.draw(st.integers(1, 80), label="max_batched_tokens"),
        chunk_tokens=data.draw(st.integers(0, 40), label="chunk_tokens"),
        block_size=data.draw(st.sampled_from([1, 2, 4, 8]), label="block_size"),
        prefix_caching=data.draw(st.booleans(), label="prefix_caching"),
        overlap=data.draw(st.booleans(), label="overlap"),
    )
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="hopeful admission"):
            expect_short_rows(patch)
        outputs = run(make_engine(tiny, config), [requests[i] for i in order])
    for i, output in zip(order, outputs, strict=True):
        assert_same(alone(seed, i), output)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}


@pytest.mark.quick(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True, "rope_parameters": LINEAR}),
        ("qwen3", {"num_key_value_heads": 1, "rope_parameters": YARN}),
        pytest.param(
            "qwen3",
            {"tie_word_embeddings": True, "rope_parameters": LINEAR},
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3", {"rope_parameters": LLAMA3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopeful")
def test_greedy_equals_transformers_under_chunking_and_preemption(
    tiny_model: Callable[..., Path], kind: str, config: dict[str, Any], device: str
) -> None:
    folder = tiny_model(kind, **config)
    model = load(folder, device)
    params = RequestParams(temperature=0, max_new_tokens=20, logprobs=True, ignore_eos=True)
    greedy = [(prompt, params) for prompt, _ in mixed_requests(12)]
    engine = make_engine(model, small_cache(model, 110, overlap=True))
    outputs = run(engine, [*greedy, *mixed_requests(12)])
    assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (prompt, _), output in zip(greedy, outputs, strict=False):
        ids = torch.tensor([prompt + output.token_ids])
        with torch.inference_mode():
            logprobs = oracle(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == output.token_ids
        chosen = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(output.columns["logprobs"], chosen.numpy(), atol=1e-4)


def test_samples_of_one_prompt_compute_it_once(tiny: CausalLM) -> None:
    prompt = list(range(10, 75))
    params = [RequestParams(seed=i, max_new_tokens=4, ignore_eos=True) for i in range(6)]
    engine = make_engine(tiny)
    outputs = run(engine, [(prompt, p) for p in params])
    assert engine.stats.prefill_tokens == 65 + 5 * 1  # 64 tokens are four whole blocks
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    for p, output in zip(params, outputs, strict=True):
        assert_same(run(make_engine(tiny), [(prompt, p)])[0], output)


@both_loops
def test_stops(tiny: CausalLM, mode: dict[str, Any]) -> None:
    greedy = RequestParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    prompt = [20, 30, 40]
    free = run(make_engine(tiny), [(prompt, greedy)])[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    target = free.token_ids[5]
    first = free.token_ids.index(target)
    requests = [
        (prompt, replace(greedy, stop_token_ids=(target,))),
        (prompt, replace(greedy, max_new_tokens=first + 1, stop_token_ids=(target,))),
        (prompt, replace(greedy, max_new_tokens=1)),
    ]
    stopped, at_limit, one = run(make_engine(tiny, replace(ROOMY, **mode)), requests)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop) == ("stop", str(target))
    assert at_limit.finish_reason == "stop"
    assert one.token_ids == free.token_ids[:1] and one.finish_reason == "length"


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """Token i spells the letters of i in base 3, so that most strings span tokens."""
    spelt = {
        "abc"[i % 3] + "xyz"[i // 3 % 3] + "uvw"[i // 9 % 3] + str(i // 27): i for i in range(VOCAB)
    }
    raw = Tokenizer(models.WordLevel(spelt, unk_token=next(iter(spelt))))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.thorough
@both_loops
@pytest.mark.usefixtures("hopeful")
def test_stop_strings_end_rows_at_the_same_token_in_any_loop(
    tiny: CausalLM, mode: dict[str, Any]
) -> None:
    tokenizer = spelling_tokenizer()
    rng = random.Random(0)
    requests: list[Request] = []
    for i, (prompt, _) in enumerate(mixed_requests(12)):
        params = RequestParams(seed=i, max_new_tokens=20, ignore_eos=True, logprobs=True)
        requests.append((prompt, params))
    free = run(make_engine(tiny, SIMPLE, tokenizer), requests)
    stopping = []
    for (prompt, params), output in zip(requests, free, strict=True):
        start = rng.randrange(40, 74)
        strings = (output.text[start : start + 6], "never")
        stopping.append((prompt, replace(params, stop=strings)))
    engine = make_engine(tiny, small_cache(tiny, 80, **mode), tokenizer)
    outputs = run(engine, stopping)
    for (_, params), output, longer in zip(stopping, outputs, free, strict=True):
        string = params.stop[0]
        count = next(n for n in range(21) if string in tokenizer.decode(longer.token_ids[:n]))
        assert output.token_ids == longer.token_ids[:count]
        assert (output.finish_reason, output.stop) == ("stop", string)
        assert output.text == longer.text[: longer.text.index(string)]
        np.testing.assert_array_equal(
            output.columns["logprobs"], longer.columns["logprobs"][:count], strict=True
        )
    assert engine.stats.preemptions > 0
    assert engine.generated_tokens == sum(len(output.token_ids) for output in outputs)


@pytest.mark.thorough
@both_loops
@pytest.mark.usefixtures("hopeful")
def test_tokens_are_counted_once_and_dropped_ones_never(
    tiny: CausalLM, mode: dict[str, Any]
) -> None:
    engine = make_engine(tiny, small_cache(tiny, 120, **mode))
    outputs = run(engine, mixed_requests(20))
    assert engine.stats.preemptions > 0
    total = sum(len(output.token_ids) for output in outputs)
    assert engine.generated_tokens == total
    assert engine.stats.generated_tokens == total


def test_min_new_tokens_forbids_every_stop_until_then(tiny: CausalLM) -> None:
    stops = tuple(range(0, VOCAB, 2))
    requests = [
        ([9, 10, 11], RequestParams(seed=i, stop_token_ids=stops, min_new_tokens=9))
        for i in range(8)
    ]
    for output in run(make_engine(tiny), requests):
        assert len(output.token_ids) >= 9
        assert all(t % 2 and t != EOS for t in output.token_ids[:8])
        assert output.token_ids[-1] in {*stops, EOS}


def test_max_model_len_ends_a_row(tiny: CausalLM) -> None:
    config = replace(ROOMY, max_model_len=10)
    params = RequestParams(temperature=0, max_new_tokens=50, ignore_eos=True)
    (output,) = run(make_engine(tiny, config), [([20, 30, 40, 50], params)])
    assert len(output.token_ids) == 6 and output.finish_reason == "length"
    free = run(make_engine(tiny), [([20, 30, 40, 50], params)])[0]
    assert output.token_ids == free.token_ids[:6]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([], "empty_prompt"),
        ([1, VOCAB], "bad_token_ids"),
        ([-1], "bad_token_ids"),
        ([1] * 100, "prompt_too_long"),
        ([1] * 60, "kv_cache_too_small"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    tiny: CausalLM, prompt: list[int], kind: str
) -> None:
    engine = make_engine(tiny, replace(small_cache(tiny, 64), max_model_len=None))
    engine._requests._max_model_len = 100
    with pytest.raises(RequestError) as error:
        engine.add_request("0", prompt, RequestParams(max_new_tokens=30))
    assert error.value.type == kind
    assert not engine.has_unfinished()


def test_a_row_as_large_as_the_cache_runs(tiny: CausalLM) -> None:
    engine = make_engine(tiny, small_cache(tiny, 64))
    params = RequestParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    outputs = run(engine, [([i] * 40, params) for i in range(9, 13)])
    assert [len(output.token_ids) for output in outputs] == [24] * 4


@pytest.mark.quick(1)
@on_every_device([{}], on_gpu=1)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_with_nan_fails_alone(
    tiny_model: Callable[..., Path], device: str, changes: dict[str, Any], poison: float
) -> None:
    """Its batch mates, the rows that get its blocks and those with its prefix keep their tokens."""
    model = load(tiny_model("llama"), device)
    requests = mixed_requests(8)
    healthy = run(make_engine(model, SIMPLE), requests)
    used = {i for output in healthy for i in output.prompt_token_ids + output.token_ids}
    poisoned = min(set(range(8, VOCAB)) - used)
    model.model.embed_tokens.weight.data[poisoned] = poison
    params = RequestParams(temperature=0, max_new_tokens=8, logprobs=True)
    mixed: list[Request] = []
    for prompt, own in requests:
        bad = [*prompt, poisoned]
        mixed += [(bad, params), (prompt, own), (bad + prompt, params)]
    for config in (replace(ROOMY, **changes), small_cache(model, 120, **changes)):
        for i, output in enumerate(run(make_engine(model, config), mixed)):
            if i % 3 == 1:
                assert_same(output, healthy[i // 3], tolerance(device))
            else:
                assert output.error is not None and output.error.type == "non_finite_logits"
                assert output.finish_reason == "error" and output.token_ids == []


@pytest.mark.quick(1)
@on_every_device([{}], on_gpu=1)
@pytest.mark.usefixtures("hopeful")
def test_a_row_that_fails_while_it_decodes_keeps_what_it_had(
    tiny_model: Callable[..., Path], device: str, changes: dict[str, Any]
) -> None:
    """A token is poisoned that rows generate: a row fails when it reads it, and not before."""
    model = load(tiny_model("llama"), device)
    requests = [
        (prompt, replace(params, logprobs=True, stop_token_ids=(), min_new_tokens=0))
        for prompt, params in mixed_requests(16)
    ]
    healthy = run(make_engine(model, SIMPLE), requests)
    generated = [i for output in healthy for i in output.token_ids[3:-3] if i != EOS]
    poisoned = max(set(generated), key=generated.count)
    model.model.embed_tokens.weight.data[poisoned] = float("nan")
    num_failed = 0
    for config in (replace(ROOMY, **changes), small_cache(model, 120, **changes)):
        for output, before in zip(run(make_engine(model, config), requests), healthy, strict=True):
            read = [*before.prompt_token_ids, *before.token_ids[:-1]]
            if poisoned not in read:
                assert_same(output, before, tolerance(device))
                continue
            num_failed += 1
            count = max(0, read.index(poisoned) + 1 - len(before.prompt_token_ids))
            assert output.error is not None and output.error.type == "non_finite_logits"
            assert output.token_ids == before.token_ids[:count]
            assert all(len(values) == count for values in output.columns.values())
    assert 2 < num_failed < 30


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_that_is_dropped_frees_its_memory_at_once(
    tiny_model: Callable[..., Path], device: str
) -> None:
    """Without a cycle that waits for the garbage collector: the next engine needs the room."""
    model = load(tiny_model("llama"), device)
    gc.disable()
    try:
        engine = make_engine(model, replace(ROOMY, kv_cache_gib=0.01, cuda_graph=device == "cuda"))
        run(engine, mixed_requests(3))
        layers = engine._runner.caches.layers
        caches = [weakref.ref(cache.key) for cache in layers if isinstance(cache, KVCache)]
        del engine, layers
        assert caches and not any(cache() is not None for cache in caches)
    finally:
        gc.enable()


@both_loops
def test_abort_forgets_a_row_wherever_it_is(tiny: CausalLM, mode: dict[str, Any]) -> None:
    engine = make_engine(tiny, replace(ROOMY, max_num_seqs=2, **mode))
    params = RequestParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    prompts = [[20 + i, 30, 40] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    engine.step()
    engine.step()
    assert engine.abort("0") and engine.abort("3") and not engine.abort("3")
    outputs = {}
    while engine.has_unfinished():
        outputs.update({o.request_id: o for o in engine.step()})
    assert sorted(outputs) == ["1", "2"]
    for name, output in outputs.items():
        assert_same(output, run(make_engine(tiny), [(prompts[int(name)], params)])[0])
    assert engine.scheduler.block_manager.usage == 0


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("mode", "aborts_after"),
    some_slow(
        itertools.product([PLAIN, OVERLAP], range(6)),
        quick=[(PLAIN, 0), (PLAIN, 3), *((OVERLAP, after) for after in range(6))],
    ),
    ids=str,
)
def test_an_abort_and_its_id_again_at_any_moment(
    tiny: CausalLM,
    alone: Callable[[int, int], RequestOutput],
    mode: dict[str, Any],
    aborts_after: int,
) -> None:
    """What is on its way for the aborted row reaches neither its slot's nor its id's next one."""
    requests = mixed_requests(6)
    engine = make_engine(tiny, replace(ROOMY, max_num_seqs=2, **mode))
    for i, (prompt, params) in enumerate(requests[:3]):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(aborts_after):
        outputs.update({output.request_id: output for output in engine.step()})
    aborted = [name for name in ("0", "1", "2") if name not in outputs and engine.abort(name)]
    assert engine.scheduler.block_manager.usage == 0 and not engine.has_unfinished()
    for name in aborted:
        engine.add_request(name, *requests[int(name)])
    for i, (prompt, params) in enumerate(requests[3:], start=3):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished():
        outputs.update({output.request_id: output for output in engine.step()})
    for i in range(6):
        assert_same(outputs[str(i)], alone(0, i))


@both_loops
def test_abort_during_a_chunked_prefill_leaves_the_sharers_of_its_blocks(
    tiny: CausalLM, mode: dict[str, Any]
) -> None:
    engine = make_engine(tiny, small_cache(tiny, 150, max_batched_tokens=8, **mode))
    prompt = [(i * 7) % 120 + 8 for i in range(60)]
    params = RequestParams(temperature=0, max_new_tokens=4, ignore_eos=True)
    engine.add_request("gone", prompt, params)
    for _ in range(2):
        engine.step()
    engine.add_request("stays", prompt, params)
    engine.step()
    assert engine.abort("gone")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert_same(outputs[0], run(make_engine(tiny), [(prompt, params)])[0])
    assert engine.scheduler.block_manager.usage == 0
    assert engine.step() == []


@both_loops
def test_rows_that_end_with_their_first_token_leave_nothing_behind(
    tiny: CausalLM, mode: dict[str, Any]
) -> None:
    engine = make_engine(tiny, replace(ROOMY, **mode))
    one = RequestParams(temperature=0, max_new_tokens=1)
    for batch in range(3):
        for i in range(3):
            engine.add_request(f"{batch}{i}", [9 + i, 10], one)
        # Nothing is left to launch before the last step is read.
        assert len([output for _ in range(1 + mode["overlap"]) for output in engine.step()]) == 3
    assert not engine.has_unfinished() and engine.step() == []
    three = RequestParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    (output,) = run(engine, [([9, 10], three)])
    assert_same(output, run(make_engine(tiny), [([9, 10], three)])[0])


def test_duplicate_ids_are_refused(tiny: CausalLM) -> None:
    engine = make_engine(tiny)
    engine.add_request("0", [9], RequestParams())
    with pytest.raises(ValueError, match="already running"):
        engine.add_request("0", [9], RequestParams())


def test_impossible_engine_settings(tiny: CausalLM) -> None:
    with pytest.raises(ValueError, match="the model has positions for"):
        make_engine(tiny, replace(ROOMY, max_model_len=10**6))
    with pytest.raises(ValueError, match="kv_cache_gib"):
        make_engine(tiny, replace(ROOMY, kv_cache_gib=1e-6))
