"""Rows with images: equal to transformers, and equal to themselves however an engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.caches.forward_context import ImagePlanes
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.scheduled_batch import PrefillBatch
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.image_store import ImageStore
from batchgen.engine.strategy import Strategy
from batchgen.engine.vision.image import Image
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.engine.constrained_rows import END, WIDTH, compiler, make_tokenizer
from tests.support.engine.engine_rows import expect_short_rows
from tests.support.engine.vision_models import (
    IMAGE,
    KINDS,
    RULES,
    SIDE,
    image_of,
    mtp_folder,
    picture,
    picture_for,
    prompt,
    their_logits,
    vision_folder,
)

CPU = torch.device("cpu")
SMALL, WIDE, TALL = picture(1, 2, 3), picture(2, 1, 7), picture(3, 5, 4)
GREEDY = RequestParams(temperature=0, max_new_tokens=8, logprobs=True)
DRAWN = RequestParams(temperature=0.9, seed=7, max_new_tokens=8, logprobs=True)
PENALISED = replace(DRAWN, repetition_penalty=1.4, presence_penalty=0.3, top_k=40)


class Row(NamedTuple):
    ids: list[int]
    images: list[Image]
    params: RequestParams = GREEDY


def rows_with(small: Image, wide: Image, tall: Image) -> list[Row]:
    both = tokens_of(small) + tokens_of(wide)
    return [
        Row([5, 6, 7, 8, 9], []),
        Row(prompt([1, 2], small, [7, 8]), [small]),
        Row(prompt([1, 2], small, [9], wide, tall, [3]), [small, wide, tall], DRAWN),
        Row(prompt([1, 2, 3], small, [7, 8]), [small], PENALISED),
        Row([*both, 4, 4], [small, wide]),  # without a token before, between or behind
        Row(prompt([4], tall)[:-1], [tall], DRAWN),  # ends with an image
        *[Row(prompt([6], tall, [5, 6, 7]), [tall], replace(DRAWN, seed=i)) for i in range(4)],
    ]


def tokens_of(image: Image) -> list[int]:
    return [IMAGE] * RULES.num_tokens(image.height, image.width)


ROWS = rows_with(SMALL, WIDE, TALL)
GEMMAS = ("gemma3", "gemma4_small", "gemma4")
SQUARE_ROWS = rows_with(*(picture_for("gemma3", seed, 1, 1) for seed in (1, 2, 3)))
"""Rows with images of the only size that Gemma 3 takes."""


def rows_of(kind: str) -> list[Row]:
    return SQUARE_ROWS if kind == "gemma3" else ROWS


@cache
def model_of(kind: str) -> CausalLM:
    if kind == "mtp":
        return load_model(mtp_folder(), device=CPU, heads=("mtp",), vision=True)
    return load_model(vision_folder(kind), device=CPU, vision=True)


def engine_of(kind: str, strategy: Strategy | None = None, **config: Any) -> LLMEngine:
    values = {"max_model_len": 128, "kv_cache_gib": 0.02, "max_num_seqs": 12, "image_tokens": 21}
    settled = EngineConfig(**values | config)
    return LLMEngine(model_of(kind), None, (), strategy or ARStrategy(), settled)


def run(engine: LLMEngine, rows: Sequence[Row]) -> list[RequestOutput]:
    for i, row in enumerate(rows):
        engine.add_request(str(i), row.ids, row.params, images=row.images)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
        engine.scheduler.block_manager.check_integrity(engine.scheduler.running.rows)
    assert engine.images is not None and len(engine.images) == 0
    assert engine.scheduler.block_manager.usage == 0
    return [found[str(i)] for i in range(len(rows))]


@cache
def alone(kind: str) -> list[RequestOutput]:
    """What each of the rows says in an engine of its own time."""
    engine = engine_of(kind, prefix_caching=False)
    return [run(engine, [row])[0] for row in rows_of(kind)]


def check(kind: str, found: Sequence[RequestOutput]) -> None:
    """Tokens and log-probabilities are those of the rows alone, to the bit."""
    for i, (expected, output) in enumerate(zip(alone(kind), found, strict=True)):
        assert output.token_ids == expected.token_ids, f"row {i}"
        np.testing.assert_array_equal(output.columns["logprobs"], expected.columns["logprobs"])


@pytest.mark.quick(2, thorough=3)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_equal_transformers(kind: str) -> None:
    """Rows with 0, 1 and 3 images in one batch, images beside each other, text before and after."""
    rows = [row._replace(params=GREEDY) for row in rows_of(kind)[:3]]
    for row, output in zip(rows, run(engine_of(kind), rows), strict=True):
        logits = their_logits(kind, row.ids + output.token_ids, row.images)
        logprobs = logits[len(row.ids) - 1 : -1].log_softmax(-1)
        best = logprobs.clone()
        best[:, list(RULES.never_sampled)] = -torch.inf
        assert output.token_ids == best.argmax(-1).tolist()
        torch.testing.assert_close(
            torch.tensor(output.columns["logprobs"]), best.max(-1).values, atol=2e-4, rtol=2e-4
        )


WAYS: dict[str, dict[str, Any]] = {
    "beside others": {},
    "without prefixes": {"prefix_caching": False},
    "in chunks of 5": {"max_batched_tokens": 5, "prefix_caching": False},
    "in chunks of 5, with prefixes": {"max_batched_tokens": 5, "block_size": 2},
    "with few image tokens": {"image_tokens": 20, "block_size": 4, "max_num_seqs": 3},
    "beside decoding rows": {"chunk_tokens": 4, "max_num_seqs": 4},
    "with overlap": {"overlap": True, "block_size": 8},
}


WHOLE = pytest.param({}, marks=pytest.mark.slow)
"""No options of the engine besides those of all tests."""
SLOW_WAYS = ("without prefixes", "in chunks of 5", "beside decoding rows")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.slow] * (w in SLOW_WAYS)) for w in WAYS]
)
def test_bits_do_not_depend_on_the_schedule(way: str) -> None:
    check("qwen3_vl", run(engine_of("qwen3_vl", **WAYS[way]), ROWS))


@pytest.mark.quick(0, thorough=2)
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_5", "qwen2_5_vl", "gemma4_small", "gemma3"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if "moe" in kind),
    ],
)
def test_bits_of_other_models(kind: str) -> None:
    chunks: dict[str, Any] = {} if kind == "qwen3_vl_moe" else {"max_batched_tokens": 64}
    if kind == "gemma3":
        chunks = {"max_batched_tokens": 19}
    check(kind, run(engine_of(kind, block_size=4, **chunks), rows_of(kind)))


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma4_small"])
def test_planes_of_captured_graphs_keep_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read features from planes with a place for each token."""
    features_of = ImageStore.features

    def planes_of(store: ImageStore, batch: PrefillBatch) -> ImagePlanes:
        tokens, tower = sum(batch.lengths), store._tower
        values = torch.full((tower.planes, tokens, tower.config.out_size), float("nan"))
        planes = ImagePlanes(torch.ones((tokens, 1), dtype=torch.bool), values)
        planes.fill(features_of(store, batch))
        return planes

    monkeypatch.setattr(ImageStore, "features", planes_of)
    check(kind, run(engine_of(kind, max_batched_tokens=20), rows_of(kind)))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "way",
    [
        {"max_batched_tokens": 21, "block_size": 2},
        {"chunk_tokens": 4, "max_num_seqs": 4, "block_size": 4},
        {"max_batched_tokens": 23, "prefix_caching": False, "image_tokens": 20},
    ],
    ids=str,
)
def test_images_that_see_themselves_are_read_in_one_step(way: dict[str, Any]) -> None:
    """Chunks end at their borders, those of images beside each other too; prefixes may end inside,
    and their digests cover what the tokens see. The chunk of an image may be larger than others."""
    check("gemma4", run(engine_of("gemma4", **way), ROWS))


