"""The one-sequence reference of block diffusion, with which other tests compare the engine."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling.philox import gumbel_noise, philox
from tests.support.engine.dllm_reference import (
    Forward,
    Generated,
    Options,
    Token,
    block_causal,
    choose,
    generate,
    model_forward,
    schedule,
    unmasked,
)

VOCAB, MASK = 24, 23
RULES = ["sequential", "low_confidence_static", "low_confidence_dynamic"]
GREEDY = RequestParams(temperature=0, max_new_tokens=13)
SAMPLED = RequestParams(temperature=0.8, top_k=9, top_p=0.95, min_p=0.01, seed=5)


def options(length: int, unmasking: str = "sequential", **more: Any) -> Options:
    return Options(block_length=length, mask_token_id=MASK, unmasking=unmasking, **more)


@functools.cache
def tiny_model() -> Any:
    """A random Qwen3 whose rows are neither flat nor all of one token."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.25,
        max_position_embeddings=128,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return Qwen3ForCausalLM(config).eval()


def tiny_forward(length: int) -> Forward:
    return model_forward(tiny_model(), length)


def scripted(tokens: list[int], sureness: list[float] | None = None) -> Forward:
    """At position i the token tokens[i], with probability sureness[i] (0.5), and never the mask."""

    def forward(ids: list[int]) -> Tensor:
        logits = torch.empty(len(ids), VOCAB)
        for i in range(len(ids)):
            sure = 0.5 if sureness is None else sureness[i]
            logits[i] = torch.tensor((1 - sure) / (VOCAB - 2)).log()
            logits[i, MASK] = -torch.inf
            logits[i, tokens[i]] = torch.tensor(sure).log()
        return logits

    return forward


def prompt_of(count: int) -> list[int]:
    return [(7 * i + 3) % (VOCAB - 1) for i in range(count)]


# --- the mask -------------------------------------------------------------------------------------


def test_logits_see_their_own_block_and_those_before() -> None:
    assert block_causal(5, 2).int().tolist() == [
        [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1],
    ]  # fmt: skip
    forward, ids = tiny_forward(4), prompt_of(12)
    before = forward(ids)
    assert before.dtype == torch.float32
    for changed in range(12):
        other = [*ids]
        other[changed] = (other[changed] + 1) % VOCAB
        moved = (forward(other) - before).abs().amax(-1) > 1e-6
        assert moved.tolist() == [i >= changed - changed % 4 for i in range(12)]


def test_blocks_of_one_token_are_the_model_as_it_is() -> None:
    with torch.inference_mode():
        expected = tiny_model()(torch.tensor([prompt_of(9)])).logits[0]
    torch.testing.assert_close(tiny_forward(1)(prompt_of(9)), expected)


# --- what a step unmasks --------------------------------------------------------------------------


def test_schedules_have_exactly_as_many_steps_as_asked_for() -> None:
    assert schedule(options(10, denoising_steps=4)) == [3, 3, 2, 2]
    assert schedule(options(8, denoising_steps=3)) == [3, 3, 2]
    assert schedule(options(4, denoising_steps=4)) == schedule(options(4)) == [1] * 4
    assert schedule(options(2, denoising_steps=4)) == [1, 1, 0, 0]
    assert schedule(options(32, denoising_steps=1)) == [32]


def test_choices_and_their_ties() -> None:
    drawn = {
        at: Token(0, confidence, 0.0, [])
        for at, confidence in {3: 0.25, 4: 0.5, 6: 0.75, 7: 0.5, 9: 0.5}.items()
    }
    ten = {"denoising_steps": 4}  # 3, 3, 2, 2 of 10
    assert choose(drawn, 0, options(10, "sequential", **ten)) == [3, 4, 6]
    assert choose(drawn, 2, options(10, "sequential", **ten)) == [3, 4]
    assert choose(drawn, 0, options(10, "low_confidence_static", **ten)) == [6, 4, 7]
    assert choose(drawn, 2, options(10, "low_confidence_static", **ten)) == [6, 4]
    for limit, expected in ((0.5, [6]), (0.75, [6]), (0.4, [4, 6, 7, 9]), (0.0, [3, 4, 6, 7, 9])):
        dynamic = options(10, "low_confidence_dynamic", confidence_threshold=limit)
        assert choose(drawn, 0, dynamic) == expected
    del drawn[6]
    dynamic = options(10, "low_confidence_dynamic", confidence_threshold=0.5)
    assert choose(drawn, 0, dynamic) == [4]


