"""Block diffusion through the engine: the tokens, steps and log-probabilities of the plain
one-sequence reference, however rows are batched, chunked, cached or preempted.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.engine.test_llm_engine import spelling_tokenizer
from tests.support.cases import some_slow
from tests.support.engine.dllm_reference import Forward, Generated, Options, generate, model_forward
from tests.support.engine.edited_models import edit_weights
from tests.support.engine.engine_rows import expect_short_rows

CPU = torch.device("cpu")
MASK = 127
EOS = (2,)
RULES: list[dict[str, Any]] = [
    {"unmasking": "sequential"},
    {"unmasking": "sequential", "denoising_steps": 3},
    {"unmasking": "low_confidence_static", "denoising_steps": 2},
    {"unmasking": "low_confidence_static"},
    {"unmasking": "low_confidence_dynamic", "confidence_threshold": 0.05},
    {"unmasking": "low_confidence_dynamic", "confidence_threshold": 0.9},
    {"unmasking": "low_confidence_dynamic", "confidence_threshold": 0.2, "min_tokens_per_step": 2},
    {"unmasking": "entropy_bound", "entropy_bound": 5.0},
    {"unmasking": "entropy_bound", "entropy_bound": 0.0, "min_tokens_per_step": 3},
    {"unmasking": "joint_threshold", "confidence_threshold": 0.05, "edit_threshold": 0.1},
    {"unmasking": "joint_threshold", "edit_threshold": 0.0, "max_edit_steps": 2},
    {"unmasking": "joint_threshold", "min_tokens_per_step": 3, "max_edit_steps": 0},
]
RULES_AND_OVERLAP = pytest.mark.parametrize(
    ("rule", "overlap"),
    some_slow(
        itertools.product([RULES[3], RULES[4]], [False, True]),
        quick=[(RULES[3], False), (RULES[4], True)],
    ),
    ids=str,
)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "top_logprobs": 3, "ignore_eos": True},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "logprobs_mode": "processed"},
    {"temperature": 1.2, "min_p": 0.02, "stop_token_ids": tuple(range(3, 20))},
    {"temperature": 0.9, "stop_token_ids": tuple(range(3, 60)), "min_new_tokens": 7},
]

Request = tuple[list[int], RequestParams]


def requests(seed: int, count: int, longest: int = 30) -> list[Request]:
    """Rows of all options, with prompts of every length modulo small blocks."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [rng.randrange(3, MASK + 1) for _ in range(1 + i % 11 + 4 * (i % 3))]
        kind = KINDS[i % len(KINDS)]
        most = max(rng.randint(1, longest), kind.get("min_new_tokens", 0))
        params = RequestParams(
            max_new_tokens=most, seed=i, logprobs=True, columns=("step_map",), **kind
        )
        made.append((prompt, params))
    return made