def test_prefixes_that_end_before_an_image_beside_another() -> None:
    """Tokens of the first image see the second one, so two rows with another second one share no
    block of the first."""
    rows = [Row([*[IMAGE] * 13, 4], [SMALL, picture(seed, 1, 7)]) for seed in (2, 9)]
    engine = engine_of("gemma4", block_size=2)
    found = [run(engine, [row])[0] for row in rows]
    apart = engine_of("gemma4", prefix_caching=False)
    for row, output in zip(rows, found, strict=True):
        (expected,) = run(apart, [row])
        np.testing.assert_array_equal(output.columns["logprobs"], expected.columns["logprobs"])
    assert engine.stats.cached_tokens == 0


def test_an_image_that_no_step_has_room_for_is_an_error() -> None:
    engine = engine_of("gemma4", max_batched_tokens=19)
    with pytest.raises(RequestError, match=r"take 20 tokens, .* has room for 19") as caught:
        engine.add_request("row", prompt([1], TALL), GREEDY, images=[TALL])
    assert caught.value.type == "image_too_large"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_preempted_rows_encode_their_images_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_short_rows(monkeypatch)
    per_token = 3 * 2 * 2 * 16 * 4 if kind == "qwen3_vl" else 2 * 2 * 16 * 4
    engine = engine_of(
        kind, kv_cache_gib=66 * per_token / 2**30, block_size=1, prefix_caching=False,
        max_model_len=64,
    )  # fmt: skip
    found = run(engine, ROWS)
    check(kind, found)
    preempted = [i for i, output in enumerate(found) if output.num_preemptions]
    assert any(ROWS[i].images for i in preempted)