@pytest.mark.parametrize("params", [GREEDY, replace(SAMPLED, max_new_tokens=13)])
def test_the_extremes_of_the_threshold(params: RequestParams) -> None:
    for length in (2, 4, 8):
        prompt = prompt_of(length + 1)
        dynamic = options(length, "low_confidence_dynamic", confidence_threshold=1.0)
        out = generate(tiny_forward(length), prompt, params, dynamic)
        assert out.steps[0] == [1] * (length - 1)
        assert all(steps == [1] * length for steps in out.steps[1:])
        dynamic = replace(dynamic, confidence_threshold=0.0)
        out = generate(tiny_forward(length), prompt, params, dynamic)
        assert out.steps == [[length - 1]] + [[length]] * (len(out.steps) - 1)
        assert (
            out.step_map
            == [(i + length + 1) // length for i in range(len(out.token_ids))][: len(out.step_map)]
        )


def test_confident_tokens_come_first_and_the_step_map_says_so() -> None:
    sureness = [0.9, 0.9, 0.3, 0.6, 0.6, 0.2, 0.5, 0.95]
    forward = scripted(list(range(8)), sureness)
    params = replace(GREEDY, max_new_tokens=6)
    out = generate(forward, [0, 1], params, options(8, "low_confidence_static", denoising_steps=4))
    assert out.token_ids == [2, 3, 4, 5, 6, 7]
    assert out.step_map == [3, 1, 2, 3, 2, 1] and out.steps == [[2, 2, 2]]
    dynamic = options(8, "low_confidence_dynamic", confidence_threshold=0.55)
    out = generate(forward, [0, 1], params, dynamic)
    assert out.step_map == [3, 1, 1, 4, 2, 1] and out.steps == [[3, 1, 1, 1]]
    torch.testing.assert_close(out.confidences, sureness[2:], rtol=1e-5, atol=0)
    expected = torch.tensor(sureness[2:]).log().tolist()
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-5, atol=1e-6)


# --- blocks and prompts ---------------------------------------------------------------------------