@pytest.fixture(scope="module")
def forward_of(tiny_model: Callable[..., Path]) -> Callable[[int], Forward]:
    model = Qwen3ForCausalLM.from_pretrained(
        tiny_model("qwen3"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return lambda length: model_forward(model, length)


def make_engine(
    tiny_model: Callable[..., Path],
    length: int,
    rule: dict[str, Any],
    *,
    device: str = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **config: Any,
) -> LLMEngine:
    model = load_model(tiny_model("sdar"), device=torch.device(device), dtype=torch.float32)
    config = {"max_model_len": 128, "kv_cache_gib": 0.02, **config}
    strategy = DLLMStrategy(length, **rule)
    return LLMEngine(model, tokenizer, EOS, strategy, EngineConfig(**config))


def run(engine: LLMEngine, rows: list[Request]) -> list[RequestOutput]:
    for i, (prompt, params) in enumerate(rows):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    engine.scheduler.block_manager.check_integrity([])
    return [outputs[str(i)] for i in range(len(rows))]


def check(found: RequestOutput, wanted: Generated, params: RequestParams) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.columns["step_map"].tolist() == wanted.step_map
    assert found.finish_reason == wanted.finish_reason
    np.testing.assert_allclose(found.columns["logprobs"], wanted.logprobs, atol=1e-4)
    if params.top_logprobs:
        for row, values, pairs in zip(
            found.columns["top_logprob_ids"],
            found.columns["top_logprobs"],
            wanted.top_logprobs,
            strict=True,
        ):
            assert row.tolist() == [token_id for token_id, _ in pairs]
            np.testing.assert_allclose(values, [value for _, value in pairs], atol=1e-4)


MODES: list[dict[str, Any]] = [
    {"overlap": False, "cuda_graph": False},
    {"overlap": True, "cuda_graph": False},
    {"device": "cuda", "overlap": False, "cuda_graph": False},
    {"device": "cuda", "overlap": True, "cuda_graph": True},
]


def marks_of(mode: int, rule: int, length: int) -> list[pytest.MarkDecorator]:
    """On a CPU each rule and length are quick together once, the longest with one rule."""
    if "device" in MODES[mode]:
        return [pytest.mark.gpu]
    is_quick = (mode + rule + length) % 2 and (length < 3 or rule == len(RULES) - 1)
    return [] if is_quick else [pytest.mark.slow]


@pytest.mark.quick(3, thorough=12)
@pytest.mark.parametrize(
    ("length", "rule", "mode"),
    [
        pytest.param(length, rule, mode, marks=marks_of(i, j, k))
        for i, mode in enumerate(MODES)
        for j, rule in enumerate(RULES)
        for k, length in enumerate([2, 4, 8, 32])
    ],
    ids=str,
)
def test_rows_are_those_of_the_reference(
    tiny_model: Callable[..., Path],
    forward_of: Callable[[int], Forward],
    length: int,
    rule: dict[str, Any],
    mode: dict[str, Any],
) -> None:
    rows = requests(length, len(KINDS))
    engine = make_engine(
        tiny_model,
        length,
        rule,
        max_num_seqs=5,
        max_batched_tokens=max(length, 9),
        block_size=32 if length == 32 else 8,
        **mode,
    )
    options = Options(block_length=length, mask_token_id=MASK, eos=EOS, max_model_len=128, **rule)
    forward = forward_of(length)
    steps_per_block: Counter[int] = Counter()
    for output, (prompt, params) in zip(run(engine, rows), rows, strict=True):
        wanted = generate(forward, prompt, params, options)
        check(output, wanted, params)
        assert output.counts == {
            "num_forwards": wanted.num_forwards,
            "num_commit_forwards": 0,
        }
        steps_per_block.update(map(len, wanted.steps))
    assert engine.stats.strategy["steps_per_block"] == steps_per_block


@pytest.mark.quick(0, thorough=4)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_mask_token_is_never_generated(
    tiny_model: Callable[..., Path], tmp_path: Path, rule: dict[str, Any]
) -> None:
    """By a model whose logits favour it; its probability goes to the other tokens."""

    def favour(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][MASK] *= 30

    folder = edit_weights(tiny_model("sdar"), tmp_path / "ours", favour)
    theirs = edit_weights(tiny_model("qwen3"), tmp_path / "theirs", favour)
    forward = model_forward(
        Qwen3ForCausalLM.from_pretrained(theirs, attn_implementation="eager").eval(), 4
    )
    assert (forward([MASK] * 4).argmax(-1) == MASK).any()
    rows = requests(6, len(KINDS))
    options = Options(block_length=4, mask_token_id=MASK, eos=EOS, max_model_len=128, **rule)
    engine = make_engine(lambda kind: folder, 4, rule, max_num_seqs=5)
    for output, (prompt, params) in zip(run(engine, rows), rows, strict=True):
        check(output, generate(forward, prompt, params, options), params)
        assert MASK not in output.token_ids
        if params.top_logprobs:
            assert MASK not in output.columns["top_logprob_ids"]
            assert np.isfinite(output.columns["top_logprobs"]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [RULES[2], RULES[4]], ids=str)
@pytest.mark.parametrize("length", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_commits_may_go_alone_or_find_no_room(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    rule: dict[str, Any],
) -> None:
    """Unfused, and with room for any number of rows from none to more than there are."""
    rows = requests(length + 1, 12, longest=80)
    engines = [
        make_engine(tiny_model, length, rule),
        make_engine(tiny_model, length, rule | {"fused_commit": False}),
        make_engine(tiny_model, length, rule, overlap=True),
    ]
    expected, alone = (run(engine, rows) for engine in engines[:2])
    rng = random.Random(0)
    monkeypatch.setattr(DLLMStrategy, "_room", lambda self, rows: rng.choice((0, 0, 1, rows + 2)))
    tight = run(engines[2], rows)
    for wanted, one, other in zip(expected, alone, tight, strict=True):
        for found in (one, other):
            assert found.token_ids == wanted.token_ids
            for name, values in wanted.columns.items():
                np.testing.assert_array_equal(found.columns[name], values)
        assert other.counts == wanted.counts
        denoising = one.counts["num_forwards"] - one.counts["num_commit_forwards"]
        assert denoising == wanted.counts["num_forwards"]
        last = len(wanted.prompt_token_ids) + len(wanted.token_ids) - 1
        begun = last // length - len(wanted.prompt_token_ids) // length
        assert (
            wanted.counts["num_commit_forwards"] == 0 and one.counts["num_commit_forwards"] == begun
        )
    none, every, some = (engine.stats.strategy["commits_alone"] for engine in engines)
    assert none == 0 < some < every


@pytest.mark.quick(1)
@pytest.mark.parametrize("length", [4, 32])
def test_stop_strings_end_rows_wherever_they_stand(
    tiny_model: Callable[..., Path], length: int
) -> None:
    """At every offset of a block, the first one with the end of the prompt too, and across two."""
    tokenizer = spelling_tokenizer()  # four characters a token
    free = [
        (prompt, RequestParams(seed=i, max_new_tokens=20, ignore_eos=True, columns=("step_map",)))
        for i, (prompt, _) in enumerate(requests(4, 20))
    ]
    longer = run(make_engine(tiny_model, length, RULES[4], tokenizer=tokenizer), free)
    rows = [
        (prompt, replace(params, stop=(out.text[4 * i : 4 * i + 6], "never")))
        for i, ((prompt, params), out) in enumerate(zip(free, longer, strict=True))
    ]
    engine = make_engine(tiny_model, length, RULES[4], tokenizer=tokenizer, overlap=True)
    for (_, params), found, whole in zip(rows, run(engine, rows), longer, strict=True):
        string = params.stop[0]
        count = next(n for n in range(21) if string in tokenizer.decode(whole.token_ids[:n]))
        assert found.token_ids == whole.token_ids[:count]
        assert (found.finish_reason, found.stop) == ("stop", string)
        assert found.text == whole.text[: whole.text.index(string)]
        assert found.columns["step_map"].tolist() == whole.columns["step_map"][:count].tolist()


@pytest.mark.quick(1)
@RULES_AND_OVERLAP
def test_preempted_rows_go_on_as_if_nothing_had_happened(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    rule: dict[str, Any],
    overlap: bool,
) -> None:
    rows = requests(1, 16, longest=60)
    expected = run(make_engine(tiny_model, 4, rule), rows)
    expect_short_rows(monkeypatch)
    engine = make_engine(tiny_model, 4, rule, overlap=overlap, block_size=4, kv_cache_gib=0.00022)
    outputs = run(engine, rows)
    assert engine.stats.preemptions > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.token_ids == wanted.token_ids and output.counts == wanted.counts
        for name, values in wanted.columns.items():
            np.testing.assert_array_equal(output.columns[name], values)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [4, 8, 32])
def test_rows_that_share_prefixes_are_those_of_rows_that_do_not(
    tiny_model: Callable[..., Path], length: int
) -> None:
    """Samples of a prompt, and prompts that go on from others' answers. A block of the cache that
    ends within one of the attention is not shared."""
    prompts = [requests(2, 4)[i][0] * 4 for i in range(4)]
    params = RequestParams(temperature=0.8, max_new_tokens=24, logprobs=True)
    rule = {"confidence_threshold": 0.1}
    shared, alone = (
        make_engine(tiny_model, length, rule, block_size=8, prefix_caching=caching)
        for caching in (True, False)
    )
    rows = [(prompt, replace(params, seed=i)) for i, prompt in enumerate(prompts * 3)]
    for _ in range(2):
        found, wanted = run(shared, rows), run(alone, rows)
        assert [row.token_ids for row in found] == [row.token_ids for row in wanted]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(
                one.columns["logprobs"], other.columns["logprobs"], atol=1e-5
            )
        rows = [
            (out.prompt_token_ids + out.token_ids, own)
            for out, (_, own) in zip(found, rows, strict=True)
        ]
    assert (shared.stats.cached_tokens > 0) == (length <= 8)


def test_aborts_leave_the_others_alone(tiny_model: Callable[..., Path]) -> None:
    rows = requests(3, 8, longest=40)
    expected = run(make_engine(tiny_model, 4, RULES[4]), rows)
    engine = make_engine(tiny_model, 4, RULES[4], overlap=True)
    for i, (prompt, params) in enumerate(rows):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    for step in itertools.count():
        if step in (2, 5):
            engine.abort(str(step))
        if not engine.has_unfinished():
            break
        outputs |= {output.request_id: output for output in engine.step()}
    for i, wanted in enumerate(expected):
        if str(i) in outputs:
            assert outputs[str(i)].token_ids == wanted.token_ids
    assert len(outputs) >= 6
    with pytest.raises(ValueError, match="penalties count the tokens before"):
        engine.add_request("x", [5], RequestParams(repetition_penalty=1.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": 1}, "block_length must be 2 to 64, got 1"),
        ({"block_length": 65}, "block_length must be 2 to 64, got 65"),
        ({"unmasking": "random"}, "unmasking must be low_confidence_dynamic or"),
        ({"confidence_threshold": 1.5}, "confidence_threshold must be from 0 to 1"),
        (
            {"unmasking": "sequential", "denoising_steps": 0},
            "denoising_steps must be at least 1",
        ),
        ({"denoising_steps": 4}, "leave it null"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DLLMStrategy(**options)


def test_models_and_strategies_that_do_not_go_together(tiny_model: Callable[..., Path]) -> None:
    diffusion = load_model(tiny_model("sdar"), device=CPU)
    plain = load_model(tiny_model("qwen3"), device=CPU)
    with pytest.raises(ValueError, match="needs a diffusion model"):
        LLMEngine(plain, None, (), DLLMStrategy(4), EngineConfig(kv_cache_gib=0.01))
    with pytest.raises(ValueError, match="use strategy=dllm"):
        LLMEngine(diffusion, None, (), ARStrategy(), EngineConfig(kv_cache_gib=0.01))
