"""The unmasking rules through the engine: rows of different rules in one batch, edits, and sampled
unmasking against a loop with random numbers of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.dllm.rules.named_rules import RULES as NAMED
from batchgen.strategies.dllm.rules.named_rules import named_rule
from batchgen.strategies.dllm.rules.rule import Rule, UnmaskingOrder
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.strategies.dllm.test_dllm import CPU, EOS, MASK, RULES, check, make_engine, requests, run
from tests.support.engine.dllm_reference import (
    Forward,
    Options,
    block_causal,
    generate,
    model_forward,
)
from tests.support.engine.engine_rows import expect_short_rows

EDITING = [rule for rule in RULES if rule["unmasking"] == "joint_threshold"]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Any:
    return Qwen3ForCausalLM.from_pretrained(
        tiny_model("qwen3"), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def options(rule: dict[str, Any]) -> Options:
    return Options(block_length=8, mask_token_id=MASK, eos=EOS, max_model_len=128, **rule)


@pytest.mark.quick(1)
@pytest.mark.parametrize("config", [{"overlap": True}, {"fused_commit": False}], ids=str)
def test_rows_of_every_rule_share_a_batch(
    tiny_model: Callable[..., Path], model: Any, config: dict[str, Any]
) -> None:
    """Each is what it would be alone, and the edits of those that edit are in its columns."""
    fused = {"fused_commit": False} if "fused_commit" in config else {}
    engine = make_engine(tiny_model, 8, fused, overlap="overlap" in config, max_num_seqs=7)
    asked = requests(5, len(RULES), longest=24)
    rules = [RULES[i % len(RULES)] for i in range(len(asked))]
    rows = []
    for (prompt, params), rule in zip(asked, rules, strict=True):
        decoding = named_rule(rule["unmasking"], **without_name(rule))
        columns = (*params.columns, *["edit_log"] * decoding.edits)
        rows.append((prompt, replace(params, decoding=decoding, columns=columns)))
    forward: Forward = model_forward(model, 8)
    edits = 0
    for output, (prompt, params), rule in zip(run(engine, rows), rows, rules, strict=True):
        wanted = generate(forward, prompt, params, options(rule))
        check(output, wanted, params)
        edits += len(wanted.edits)
        if "edit_log" in params.columns:
            found = output.columns["edit_log"].tolist()
            of_kept = [[at - len(prompt), *rest] for at, *rest in wanted.edits]
            assert found == sorted(one for one in of_kept if one[0] < len(wanted.token_ids))
        commits = output.counts["num_commit_forwards"]
        assert output.counts["num_forwards"] - commits == wanted.num_forwards
    assert edits > 5


def without_name(rule: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != "unmasking"}


@pytest.mark.thorough
@pytest.mark.parametrize("rule", EDITING[:2], ids=str)
def test_rows_that_edit_begin_again_after_a_preemption(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any]
) -> None:
    rows = [
        (prompt, replace(params, columns=("step_map", "edit_log")))
        for prompt, params in requests(1, 16, longest=60)
    ]
    expected = run(make_engine(tiny_model, 4, rule), rows)
    expect_short_rows(monkeypatch)
    engine = make_engine(tiny_model, 4, rule, overlap=True, block_size=4, kv_cache_gib=0.00022)
    outputs = run(engine, rows)
    assert engine.stats.preemptions > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.token_ids == wanted.token_ids and output.counts == wanted.counts
        for name, values in wanted.columns.items():
            np.testing.assert_array_equal(output.columns[name], values)


def test_blocks_whose_last_step_wrote_nothing_need_no_commit(
    tiny_model: Callable[..., Path], model: Any
) -> None:
    """Beside a loop that commits none of them, so their keys and values must be final."""
    prompt = list(range(3, 30))
    params = RequestParams(max_new_tokens=40, temperature=0, ignore_eos=True, logprobs=True,
                            columns=("step_map",))  # fmt: skip
    rule = {"unmasking": "joint_threshold", "edit_threshold": 0.9}
    engine = make_engine(tiny_model, 8, rule)
    found = run(engine, [(prompt, params)])[0]
    wanted = generate(model_forward(model, 8), prompt, params, options(rule))
    check(found, wanted, params)
    assert all(steps[-1] == 0 for steps in wanted.steps)
    assert engine.stats.strategy["commits_alone"] == 0


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"unmasking": "entropy_bound", "entropy_bound": -0.1}, "entropy_bound must be at least 0"),
        ({"unmasking": "entropy_bound", "entropy_bound": float("nan")}, "entropy_bound must be"),
        ({"unmasking": "entropy_bound", "confidence_threshold": 0.5}, "has no such option"),
        ({"min_tokens_per_step": 0}, "min_tokens_per_step must be at least 1"),
        ({"entropy_bound": 0.1}, r"no such option \(it belongs to entropy_bound\): leave it null"),
        ({"edit_threshold": 0.1}, r"\(it belongs to joint_threshold\)"),
        ({"unmasking": "joint_threshold", "edit_threshold": 1.1}, "edit_threshold must be from 0"),
        ({"unmasking": "joint_threshold", "max_edit_steps": -1}, "max_edit_steps must be at least"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DLLMStrategy(**asked)


def test_row_options_of_another_strategy_are_refused(tiny_model: Callable[..., Path]) -> None:
    engine = make_engine(tiny_model, 4, {})
    with pytest.raises(ValueError, match="decoding is a str, and strategy dllm takes a Rule"):
        engine.add_request("0", [5], RequestParams(decoding="sequential"))
    plain = load_model(tiny_model("qwen3"), device=CPU)
    engine = LLMEngine(plain, None, (), ARStrategy(), EngineConfig(kv_cache_gib=0.01))
    with pytest.raises(ValueError, match="strategy ar takes none"):
        engine.add_request("0", [5], RequestParams(decoding=NAMED["sequential"]()))


@pytest.mark.parametrize("rule", NAMED.values(), ids=NAMED)
def test_every_rule_says_what_its_numbers_are(rule: type[Rule]) -> None:
    """A block of any length ends: a step without confidence or entropy still unmasks something."""
    assert NAMED[rule().name] is rule and asdict(rule())["name"] == rule().name  # in row keys
    cut = rule().cut()
    assert cut.at_least >= 1 and cut.steps >= 0 and cut.order in UnmaskingOrder
    assert rule.edits == (cut.edit_threshold < float("inf"))
    assert all(field.kw_only for field in fields(rule))


# --- the law of sampled unmasking -----------------------------------------------------------------

LAWS: list[dict[str, Any]] = [
    {"unmasking": "low_confidence_dynamic", "confidence_threshold": 0.03},
    {"unmasking": "low_confidence_dynamic", "confidence_threshold": 0.5, "min_tokens_per_step": 2},
    {"unmasking": "low_confidence_static", "denoising_steps": 2},
    {"unmasking": "sequential", "denoising_steps": 2},
    {"unmasking": "entropy_bound", "entropy_bound": 1.7},
    {"unmasking": "joint_threshold", "confidence_threshold": 0.03, "edit_threshold": 0.05},
]
SAMPLES = 1500


@pytest.mark.quick(0, thorough=3)
@pytest.mark.parametrize("rule", LAWS, ids=str)
def test_sampled_unmasking_has_the_law_of_a_plain_loop(
    tiny_model: Callable[..., Path], model: Any, rule: dict[str, Any]
) -> None:
    """Two samples of independent random numbers: of step maps, and of tokens beside their steps."""
    prompt = [7, 11, 13, 5]
    params = RequestParams(max_new_tokens=4, temperature=0.7, top_k=6, ignore_eos=True,
                            columns=("step_map",))  # fmt: skip
    rows = [(prompt, replace(params, seed=seed)) for seed in range(SAMPLES)]
    engine = make_engine(tiny_model, 4, rule, max_num_seqs=256)
    found = run(engine, rows)
    ours = [(tuple(out.token_ids), tuple(out.columns["step_map"].tolist())) for out in found]
    theirs = plain_loop(model, prompt, params, Options(block_length=4, mask_token_id=MASK, **rule))
    for name, kind in (
        ("steps", lambda row: row[1]),
        ("first token", lambda row: (row[0][0], row[1][0])),
        ("last token", lambda row: (row[0][3], row[1][3])),
    ):
        value, freedom = chi_square(Counter(map(kind, ours)), Counter(map(kind, theirs)))
        assert freedom == 0 or value < freedom + 5 * (2 * freedom) ** 0.5 + 5, name


def plain_loop(
    model: Any, prompt: list[int], params: RequestParams, options: Options
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """One block of SAMPLES sequences, each drawn by torch.multinomial: tokens and their steps."""
    generator, length = torch.Generator().manual_seed(1), options.block_length
    tokens = torch.full((SAMPLES, length), MASK)
    steps = torch.zeros((SAMPLES, length), dtype=torch.int64)
    masked, done = tokens == MASK, torch.zeros(SAMPLES, dtype=torch.bool)
    seen = block_causal(len(prompt) + length, length)
    bias = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    edits, writes = options.unmasking == "joint_threshold", torch.zeros(SAMPLES, dtype=torch.int64)
    without_mask = torch.zeros(SAMPLES, dtype=torch.int64)
    while not done.all():
        ids = torch.cat((torch.tensor(prompt).expand(SAMPLES, -1), tokens), dim=1)
        with torch.inference_mode():
            logits = model(ids, attention_mask=bias.expand(SAMPLES, 1, -1, -1)).logits[:, -length:]
        logits = logits.clone() / params.temperature
        logits[..., MASK] = -torch.inf
        logits[logits < logits.topk(params.top_k).values[..., -1:]] = -torch.inf
        probs = logits.softmax(-1)
        drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(tokens.shape)
        sure = probs.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
        entropy = torch.special.entr(probs).sum(-1)
        without_mask += ~masked.any(1) & ~done
        for row in (~done).nonzero().flatten().tolist():
            left = masked[row].nonzero().flatten().tolist()
            by_sureness = sorted(left, key=lambda at: (-float(sure[row, at]), at))
            if options.unmasking == "entropy_bound":
                order = sorted(left, key=lambda at: (float(entropy[row, at]), at))
                sums = [float(entropy[row, order[:i]].sum()) for i in range(len(order))]
                chosen = [at for at, total in zip(order, sums, strict=True)
                          if total <= options.entropy_bound]  # fmt: skip
            elif options.denoising_steps is not None:
                ordered = left if options.unmasking == "sequential" else by_sureness
                chosen = ordered[: length // options.denoising_steps]
            else:
                chosen = [at for at in left if sure[row, at] > options.confidence_threshold]
                chosen = list({*chosen, *by_sureness[: options.min_tokens_per_step]})
            changed = []
            if edits:
                changed = [at for at in range(length) if not masked[row, at]
                           and drawn[row, at] != tokens[row, at]
                           and sure[row, at] > options.edit_threshold]  # fmt: skip
            writes[row] += bool(chosen or changed)
            for at in chosen + changed:
                tokens[row, at], steps[row, at] = drawn[row, at], writes[row]
            was_known = not left
            masked[row, chosen] = False
            ends = was_known and (not changed or without_mask[row] >= options.max_edit_steps)
            done[row] = not masked[row].any() and (ends or not edits)
    return [(tuple(a), tuple(b)) for a, b in zip(tokens.tolist(), steps.tolist(), strict=True)]


def chi_square(ours: Counter[Any], theirs: Counter[Any]) -> tuple[float, int]:
    """The statistic of two samples of one size, and its degrees of freedom; rare kinds are one."""
    kinds = {kind for kind in ours | theirs if ours[kind] + theirs[kind] >= 10}
    pairs = [(ours[kind], theirs[kind]) for kind in kinds]
    rest = [
        sum(count for kind, count in each.items() if kind not in kinds) for each in (ours, theirs)
    ]
    if sum(rest) >= 10:
        pairs.append((rest[0], rest[1]))
    return sum((a - b) ** 2 / (a + b) for a, b in pairs), len(pairs) - 1