@pytest.mark.quick(1, thorough=6)
@pytest.mark.parametrize("params", [GREEDY, replace(SAMPLED, max_new_tokens=13)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [2, 4, 8])
def test_every_prompt_length(length: int, rule: str, params: RequestParams) -> None:
    """Answers of up to two blocks: the tail is never drawn, and facts of the step map hold."""
    for count in range(1, 2 * length + 1):
        seen: list[list[int]] = []

        def forward(ids: list[int], seen: list[list[int]] = seen) -> Tensor:
            seen.append(ids)
            return tiny_forward(length)(ids)

        chosen = options(
            length, rule, denoising_steps=max(1, length // 2), confidence_threshold=0.3
        )
        out = generate(forward, prompt_of(count), params, chosen)
        assert out.finish_reason == "length" and len(out.token_ids) == 13
        check_step_map(out, length, count)
        assert len(seen) == out.num_forwards
        # Every forward ends with the block, and starts with the prompt and what was generated.
        whole = prompt_of(count) + out.token_ids
        number = 0
        for block, steps in enumerate(out.steps, start=count // length):
            for step in range(len(steps)):
                ids, number = seen[number], number + 1
                assert len(ids) == (block + 1) * length
                assert ids[:count] == prompt_of(count)
                for at in range(count, min(len(ids), len(whole))):
                    known = at < block * length or out.step_map[at - count] < number
                    assert ids[at] == (whole[at] if known else MASK), (at, step)
        if rule != "low_confidence_dynamic":
            assert all(len(steps) <= max(1, length // 2) for steps in out.steps)
            assert all(steps == schedule(chosen) for steps in out.steps[1:])


def check_step_map(out: Generated, length: int, prompt_len: int) -> None:
    assert len(out.step_map) == len(out.logprobs) == len(out.token_ids)
    blocks: dict[int, list[int]] = {}
    for i, step in enumerate(out.step_map):
        blocks.setdefault((prompt_len + i) // length, []).append(step)
    ends = list(accumulate(map(len, out.steps)))
    for values, steps, end in zip(blocks.values(), out.steps, ends, strict=True):
        assert min(values) > end - len(steps) and max(values) <= end
        if sum(steps) == len(values):  # nothing was cut off
            counts = [values.count(end - len(steps) + 1 + s) for s in range(len(steps))]
            assert counts == steps


def test_later_blocks_see_the_tokens_of_earlier_ones_in_any_unmasking_order() -> None:
    """A token is unmasked with the block's other known tokens in view: logprobs tell which."""
    forward = tiny_forward(4)
    params = replace(GREEDY, max_new_tokens=8, logprobs=True, top_logprobs=2)
    out = generate(forward, prompt_of(6), params, options(4, "low_confidence_static"))
    whole = prompt_of(6) + out.token_ids
    steps = [0] * 6 + out.step_map
    for at in range(6, 12):
        end = at - at % 4 + 4
        ids = [whole[i] if steps[i] < steps[at] else MASK for i in range(end)]
        row = unmasked(forward(ids)[[at]], options(4))[0].log_softmax(-1)
        assert row.argmax() == whole[at]
        torch.testing.assert_close(out.logprobs[at - 6], float(row[whole[at]]))
        best = row.topk(2)
        found = out.top_logprobs[at - 6]
        assert [token for token, _ in found] == best.indices.tolist()
        torch.testing.assert_close([value for _, value in found], best.values.tolist())


# --- stops ----------------------------------------------------------------------------------------


@pytest.mark.quick(1, thorough=2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_stops_at_every_offset(length: int, rule: str) -> None:
    """EOS, a stop id, max_new_tokens or max_model_len in any block, the first included."""
    for prompt_len in range(1, length + 2):
        for stop in range(2 * length + 1):
            tokens = [5 + i % 9 for i in range(64)]
            tokens[prompt_len + stop] = 2
            tokens[prompt_len + stop + 1] = 2  # of two stops the first
            forward, prompt = scripted(tokens), [1] * prompt_len
            chosen = options(length, rule, eos=(2,))
            expected = tokens[prompt_len : prompt_len + stop + 1]
            by_id = replace(GREEDY, max_new_tokens=40)
            out = generate(forward, prompt, by_id, chosen)
            assert (out.token_ids, out.finish_reason) == (expected, "stop")
            assert len(out.step_map) == len(out.logprobs) == stop + 1
            plain = replace(by_id, ignore_eos=True)
            out = generate(forward, prompt, replace(plain, stop_token_ids=(2,)), chosen)
            assert (out.token_ids, out.finish_reason) == (expected, "stop")
            for params, limit in (
                (replace(plain, max_new_tokens=stop + 1), 2**40),
                (plain, prompt_len + stop + 1),
            ):
                out = generate(forward, prompt, params, replace(chosen, max_model_len=limit))
                assert (out.token_ids, out.finish_reason) == (expected, "length")


def test_a_stop_goes_before_the_length_and_the_prompt_holds_none() -> None:
    out = generate(
        scripted([2, 2, 2, 6, 2, 6]), [2, 2, 2], replace(GREEDY, max_new_tokens=2),
        options(2, eos=(2,)),
    )  # fmt: skip
    assert (out.token_ids, out.finish_reason) == ([6, 2], "stop")


@pytest.mark.parametrize("rule", RULES)
def test_before_min_new_tokens_stops_are_banned_position_by_position(rule: str) -> None:
    sureness = [0.5, 0.9, 0.5, 0.5, 0.9, 0.5, 0.5, 0.5]
    forward = scripted([2] * 8, sureness)
    chosen = options(8, rule, eos=(2,), denoising_steps=2, confidence_threshold=0.3)
    params = replace(GREEDY, min_new_tokens=3, max_new_tokens=7, logprobs_mode="processed")
    out = generate(forward, [0], params, chosen)
    assert out.token_ids == [0, 0, 0, 2] and out.finish_reason == "stop"
    torch.testing.assert_close(out.confidences[:3], [1 / (VOCAB - 2)] * 3)
    torch.testing.assert_close(out.confidences[3], 0.9)
    torch.testing.assert_close(out.logprobs, torch.tensor(out.confidences).log().tolist())
    raw = generate(forward, [0], replace(params, logprobs_mode="raw"), chosen)
    assert raw.token_ids == out.token_ids and raw.step_map == out.step_map
    torch.testing.assert_close(raw.logprobs[0], float(torch.tensor(0.1 / (VOCAB - 2)).log()))


# --- sampling -------------------------------------------------------------------------------------


def test_noise_is_keyed_by_seed_position_and_step() -> None:
    """A flat law: the token is the noise's argmax, whichever step unmasks it."""
    params = RequestParams(seed=2**64 - 3, max_new_tokens=9)
    out = generate(lambda ids: torch.zeros(len(ids), VOCAB), [1, 1, 1], params, options(4))
    steps = [0, 0, 1, 2, 3, 0, 1, 2, 3]  # within the block
    for i, (token, step) in enumerate(zip(out.token_ids, steps, strict=True)):
        words = philox(torch.tensor([-3]), torch.tensor([3 + i]), step, 0, VOCAB)
        assert token == gumbel_noise(words)[:, :MASK].argmax()
    assert out.step_map == list(range(1, 10))


@pytest.mark.thorough
def test_the_law_is_that_of_the_filters() -> None:
    """Over many seeds: frequencies of one position's token, and confidences under that law."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0] + [-1.0] * 19)
    params = RequestParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.2, max_new_tokens=1)
    probs = (logits / 0.7).softmax(-1)[:4]
    probs = probs / probs.sum()
    kept = [i for i in range(4) if float(probs[:i].sum()) < 0.9]
    kept = [i for i in kept if probs[i] >= 0.2 * probs[0]]
    assert kept == [0, 1, 2]
    law = probs[kept] / probs[kept].sum()
    counts = torch.zeros(VOCAB)
    for seed in range(1500):
        one = replace(params, seed=seed)
        out = generate(lambda ids: logits.expand(len(ids), -1), [1], one, options(2))
        counts[out.token_ids[0]] += 1
        torch.testing.assert_close(out.confidences[0], float(law[out.token_ids[0]]))
    assert counts[3:].sum() == 0
    assert ((counts[:3] / 1500 - law).abs() < 0.05).all()