def test_a_shared_prefix_is_looked_up_before_images_are_encoded() -> None:
    engine = engine_of("qwen3_vl", block_size=2)
    row = Row(prompt([1, 2], SMALL, TALL, [5, 6]), [SMALL, TALL])
    run(engine, [row] * 3)
    assert engine.stats.images == 2
    run(engine, [row])
    assert engine.stats.images == 2 and engine.stats.cached_tokens
    half = Row(prompt([1, 2], SMALL, WIDE, [5, 6]), [SMALL, WIDE])
    run(engine, [half])
    assert engine.stats.images == 3 and engine.stats.image_tokens == 6 + 20 + 7
    assert engine.stats.image_seconds > 0


def small_rows(count: int) -> list[Row]:
    """Rows with an image of 6 tokens each, no two alike."""
    images = [picture(100 + i, 2, 3) for i in range(count)]
    return [Row(prompt([1, i + 2], image, [5]), [image]) for i, image in enumerate(images)]


def groups_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images in each call of the model's tower from now on."""
    groups: list[int] = []
    tower = model_of(kind).visual
    assert tower is not None
    forward = tower.forward

    def counted(images: Sequence[torch.Tensor]) -> torch.Tensor:
        groups.append(len(images))
        return forward(images)

    monkeypatch.setattr(tower, "forward", counted)
    return groups


