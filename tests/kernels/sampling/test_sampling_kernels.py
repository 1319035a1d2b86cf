"""The sampling operations against brute-force numpy, published vectors and Triton's Philox."""

import importlib.util
import runpy
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from batchgen.kernels.sampling import sampling as k
from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, philox_at

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
Array = npt.NDArray[np.float64]


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


# --- random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer vectors that Salmon et al. publish with Random123
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    seed = torch.tensor([signed(key[1] << 32 | key[0])])
    columns = torch.tensor([[4 * counter[0] + lane for lane in range(4)]])
    words = philox_at(seed, torch.tensor([counter[1]]), counter[2], counter[3], columns)
    assert words.tolist() == [list(expected)]


TRITON_PHILOX = """
import triton
import triton.language as tl

@triton.jit
def fill(seed_ptr, position_ptr, out_ptr, draw, stream, width: tl.constexpr):
    row = tl.program_id(0)
    c0 = tl.arange(0, width)
    position = tl.full((width,), 0, tl.int32) + tl.load(position_ptr + row).to(tl.int32)
    zeros = tl.full((width,), 0, tl.int32)
    a, b, c, d = tl.philox(tl.load(seed_ptr + row), c0, position, zeros + draw, zeros + stream)
    base = out_ptr + row * width * 4 + c0 * 4
    tl.store(base, a.to(tl.int64))
    tl.store(base + 1, b.to(tl.int64))
    tl.store(base + 2, c.to(tl.int64))
    tl.store(base + 3, d.to(tl.int64))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_philox_equals_tritons(tmp_path: Path) -> None:
    script = tmp_path / "fill.py"
    script.write_text(TRITON_PHILOX)
    seeds = torch.tensor([0, 1, -1, 2**40 + 17, -(2**63), 2**63 - 1, signed(0x9E3779B97F4A7C15)])
    positions = torch.tensor([0, 1, 2, 70_000, 131_071, 5, 2**31 - 1])
    out = torch.zeros(7, 256, dtype=torch.int64, device=DEVICE)
    fill = runpy.run_path(str(script))["fill"]
    fill[(7,)](seeds.to(DEVICE), positions.to(DEVICE), out, 3, 2, 64)
    assert torch.equal(out.cpu(), philox(seeds, positions, 3, 2, 256))


def test_philox_at_equals_philox_and_ignores_the_other_rows() -> None:
    seeds, positions = torch.tensor([5, -9, 2**50]), torch.tensor([0, 7, 70_001])
    full = philox(seeds, positions, 1, 2, 1001)
    assert full.shape == (3, 1001)
    assert full.min() >= 0 and full.max() < 2**32
    columns = torch.tensor([[0, 1, 2, 3, 1000], [4, 8, 12, 999, 999], [1000, 7, 7, 0, 513]])
    assert torch.equal(philox_at(seeds, positions, 1, 2, columns), full.gather(1, columns))
    assert torch.equal(philox(seeds[1:2], positions[1:2], 1, 2, 1001), full[1:2])


def test_every_part_of_the_key_matters() -> None:
    def words(seed: int, position: int, draw: int, stream: int) -> tuple[int, ...]:
        return tuple(
            philox(torch.tensor([seed]), torch.tensor([position]), draw, stream, 8)[0].tolist()
        )

    keys = [(1, 2, 3, 4), (2, 2, 3, 4), (1 + 2**32, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4)]
    keys += [(1, 2, 3, 5), (2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3)]
    assert len({words(*key) for key in keys}) == len(keys)


def test_words_are_uniform() -> None:
    words = philox(torch.arange(50), torch.arange(50) * 3, 0, 0, 4000)
    low, high = words & 0xFF, words >> 24
    for part in (low, high):
        counts = np.bincount(part.flatten().numpy(), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3


def test_gumbel_noise_follows_its_formula_everywhere() -> None:
    edges = [0, 1, 2, 2**22 - 1, 2**22, 2**22 + 1, 2**31, 2**32 - 2**12]
    spread = philox(torch.tensor([3]), torch.tensor([4]), 0, 0, 100_000)[0].clamp(max=2**32 - 2**12)
    words = torch.cat([torch.tensor(edges), spread])
    u = (words.double() + 0.5) * 2.0**-32
    exponential = -torch.log1p(-u)
    # Rounding 1 - u costs 2⁻²⁴ / (1 - u) of the exponential, which the series does not.
    rounding = torch.where(u < 2.0**-10, 0, 1 / ((1 - u) * exponential)) * 2.0**-24
    error = (gumbel_noise(words).double() + exponential.log()).abs()
    assert (error <= rounding + 3e-6).all()


def test_gumbel_noise_is_finite_and_resolves_its_upper_tail() -> None:
    words = torch.tensor([0, 1, 2, 3, 2**32 - 2, 2**32 - 1])
    noise = gumbel_noise(words)
    assert noise.isfinite().all()
    assert noise[0].item() == pytest.approx(33 * np.log(2), abs=1e-5)
    assert (noise[:4].diff() < 0).all(), "the largest values are distinct"
    assert (noise.diff() <= 0).all()


def test_gumbel_noise_has_the_gumbel_law() -> None:
    noise = gumbel_noise(philox(torch.arange(10), torch.zeros(10, dtype=torch.int64), 0, 0, 5000))
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3


# --- the draw -------------------------------------------------------------------------------------


def draws(logits: torch.Tensor, count: int, seed: int = 11) -> npt.NDArray[np.int64]:
    rows = logits.unsqueeze(0).expand(count, -1).contiguous()
    seeds = torch.full((count,), seed)
    greedy = torch.zeros(count, dtype=torch.bool)
    return k.sample(rows, seeds, torch.arange(count), greedy).numpy()


def assert_law(tokens: npt.NDArray[np.int64], probs: Array) -> None:
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0, "a token without probability was drawn"
    support = probs > 0
    if support.sum() > 1:
        assert stats.chisquare(counts[support], probs[support] * len(tokens)).pvalue > 1e-3


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    total: Array = weights / weights.sum()
    return total


def test_sample_draws_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 2.5, -INF, 1.0, -INF, 0.3])
    assert_law(draws(logits, 20_000), softmax(logits.double().numpy()))


def test_sample_finds_rare_tokens() -> None:
    logits = torch.tensor([0.0, -7.0, -8.0])
    assert_law(draws(logits, 200_000), softmax(logits.double().numpy()))


def test_sample_on_few_columns_equals_the_full_computation() -> None:
    rows, vocab = 60, 2003
    logits = numbers(rows, vocab) * 3
    for i in range(rows):  # 0, 1, 2, … tokens left, beyond the switch between the two ways
        logits[i, torch.from_numpy(np.random.default_rng(i).permutation(vocab)[4 * i :])] = -INF
    logits[30:40] = numbers(10, vocab, seed=5)
    seeds, positions = torch.arange(rows) - 30, torch.arange(rows) * 1000
    greedy = torch.arange(rows) % 7 == 3
    noise = gumbel_noise(philox(seeds, positions, 0, Stream.SAMPLE, vocab))
    expected = torch.where(greedy, logits.argmax(-1), (logits + noise).argmax(-1))
    assert expected[0] == 0, "a row without tokens has a defined result"
    assert torch.equal(k.sample(logits, seeds, positions, greedy), expected)
    for i in range(rows):
        one = slice(i, i + 1)
        alone = k.sample(logits[one], seeds[one], positions[one], greedy[one])
        assert alone.item() == expected[i].item()


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    zeros = torch.zeros(2, dtype=torch.int64)
    assert k.sample(logits, zeros, zeros, torch.ones(2, dtype=torch.bool)).tolist() == [1, 0]


# --- penalties, ban, temperature ------------------------------------------------------------------


def test_penalties_equal_a_loop_over_tokens() -> None:
    rng = np.random.default_rng(0)
    rows, vocab, width = 12, 17, 24
    logits = numbers(rows, vocab, seed=3) * 4
    logits[:, 5] = -INF
    lengths = rng.integers(1, width + 1, rows)
    lengths[4] = 0  # a row that keeps no history
    prompt_lens = np.minimum(rng.integers(1, 10, rows), np.maximum(lengths, 1))
    history = np.full((rows, width), -1)
    for i, length in enumerate(lengths):
        history[i, :length] = rng.integers(0, vocab, length)
    history[0, 0], history[1, 0] = 0, 3  # id 0 in and out of histories
    options = {
        "repetition": rng.uniform(0.5, 2, rows).astype(np.float32),
        "presence": rng.uniform(-2, 2, rows).astype(np.float32),
        "frequency": rng.uniform(-2, 2, rows).astype(np.float32),
    }
    expected = logits.double().numpy().copy()
    for i in range(rows):
        tokens = history[i, : lengths[i]]
        output = tokens[prompt_lens[i] :]
        for token in set(tokens.tolist()):
            value, rep = expected[i, token], options["repetition"][i]
            value = value / rep if value > 0 else value * rep
            value -= options["frequency"][i] * (output == token).sum()
            expected[i, token] = value - options["presence"][i] * (token in output)
    tensors = {name: torch.from_numpy(values) for name, values in options.items()}
    positions = torch.from_numpy(np.maximum(lengths, 1))
    for kept in np.flatnonzero(lengths):  # what is left there of rejected drafts
        history[kept, lengths[kept] :] = rng.integers(-3, 10**6, width - lengths[kept])
    out = k.apply_penalties(
        logits.clone(),
        logits,
        torch.from_numpy(history),
        positions,
        torch.from_numpy(prompt_lens),
        **tensors,
    )
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[4], logits[4])
    for i in range(rows):
        alone = k.apply_penalties(
            logits[i : i + 1].clone(),
            logits[i : i + 1],
            torch.from_numpy(history[i : i + 1, : max(1, lengths[i])]),
            positions[i : i + 1],
            torch.from_numpy(prompt_lens[i : i + 1]),
            **{name: values[i : i + 1] for name, values in tensors.items()},
        )
        assert torch.equal(alone[0], out[i])


def test_a_batch_without_histories_is_left_as_it_is() -> None:
    logits = numbers(2, 5)
    ones = torch.ones(2)
    none = torch.empty(2, 0, dtype=torch.int64)
    places = torch.ones(2, dtype=torch.int64)
    out = k.apply_penalties(logits.clone(), logits, none, places, places, ones, ones, ones)
    assert torch.equal(out, logits)


def test_ban_excludes_exactly_the_ids_of_banned_rows() -> None:
    logits = numbers(4, 6)
    logits[3] = torch.tensor([-INF, 1.0, -INF, 2.0, -INF, -INF])
    ids = torch.tensor([[0, 2, -1], [5, 99, -1], [1, 0, 2], [3, 1, -1]])
    banned = torch.tensor([True, True, False, True])
    expected = logits.clone()
    expected[0, [0, 2]] = -INF
    expected[1, 5] = -INF
    # Row 3 has nothing but banned tokens: its ban is void.
    assert torch.equal(k.apply_ban(logits.clone(), ids, banned), expected)


def test_temperature_divides_and_never_overflows() -> None:
    logits = numbers(4, 9) * 5
    logits[2] *= 1e37
    logits[:, 3] = -INF
    logits[3] = -INF
    temperature = torch.tensor([1.0, 0.5, 1e-5, 2.0])
    out = k.apply_temperature(logits.clone(), temperature)
    assert torch.equal(out[0], logits[0])
    torch.testing.assert_close(out[1].softmax(-1), (logits[1] / 0.5).softmax(-1))
    assert out[2].argmax() == logits[2].argmax()
    assert out[2].softmax(-1).max() == 1
    assert not out.isnan().any()
    assert (out[3] == -INF).all()


# --- filters --------------------------------------------------------------------------------------


def reference_filter(
    logits: Array, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.bool_]:
    """Which tokens stay, one at a time, or raises ValueError where rounding decides."""
    keep = np.isfinite(logits)
    if top_k:
        keep &= np.array([(logits > value).sum() < top_k for value in logits])
    if top_p < 1:
        probs = softmax(np.where(keep, logits, -INF))
        before = np.array([probs[logits > value].sum() for value in logits])
        if np.abs(before - top_p)[keep].min() < 1e-6:
            raise ValueError("top_p falls on a sum of probabilities")
        keep &= before < top_p
    if min_p > 0:
        ratio = np.exp(logits - logits.max())
        if min_p < 1 and np.abs(ratio - min_p)[keep].min() < 1e-6:
            raise ValueError("min_p falls on a ratio of probabilities")
        keep &= ratio >= min_p if min_p < 1 else logits == logits.max()
    return keep


def run_filter(
    logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]
) -> torch.Tensor:
    return k.filter_top_k_top_p_min_p(
        logits.clone(), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)
    )


logit = st.one_of(
    st.integers(-8, 8).map(lambda n: n / 2),  # many ties
    st.floats(-20, 20, width=32),
    st.just(-INF),
)
row = st.tuples(
    st.integers(0, 12),
    st.one_of(st.just(1.0), st.floats(2**-7, 1, width=32)),
    st.one_of(st.just(0.0), st.just(1.0), st.floats(2**-10, 1, width=32)),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[int, float, float]]]:
    rows, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    values = [draw(st.lists(logit, min_size=vocab, max_size=vocab)) for _ in range(rows)]
    logits = torch.tensor(values)
    assume(logits.isfinite().any(-1).all())
    return logits, [draw(row) for _ in range(rows)]


@given(batches())
@settings(deadline=None)
def test_filters_equal_the_definition(
    batch: tuple[torch.Tensor, list[tuple[int, float, float]]],
) -> None:
    logits, options = batch
    top_k, top_p, min_p = ([o[i] for o in options] for i in range(3))
    out = run_filter(logits, top_k, top_p, min_p)  # type: ignore[arg-type]
    for i, option in enumerate(options):
        kept = out[i] > -INF
        assert kept.any(), "a token is always left"
        assert kept[logits[i].argmax()], "the most likely one stays"
        assert torch.equal(out[i][kept], logits[i][kept])
        alone = run_filter(logits[i : i + 1], [option[0]], [option[1]], [option[2]])
        assert torch.equal(alone[0], out[i]), "other rows do not matter"
        if option == (0, 1.0, 0.0):
            assert torch.equal(out[i], logits[i])
        # top-k and min-p are idempotent; top-p is not: it renormalises.
        twice = run_filter(out[i : i + 1], [option[0]], [1.0], [option[2]])
        assert torch.equal(twice[0], out[i])
        try:
            expected = reference_filter(logits[i].double().numpy(), *option)
        except ValueError:
            continue
        assert kept.numpy().tolist() == expected.tolist()


def test_ties_with_the_last_kept_token_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]]).expand(3, -1)
    out = run_filter(logits, [2, 0, 0], [1.0, 0.8, 1.0], [0.0, 0.0, float(np.exp(-2)) * 0.999])
    for kept in out > -INF:
        assert kept.tolist() == [True, True, True, True, False]


def test_top_p_counts_only_what_top_k_left() -> None:
    # 0.4, 0.3, 0.2, 0.1: of the first two, 0.57 and 0.43; 0.55 is reached by the first alone.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(2, -1)
    kept = run_filter(logits, [2, 0], [0.55, 0.55], [0.0, 0.0]) > -INF
    assert kept.tolist() == [[True, False, False, False], [True, True, False, False]]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 1 - 2**-23])
def test_top_p_reaches_as_far_as_it_must(top_p: float) -> None:
    """Flat rows need more than the most likely tokens that are looked at first."""
    vocab = 5000
    logits = torch.stack([numbers(vocab) * s for s in (0.01, 1.0, 4.0, 20.0)])
    out = run_filter(logits, [0] * 4, [top_p] * 4, [0.0] * 4)
    probs = logits.double().softmax(-1)
    for i in range(4):
        kept = out[i] > -INF
        mass = probs[i][kept].sum()
        assert mass >= top_p - 1e-6, "what is kept reaches top_p"
        assert mass - probs[i][kept].min() < top_p + 1e-6, "and would not without its last token"
        assert probs[i][kept].min() > max([0.0, *probs[i][~kept].tolist()]), (
            "the kept are the likeliest"
        )
        assert torch.equal(run_filter(logits[i : i + 1], [0], [top_p], [0.0])[0], out[i])


# --- logprobs -------------------------------------------------------------------------------------


def test_logprobs_of_is_the_log_softmax_and_minus_infinity_outside_the_support() -> None:
    logits = numbers(5, 40).bfloat16()
    logits[:, 7] = -INF
    ids = torch.tensor([0, 7, 39, 7, 20])
    out = k.logprobs_of(logits, ids)
    expected = [softmax(r.double().numpy())[i] for r, i in zip(logits, ids, strict=True)]
    assert out.dtype == torch.float32
    assert out[[1, 3]].tolist() == [-INF, -INF]
    np.testing.assert_allclose(out.exp().numpy(), expected, rtol=1e-5)


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(logit, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    st.integers(1, 10),
)
@settings(deadline=None)
def test_top_logprobs_are_ordered_by_value_then_id(values: list[list[float]], size: int) -> None:
    logits = torch.tensor(values)
    assume(logits.isfinite().any(-1).all())
    ids, logprobs = k.top_logprobs(logits, size)
    assert ids.dtype == torch.int32 and logprobs.dtype == torch.float32
    assert ids.shape == logprobs.shape == (len(values), size)
    assert not logprobs.isnan().any()
    full = logits.log_softmax(-1)
    for i in range(len(values)):
        ranked = sorted((-value, column) for column, value in enumerate(full[i].tolist()))
        order = [column for value, column in ranked if value < INF][:size]
        assert ids[i].tolist() == order + [-1] * (size - len(order))
        assert logprobs[i].tolist() == full[i, order].tolist() + [-INF] * (size - len(order))
        more_ids, more = k.top_logprobs(logits[i : i + 1], size + 3)
        assert torch.equal(more_ids[0, :size], ids[i])
        assert torch.equal(more[0, :size], logprobs[i])


# --- the GPU path ---------------------------------------------------------------------------------


def every_operation(device: str) -> list[torch.Tensor]:
    rows, vocab = 6, 1000
    logits = (numbers(rows, vocab) * 4).to(device)
    ints = torch.arange(rows, device=device)
    history = torch.full((rows, 9), -1, dtype=torch.int64)
    history[1::2, :5] = torch.tensor([0, 7, 7, 3, 999])
    share = torch.tensor([1.0, 0.5, 0.9, 0.99, 1.0, 0.2], device=device)
    source = logits.clone()
    k.apply_penalties(logits, source, history.to(device), ints + 3, ints, share + 1, share, share)
    k.apply_ban(logits, history[:, :3].to(device), ints > 2)
    k.apply_temperature(logits, share)
    k.filter_top_k_top_p_min_p(logits, ints * 40, share, (1 - share) / 50)
    tokens = k.sample(logits, ints - 3, ints * 1000, ints == 2)
    ids, values = k.top_logprobs(logits, 7)
    return [logits, tokens, k.logprobs_of(logits, tokens), ids, values]


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    seeds, positions = torch.tensor([1, -5, 2**60]), torch.tensor([0, 9, 70_000])
    words = philox(seeds, positions, 0, 1, 5001)
    assert torch.equal(philox(seeds.cuda(), positions.cuda(), 0, 1, 5001).cpu(), words)
    for on_cuda, on_cpu in zip(every_operation("cuda"), every_operation("cpu"), strict=True):
        torch.testing.assert_close(on_cuda.cpu(), on_cpu)
