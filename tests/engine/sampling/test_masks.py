"""What constraints leave to the sampler: a mask is as if the model excluded the tokens."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.interface.outputs import HostCopy, StepOutput
from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import (
    Drawn,
    draw_fused,
    draw_tokens,
    sample_fused,
    sample_tokens,
)
from batchgen.engine.sampling.sampler_columns import requested_columns
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling import sampling as kernels
from batchgen.kernels.sampling.token_mask import TokenMask
from tests.support.cases import some_slow
from tests.support.engine.sampled_rows import (
    CPU,
    INF,
    OPTIONS,
    OUTPUT,
    POSITION,
    STOP_IDS,
    any_params,
    build,
    mixed_params,
    numbers,
    row_of,
)

Draw = Callable[..., Drawn]
BOTH = pytest.mark.parametrize("run", [draw_tokens, draw_fused])


def mask_of(
    allowed: torch.Tensor, constrained: torch.Tensor | None = None, device: torch.device = CPU
) -> TokenMask:
    """A line of bits for each row of allowed [R, V], of which only constrained rows have one."""
    rows, vocab = allowed.shape
    bits = np.zeros((rows, -(-vocab // 32) * 32), dtype=np.bool_)
    bits[:, :vocab] = allowed.numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    lines = torch.arange(rows, dtype=torch.int32)
    if constrained is not None:
        lines = torch.where(constrained, lines, -1)
    return TokenMask(torch.from_numpy(words).to(device), lines.to(device))


def drawn_by(
    run: Draw,
    logits: torch.Tensor,
    params: Sequence[RequestParams],
    mask: TokenMask | None = None,
) -> Drawn:
    """On a GPU, if there is one, for the kernels; always on the CPU for the reference."""
    device = torch.device("cuda" if run is draw_fused and torch.cuda.is_available() else "cpu")
    if mask is not None:
        mask = TokenMask(mask.bits.to(device), mask.lines.to(device))
    positions = torch.full((len(params),), POSITION, device=device)
    out = run(
        logits.to(device), build(params, device=device), positions, confidence=True, mask=mask
    )
    assert out.confidence is not None
    return Drawn(
        out.token_ids.cpu(),
        out.failed.cpu(),
        {name: values.cpu() for name, values in out.columns.items()},
        out.confidence.cpu(),
        None if out.conflict is None else out.conflict.cpu(),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "penalised", "run"),
    some_slow(
        itertools.product(
            [torch.float32, torch.bfloat16], [True, False], [draw_tokens, draw_fused]
        ),
        quick=[
            (torch.float32, True, draw_tokens),
            (torch.float32, True, draw_fused),
            (torch.bfloat16, False, draw_tokens),
        ],
    ),
)
def test_a_mask_is_as_if_the_model_excluded_the_tokens(
    run: Draw, dtype: torch.dtype, penalised: bool
) -> None:
    params = mixed_params()[: len(OPTIONS)]
    if not penalised:  # the mask then is the first to make a copy
        params = [p for p in params if not (p.has_penalties or p.min_new_tokens)]
    count, vocab = len(params), 301
    rng = np.random.default_rng(5)
    logits = (numbers(count, vocab, seed=11) * 3).to(dtype)
    density = rng.choice([0.02, 0.6], (count, 1))
    allowed = torch.from_numpy(rng.random((count, vocab)) < density)
    allowed[:, 40] = True
    constrained = torch.arange(count) % 5 > 0
    excluded = logits.masked_fill(~allowed & constrained.unsqueeze(1), -INF)
    before = logits.clone()
    found = drawn_by(run, logits, params, mask_of(allowed, constrained))
    assert torch.equal(logits, before), "the model's logits are not written to"
    expected = drawn_by(run, excluded, params)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert found.confidence is not None and expected.confidence is not None
    assert torch.equal(found.confidence, expected.confidence)
    assert expected.conflict is None and found.conflict is not None
    assert not found.conflict.any() and not found.failed.any()
    # Raw log-probabilities are the model's own, processed ones those of what the mask left.
    raw = kernels.logprobs_of(logits, found.token_ids)
    ids, values = kernels.top_logprobs(logits, 40)
    own = {"logprobs": raw, "top_logprob_ids": ids, "top_logprobs": values}
    for i, p in enumerate(params):
        wanted = expected.columns if p.logprobs_mode == "processed" else own
        for column in requested_columns(p):
            tail = tuple(slice(n) for n in column.tail_shape)
            torch.testing.assert_close(
                found.columns[column.name][i][tail],
                wanted[column.name][i][tail],
                rtol=1e-5,
                atol=2e-5,
            )


def test_the_processed_law_is_renormalised_and_never_the_models_own_tensor() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]] * 2)
    allowed = torch.tensor([[True, False, True, False]] * 2)
    mask = mask_of(allowed, torch.tensor([True, False]))
    law = process(logits, build([RequestParams()] * 2), torch.tensor([9, 9]), mask=mask)
    assert law.tolist() == [[1.0, -INF, 2.0, -INF], [1.0, 4.0, 2.0, 3.0]]
    assert logits[0, 1] == 4.0
    narrow = build([RequestParams(top_k=1), RequestParams(top_p=0.01)])
    law = process(logits, narrow, torch.tensor([9, 9]), mask=mask_of(allowed))
    assert (law > -INF).tolist() == [[False, False, True, False]] * 2, "filters come after the mask"
    asks = RequestParams(logprobs=True, logprobs_mode="processed", seed=3)
    step = sample_tokens(logits[:1], build([asks]), torch.tensor([9]), mask=mask_of(allowed[:1]))
    values = logits[0].masked_fill(~allowed[0], -INF).log_softmax(0)
    torch.testing.assert_close(step.columns["logprobs"][0], values[step.token_ids[0]])


@pytest.mark.thorough
@pytest.mark.parametrize("run", [sample_tokens, sample_fused])
def test_rows_whose_mask_leaves_nothing_are_in_conflict_and_others_as_without_them(
    run: Callable[..., StepOutput],
) -> None:
    params = mixed_params()[: len(OPTIONS)]
    count, vocab = len(params), 301
    device = torch.device("cuda" if run is sample_fused and torch.cuda.is_available() else "cpu")
    logits = numbers(count, vocab, seed=12) * 3
    allowed = torch.from_numpy(np.random.default_rng(6).random((count, vocab)) < 0.3)
    allowed[:, 40:42] = True
    constrained = torch.ones(count, dtype=torch.bool)
    constrained[::4] = False
    positions, sampling = (
        torch.full((count,), POSITION, device=device),
        build(params, device=device),
    )

    def step_of(logits: torch.Tensor, allowed: torch.Tensor) -> StepOutput:
        mask = mask_of(allowed, constrained, device)
        return run(logits.to(device), sampling, positions, mask=mask)

    expected = step_of(logits, allowed)
    some, none = torch.arange(count) % 2 == 1, allowed.clone()
    none[some & (torch.arange(count) > 4)] = False
    broken = logits.clone()
    broken[1, allowed[1]] = -INF  # allowed, but not by the model
    broken[2, ~allowed[2]] = float("nan")  # not allowed, but no numbers
    broken[4, 7] = float("nan")
    broken[7, 7] = INF
    broken[9] = -INF
    step = step_of(broken, none)
    failed, conflict = {2, 4, 7, 9}, set(range(1, count, 2)) - {3, 7, 9}
    assert set(step.failed.nonzero().flatten().tolist()) == failed
    assert step.conflicts is not None
    assert set(step.conflicts.nonzero().flatten().tolist()) == conflict
    assert ((step.token_ids >= 0) & (step.token_ids < vocab)).all(), "the next forward reads them"
    for i, p in enumerate(params):
        assert step.num_tokens[i].item() == (i not in failed | conflict)
        if i not in failed | conflict:
            for name, values in row_of(expected, i, p).items():
                assert torch.equal(row_of(step, i, p)[name], values)


@BOTH
def test_a_ban_and_a_mask_that_leave_nothing_together_are_a_conflict(run: Draw) -> None:
    banned = RequestParams(temperature=0, min_new_tokens=4)
    params = [banned, replace(banned, min_new_tokens=3), banned, banned]
    logits = numbers(4, 40, seed=13)
    only_stops = torch.tensor(STOP_IDS)
    allowed = torch.zeros(4, 40, dtype=torch.bool)
    allowed[:, only_stops] = True
    allowed[2, 30] = True
    logits[3] = logits[3].masked_fill(~allowed[3], -INF)  # the ban is void here
    out = drawn_by(run, logits, params, mask_of(allowed))
    assert out.conflict is not None
    assert out.conflict.tolist() == [True, False, False, False]
    assert not out.failed.any()
    best = only_stops[logits[:, only_stops].argmax(1)]
    assert out.token_ids[1:].tolist() == [best[1], 30, best[3]]


def test_conflicts_reach_the_host_with_their_rows() -> None:
    allowed = torch.tensor([[True, False], [False, False], [False, True]])
    sampling, positions = build([RequestParams()] * 3, stop_ids=()), torch.full((3,), POSITION)
    step = sample_tokens(torch.zeros(3, 2), sampling, positions, mask=mask_of(allowed))
    host = HostCopy(step.index_select(np.array([2, 1]))).wait()
    assert host.conflicts is not None and host.conflicts.tolist() == [False, True]
    assert host.num_tokens.tolist() == [1, 0] and host.token_ids[0].tolist() == [1]
    assert set(host.columns) == set(step.columns)
    step = sample_tokens(torch.zeros(3, 2), sampling, positions)
    assert step.conflicts is None and step.index_select(np.array([0])).conflicts is None
    assert HostCopy(step).wait().conflicts is None


@pytest.mark.quick(1)
@BOTH
@given(
    st.lists(any_params, min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.02, 0.3, 0.9]),
)
@settings(max_examples=settings().max_examples // 10, deadline=None)
def test_any_masked_row_takes_an_allowed_token_or_is_in_conflict(
    run: Draw, params: list[RequestParams], seed: int, density: float
) -> None:
    rng, vocab = np.random.default_rng(seed), 45
    count = len(params)
    logits = torch.tensor(rng.normal(size=(count, vocab)) * 9).float()
    logits[torch.from_numpy(rng.random((count, vocab)) < 0.2)] = -INF
    logits[:, 44] = 0.0
    allowed = torch.from_numpy(rng.random((count, vocab)) < density)
    constrained = torch.from_numpy(rng.random(count) < 0.7)
    out = drawn_by(run, logits, params, mask_of(allowed, constrained))
    left = (logits > -INF) & (allowed | ~constrained.unsqueeze(1))
    banned = torch.tensor([p.min_new_tokens > len(OUTPUT) for p in params])
    for token in STOP_IDS:  # never void: token 44 is left to the ban
        left[:, token] &= ~banned
    assert out.conflict is not None
    assert out.conflict.tolist() == (~left.any(1)).tolist()
    taken = left.gather(1, out.token_ids.unsqueeze(1)).squeeze(1)
    assert (taken | out.conflict).all() and not out.failed.any()


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_nothing_waits_for_the_device(masked: bool) -> None:
    params = mixed_params()
    count, device = len(params), torch.device("cuda")
    logits = torch.randn(count, 500, dtype=torch.bfloat16, device=device)
    positions = torch.full((count,), POSITION, device=device)
    allowed = torch.from_numpy(np.random.default_rng(7).random((count, 500)) < 0.2)
    mask = mask_of(allowed, device=device) if masked else None
    for _ in range(2):  # kernels are compiled, and loaded, the first time
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampling = build(params, device=device)
            step = sample_tokens(logits, sampling, positions, mask=mask)
            sampling.append(step.token_ids, step.num_tokens, positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert step.columns["top_logprobs"].shape == (count, 1, 40)
