"""From what is known of a job to its time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchgen.jobs.forecast.calibration import Calibration
from batchgen.jobs.forecast.devices import DEVICES, Device
from batchgen.jobs.forecast.forecast import forecast, likely_share
from batchgen.jobs.forecast.range import Range
from batchgen.jobs.forecast.run_time import Work, run_time
from batchgen.jobs.forecast.step_cost import ModelSizes, StepCost

CPU = Device("cpu", 20e9, 80e9)
# 8 billion parameters in bfloat16, as of Qwen3-8B
SIZES = ModelSizes(
    layers=36,
    values=7_568_000_000,
    value_bytes=2,
    share=1.0,
    head=622_000_000,
    vocabulary=151_936,
    attention=4 * 36 * 32 * 128,
    token_bytes=147_456,
    row_bytes=0,
    dtype=torch.bfloat16,
    weight_dtype=torch.bfloat16,
)
WORK = Work(
    prompts=np.full(100, 50),
    answers=Range(100, 100, 100),
    longest=400,
    exact=False,
    width=1,
    min_width=1,
    rows=64,
    kv_tokens=10**6,
    batched_tokens=8192,
    weight_bytes=10**9,
)


def of(name: str = "H100", sizes: ModelSizes = SIZES) -> StepCost:
    return StepCost(sizes, DEVICES[name])


def test_weights_in_fp8_are_read_and_multiplied_faster() -> None:
    fp8 = replace(SIZES, weight_dtype=torch.float8_e4m3fn, value_bytes=1)
    for name in ("H100", "H200"):
        plain, quantised = of(name), of(name, fp8)
        assert 0.5 < quantised.decode(1, 100) / plain.decode(1, 100) < 0.7
        assert 0.5 < quantised.prefill(8192, 8, 0) / plain.prefill(8192, 8, 0) < 0.7
        # The keys and values of long contexts are as many as before.
        assert quantised.decode(64, 10**6) > 0.85 * plain.decode(64, 10**6)
    assert DEVICES["H100"].fp8 and not DEVICES["A100"].fp8


def ordered(value: Range) -> bool:
    return value.low <= value.likely <= value.bound


def test_a_step_of_one_row_reads_the_weights() -> None:
    cost = of()
    seconds = cost.decode(1, 100)
    assert seconds == pytest.approx(2 * 7.57e9 / (0.9 * 3.35e12), rel=0.4)
    assert seconds < cost.decode(256, 100 * 256) < 10 * seconds
    assert of("H200").decode(1, 100) < seconds < of("A100").decode(1, 100)


@pytest.mark.parametrize(
    ("rows", "context", "measured"),
    [(256, 870, 0.0269), (192, 600, 0.0165)],
)
def test_steps_of_qwen3_8b_on_an_h100(rows: int, context: int, measured: float) -> None:
    """Measured on 2026-11-22: a decode run of 512 rows took 32.7 s for 2,048 steps of some 600
    tokens of context; a mixed one 7.8 s for decode steps."""
    assert 0.6 < of().decode(rows, rows * context) / measured < 1.7


def test_prefill_of_qwen3_8b_on_an_h100_takes_23_microseconds_a_token() -> None:
    rows = 8192 // 1500
    pairs = 8192 * 750
    assert of().prefill(8192, rows, pairs) / 8192 == pytest.approx(23e-6, rel=0.25)


def test_experts_that_no_token_goes_to_are_not_read() -> None:
    sizes = replace(SIZES, values=29 * 10**9, share=2.75 / 29)
    fixed = of(sizes=replace(sizes, values=0, head=0)).decode(1, 0)
    one, many = ((of(sizes=sizes).decode(rows, 0) - fixed) for rows in (1, 64))
    assert one / many == pytest.approx(2.75 / 29, rel=0.02)
    in_mxfp4 = of(sizes=replace(sizes, value_bytes=17 / 32)).decode(1, 0) - fixed
    assert in_mxfp4 / one == pytest.approx(17 / 64, rel=0.02)


def test_a_cpu_computes_sixteen_tokens_for_one() -> None:
    cost = StepCost(replace(SIZES, dtype=torch.float32), CPU)
    one, sixteen, many = (cost.decode(rows, 0) for rows in (1, 16, 64))
    assert one == pytest.approx(sixteen, rel=0.01)
    assert many == pytest.approx(4 * one, rel=0.1)


def test_what_is_not_known_is_a_range_with_its_assumptions() -> None:
    found = forecast(of(), WORK)
    assert ordered(found.seconds) and ordered(found.generated_tokens)
    assert found.generated_tokens.bound == 40_000
    assert found.generated_tokens.low == pytest.approx(found.generated_tokens.likely / 2, rel=0.05)
    assert found.prompt_tokens == 5000
    assert "by published figures" in found.assumptions[0]
    assert "nothing is known of the answers" in found.assumptions[1]
    assert found.seconds.likely > found.start_s


@pytest.mark.parametrize(
    ("longest", "share"), [(8, 0.9), (32, 0.9), (128, 0.7), (512, 0.5), (64_000, 0.5)]
)
def test_short_limits_are_reached_by_more_answers(longest: int, share: float) -> None:
    assert likely_share(longest) == pytest.approx(share)
    found = forecast(of(), replace(WORK, longest=longest))
    assert found.generated_tokens.likely == pytest.approx(share * longest * 100, rel=0.1)


def test_answers_of_known_length_have_no_range() -> None:
    found = forecast(of(), replace(WORK, exact=True))
    assert found.generated_tokens == Range(40_000, 40_000, 40_000)
    assert "ignore_eos" in found.assumptions[1]


def run(factor: float, answers: np.ndarray) -> Calibration:
    """What a run of WORK's rows shows on a device that takes `factor` times what the model says."""
    cost = replace(of(), factor=factor)
    seconds, steps = run_time(cost, WORK, answers, 100)
    counts = {
        "seconds": seconds,
        "rows": 100,
        "generated": int(answers.sum()) + 100,
        "prefill_steps": 2,
        "prefill_tokens": 5000,
        "decode_steps": round(steps),
        "decode_rows": int(answers.sum()),
    }
    return Calibration("an earlier job", WORK.prompts, answers, counts, start_s=7.0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_an_earlier_run_corrects_speed_and_lengths(factor: float) -> None:
    answers = np.random.default_rng(0).integers(1, 200, 100)
    found = forecast(of(), replace(WORK, seen=run(factor, answers)))
    truth, _ = run_time(replace(of(), factor=factor), WORK, answers, 100)
    assert found.generated_tokens.likely == answers.sum()
    assert found.seconds.likely == pytest.approx(truth + 7, rel=0.15)
    assert found.start_s == 7.0
    assert "an earlier job" in found.assumptions[0] and "an earlier job" in found.assumptions[1]


def test_a_run_of_another_device_shows_lengths_only() -> None:
    answers = np.full(100, 20)
    seen = replace(run(1.0, answers), counts=None, start_s=None)
    found = forecast(of(), replace(WORK, seen=seen))
    assert "by published figures" in found.assumptions[0]
    assert found.generated_tokens.likely == 2000


def test_a_few_answers_do_not_say_all() -> None:
    draws = np.random.default_rng(0).integers(1, 200, 100)
    few, many = (
        forecast(
            of(), replace(WORK, seen=replace(run(1.0, draws), answers=draws[:number]))
        ).generated_tokens
        for number in (4, 100)
    )
    assert few.low / few.likely < many.low / many.likely


def test_forwards_that_yield_several_tokens_are_a_range_until_they_were_seen() -> None:
    blocks = forecast(of(), replace(WORK, width=4, min_width=0, exact=True))
    drafts = forecast(of(), replace(WORK, width=4, min_width=1, exact=True))
    for found in (blocks, drafts):
        assert found.seconds.low < found.seconds.likely < found.seconds.bound
        assert "tokens per forward" in found.assumptions[2]
    assert blocks.seconds.bound > drafts.seconds.bound  # a block's commit is a forward too


def test_a_job_of_millions_of_rows_is_as_quick_to_plan() -> None:
    small, large = (
        forecast(of(), replace(WORK, answers=Range.exactly(rows))) for rows in (10**4, 10**7)
    )
    ratio = (large.seconds.likely - large.start_s) / (small.seconds.likely - small.start_s)
    assert ratio == pytest.approx(1000, rel=0.05)