def test_images_of_waiting_rows_are_encoded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit, so that two rows at a time need few calls of the tower; each keeps its
    bits."""
    rows = small_rows(8)
    expected = [run(engine_of("qwen3_vl"), [row])[0] for row in rows]
    engine = engine_of("qwen3_vl", max_num_seqs=2)
    groups = groups_of("qwen3_vl", monkeypatch)
    found = run(engine, rows)
    assert groups == [3, 2, 2, 1]  # an image that waits takes the place of another
    assert engine.stats.images == 8 and engine.stats.image_tokens == 48
    for output, other in zip(found, expected, strict=True):
        assert output.token_ids == other.token_ids
        np.testing.assert_array_equal(output.columns["logprobs"], other.columns["logprobs"])


def test_a_waiting_row_that_leaves_takes_its_images_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen3_vl", max_num_seqs=1)
    groups = groups_of("qwen3_vl", monkeypatch)
    for i, row in enumerate(small_rows(3)):
        engine.add_request(i, row.ids, row.params, images=row.images)
    engine.step()
    assert groups == [3] and engine.images is not None and len(engine.images) == 2
    engine.abort(1)
    assert len(engine.images) == 1
    while engine.has_unfinished():
        engine.step()
    assert groups == [3] and len(engine.images) == 0


def test_an_image_ahead_that_cannot_be_decoded_waits_for_its_row() -> None:
    def broken() -> Any:
        raise RequestError("image_unreadable", "the file is cut off")

    rows = small_rows(4)
    (image,) = rows[1].images
    rows[1] = rows[1]._replace(images=[Image(broken, image.height, image.width, bytes(32))])
    found = run(engine_of("qwen3_vl", max_num_seqs=1), rows)
    assert [output.finish_reason for output in found] == ["length", "error", "length", "length"]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param("qwen3_vl", {}, marks=pytest.mark.slow),
        ("qwen3_vl", {"max_batched_tokens": 5, "block_size": 2}),
        ("gemma3", {"block_size": 2}),
        ("gemma4", {"block_size": 2}),
    ],
    ids=str,
)
def test_drafts_of_ngrams(kind: str, way: dict[str, Any]) -> None:
    strategy = ARSpecStrategy("ngram", adaptive=False, ngram_min=1, ngram_pool=True)
    check(kind, run(engine_of(kind, strategy, **way), rows_of(kind)))
    assert not (strategy.step_inputs.store.tokens == IMAGE).any()


@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in GEMMAS)]
)
def test_drafts_of_a_model_that_sees_only_tokens(kind: str) -> None:
    """Models with windows draft for no long rows, so that another family drafts for Gemma."""
    target, draft = model_of(kind), load_model(vision_folder("qwen3_vl"), device=CPU)
    config = EngineConfig(max_model_len=128, kv_cache_gib=0.02, image_tokens=21)
    strategy = ARSpecStrategy("draft", adaptive=False, draft_model="draft")
    engine = LLMEngine(target, None, (), strategy, config, others={"draft": draft})
    found = run(engine, rows_of(kind))
    check(kind, found)
    accepted = sum(output.counts["num_accepted_tokens"] for output in found)
    assert accepted or kind != "qwen3_vl"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way",
    [WHOLE, {"max_batched_tokens": 64, "block_size": 4}],
    ids=str,
)
def test_drafts_of_a_head(way: dict[str, Any]) -> None:
    engine = engine_of("mtp", ARSpecStrategy("mtp", adaptive=False), **way)
    found = run(engine, ROWS)
    check("mtp", found)
    assert sum(output.counts["num_accepted_tokens"] for output in found) > 0


@pytest.mark.thorough
def test_constraints_and_scored_answers() -> None:
    """In chunks that cut images, with prefixes and with drafts, and the tokens as given answers."""
    way = {"max_batched_tokens": 5, "block_size": 2}
    model = load_model(vision_folder("qwen3_vl", WIDTH), device=CPU, vision=True)
    values: dict[str, Any] = {"max_model_len": 128, "kv_cache_gib": 0.02, "image_tokens": 21}

    def engine(strategy: Strategy, more: dict[str, Any]) -> LLMEngine:
        config = EngineConfig(**values | more)
        return LLMEngine(model, make_tokenizer(), (END,), strategy, config, compiler=compiler())

    held = replace(DRAWN, constraint=Constraint("regex", "[a-d]{2,6}"), max_new_tokens=9)
    rows = [row._replace(params=held) for row in ROWS[:4]]
    plain = engine(ARStrategy(), {"prefix_caching": False})
    expected = [run(plain, [row])[0] for row in rows]
    assert all(output.constraint_satisfied for output in expected)
    drafts = ARSpecStrategy("ngram", adaptive=False, ngram_min=1)
    for strategy in (ARStrategy(), drafts):
        for ours, output in zip(run(engine(strategy, way), rows), expected, strict=True):
            assert ours.token_ids == output.token_ids
            np.testing.assert_array_equal(ours.columns["logprobs"], output.columns["logprobs"])
    scorer = engine(ARStrategy(), way)
    scored = RequestParams(max_new_tokens=0, logprobs=True)
    for i, row in enumerate(rows):
        answer = expected[i].token_ids
        scorer.add_request(str(i), row.ids, scored, answer, row.images)
    found: dict[str, RequestOutput] = {}
    while scorer.has_unfinished():
        found |= {output.request_id: output for output in scorer.step()}
    for i, output in enumerate(expected):
        np.testing.assert_array_equal(
            found[str(i)].columns["answer_logprobs"], output.columns["logprobs"]
        )


def test_wrong_images_are_named() -> None:
    engine = engine_of("qwen3_vl")
    cases: list[tuple[str, list[int], list[Image]]] = [
        ("image_mismatch", prompt([1], SMALL), []),
        ("image_mismatch", [1, 2], [SMALL]),
        ("image_mismatch", prompt([1], SMALL), [TALL]),
        ("image_too_large", prompt([1], picture(4, 2, 11)), [picture(4, 2, 11)]),
    ]
    for kind, ids, images in cases:
        with pytest.raises(RequestError) as caught:
            engine.add_request("row", ids, GREEDY, images=images)
        assert caught.value.type == kind
    with pytest.raises(RequestError, match="image tokens, which have no image"):
        engine.add_request("row", [1], replace(GREEDY, max_new_tokens=0), [IMAGE])
    text = load_model(vision_folder("qwen3_vl"), device=CPU)
    plain = LLMEngine(text, None, (), ARStrategy(), EngineConfig(max_model_len=64))
    with pytest.raises(RequestError) as caught:
        plain.add_request("row", prompt([1], SMALL), GREEDY, images=[SMALL])
    assert caught.value.type == "images_unsupported"


@pytest.mark.parametrize("way", [WHOLE, {"max_batched_tokens": 5}], ids=str)
def test_an_image_that_cannot_be_decoded_ends_its_row(way: dict[str, Any]) -> None:
    def broken() -> Any:
        raise RequestError("image_unreadable", "the file is cut off")

    bad = Image(broken, TALL.height, TALL.width, bytes(32))
    rows = [*ROWS]
    rows[2] = Row(prompt([1, 2], SMALL, [9], bad), [SMALL, bad])
    found = run(engine_of("qwen3_vl", **way), rows)
    assert found[2].finish_reason == "error" and found[2].error is not None
    assert found[2].error.type == "image_unreadable" and not found[2].token_ids
    for i in set(range(len(rows))) - {2}:
        assert found[i].token_ids == alone("qwen3_vl")[i].token_ids


@pytest.mark.thorough
def test_image_tokens_are_never_sampled() -> None:
    params = replace(DRAWN, temperature=50.0, max_new_tokens=100, seed=3)
    rows = [Row([1, 2], [], params), Row(prompt([1], SMALL), [SMALL], params)]
    for output in run(engine_of("qwen3_vl"), rows):
        assert not set(output.token_ids) & set(RULES.never_sampled)
        assert len(set(output.token_ids)) > 40


_NEAR: list[Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = [
    lambda pixels: pixels,
    lambda pixels: pixels.reshape(pixels.shape[1], pixels.shape[0], 3),
    lambda pixels: pixels ^ (np.arange(pixels.size).reshape(pixels.shape) == 5),
    lambda pixels: np.roll(pixels, 1, 1),
]
"""An image, its bytes in another size, one pixel of it changed, and all of them moved."""


@settings(max_examples=max(2, settings().max_examples // 10))
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([(), (4,), (4, 4, 4, 4)]), st.booleans()),
        min_size=2,
        max_size=4,
    )
)
def test_images_are_never_mixed_up(drawn: list[tuple[int, tuple[int, ...], bool]]) -> None:
    """Two that differ in one pixel, two sizes of one, and one at another place, with prefixes."""
    base = np.asarray(SMALL.load())
    rows = []
    for near, before, twice in drawn:
        images = [image_of(np.ascontiguousarray(_NEAR[near](base)).astype(np.uint8))]
        images += [SMALL] if twice else []
        rows.append(Row(prompt([9, *before], *images, [9, 4]), images))
    mixed = run(_sharing(), rows)
    for row, output in zip(rows, mixed, strict=True):
        (expected,) = run(_apart(), [row])
        assert output.token_ids == expected.token_ids
        np.testing.assert_array_equal(output.columns["logprobs"], expected.columns["logprobs"])


@cache
def _sharing() -> LLMEngine:
    return engine_of("qwen3_vl", block_size=2)


@cache
def _apart() -> LLMEngine:
    return engine_of("qwen3_vl", prefix_caching=False)


def test_sides_of_the_models() -> None:
    vision = model_of("qwen3_vl").config.vision
    assert vision is not None and vision.rules == RULES and RULES.pixels_per_token == SIDE


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_a_gpu(kind: str) -> None:
    """With CUDA graphs, overlap, chunks beside decoding rows, and images in the middle of them."""
    expected = alone(kind)
    model = load_model(vision_folder(kind), device=torch.device("cuda"), vision=True)
    values: dict[str, Any] = {"max_model_len": 128, "kv_cache_gib": 0.02, "max_num_seqs": 12}
    for chunks in (0, 64):
        config = EngineConfig(**values, image_tokens=21, chunk_tokens=chunks)
        found = run(LLMEngine(model, None, (), ARStrategy(), config), rows_of(kind) * 3)
        for i, output in enumerate(found):
            assert output.token_ids == expected[i % len(expected)].token_ids, f"row {i}"
