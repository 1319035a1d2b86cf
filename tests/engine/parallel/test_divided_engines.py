"""Engines whose weights are divided say what an undivided one says, whatever they run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image import Image
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.engine.constrained_rows import CONSTRAINTS, END, WIDTH
from tests.support.engine.engine_rows import Pictured, Request
from tests.support.engine.qwen_mtp import TheirHead
from tests.support.engine.ranked_engines import Case, run_divided
from tests.support.engine.tiny_models import CLASSES
from tests.support.engine.vision_models import picture_for, prompt, vision_folder

TinyModel = Callable[..., Path]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": True},
    {"temperature": 0.8, "top_k": 20, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": True},
    {"temperature": 0.7, "min_p": 0.02, "logprobs": True, "logprobs_mode": "processed"},
)


def rows(count: int, *, tokens: int = 12, vocab: int = 120, **params: Any) -> list[Request]:
    """Rows of mixed options, some of which begin alike."""
    rng = random.Random(count)
    common = [rng.randrange(3, vocab) for _ in range(40)]
    made: list[Request] = []
    for i in range(count):
        own = [rng.randrange(3, vocab) for _ in range(1 + 7 * i % 23)]
        options = OPTIONS[i % len(OPTIONS)] | {"seed": i, "max_new_tokens": tokens} | params
        made.append(((common if i % 3 == 0 else []) + own, RequestParams(**options)))
    return made


def constrained(count: int) -> list[Request]:
    made = []
    for i in range(count):
        constraint = CONSTRAINTS[(3 * i) % len(CONSTRAINTS)] if i % 3 else None
        params = RequestParams(
            temperature=0.8, seed=i, max_new_tokens=12, constraint=constraint, logprobs=True
        )
        made.append(([END, 5 + i, 90 + i], params))
    return made


_CUT_IMAGES = {"max_batched_tokens": 9, "image_tokens": 21}


def pictured(kind: str = "") -> list[Pictured]:
    """Rows with images, of which one cannot be decoded."""
    small, tall = picture_for(kind, 1, 2, 3), picture_for(kind, 2, 5, 4)
    bad = Image(_cut_off, tall.height, tall.width, bytes(32))
    made: list[Pictured] = []
    for i, images in enumerate(([small], [small, tall], [bad], [tall], [])):
        made.append((prompt([7, 8], *images, [5, 6, i]), RequestParams(**OPTIONS[0]), images))
    return made


def _cut_off() -> Any:
    raise RequestError("image_unreadable", "the file is cut off")


TIMED = frozenset({"step_map", "draft_accepted"})
"""What depends on how long steps take, if that decides how many drafts there are."""


def assert_same(
    divided: Sequence[RequestOutput],
    whole: Sequence[RequestOutput],
    timed: frozenset[str] = frozenset(),
    tolerance: float = 1e-5,
) -> None:
    assert len(divided) == len(whole)
    for ours, theirs in zip(divided, whole, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.finish_reason, ours.text) == (theirs.finish_reason, theirs.text)
        assert ours.columns.keys() == theirs.columns.keys()
        for name in ours.columns.keys() - timed:
            values = ours.columns[name]
            if values.dtype.kind == "f":
                np.testing.assert_allclose(values, theirs.columns[name], atol=tolerance, rtol=5e-6)
            else:
                np.testing.assert_array_equal(values, theirs.columns[name])


def compare(cases: Sequence[Case], size: int) -> None:
    """Run the cases divided and whole, and compare."""
    for case, (divided, engine) in zip(cases, run_divided(cases, size), strict=True):
        whole, _ = replace(case, restarts=()).run()
        assert_same(divided, whole, TIMED if case.adaptive else frozenset(), case.tolerance)
        if case.short_rows:
            assert engine.stats.preemptions
        if isinstance(case.strategy, ARSpecStrategy) and not case.adaptive:
            assert engine.stats.counts["num_draft_tokens"]


def preempted(folder: Path) -> Case:
    """More rows than the cache can hold to their ends."""
    config = {"kv_cache_gib": 0.0001, "max_model_len": 84}
    return Case(folder, rows(8, tokens=20), config=config, short_rows=True)


def test_two_ranks_say_what_one_says(tiny_model: TinyModel) -> None:
    case = Case(
        tiny_model("qwen2_moe"),
        rows(6),
        columns=(ROUTED_EXPERTS,),
        config={"chunk_tokens": 16},
        restarts=(4,),
    )
    compare([case], 2)


def _dense(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", vocab_size=129, num_key_value_heads=2)


@pytest.mark.thorough
def test_two_ranks_say_so_of_other_paradigms_and_layers(tiny_model: TinyModel) -> None:
    compare(
        [
            Case(_dense(tiny_model), rows(8), aborts={3: [1, 5]}, restarts=(6,)),
            Case(
                tiny_model("qwen2_moe"),
                rows(6),
                columns=(ROUTED_EXPERTS,),
                config={"chunk_tokens": 16},
                restarts=(4, 9),
            ),
            # A difference in rounding may be one between two values of FP8.
            Case(_dense(tiny_model), rows(4, tokens=4), kv_cache_dtype="fp8", tolerance=0.05),
            Case(
                tiny_model("sdar_moe"),
                rows(5, repetition_penalty=1.0),
                strategy=DLLMStrategy(block_length=4, confidence_threshold=0.1),
            ),
            Case(
                _dense(tiny_model),
                rows(5, tokens=30, temperature=0),
                strategy=ARSpecStrategy("ngram", adaptive=False, ngram_min=1),
            ),
            Case(tiny_model("qwen3", vocab_size=WIDTH), constrained(6), has_text=True),
            # The ranks share norms over all heads, and these norms stand behind a layer's parts.
            Case(tiny_model("olmo3"), rows(5)),
            Case(vision_folder("qwen3_vl"), pictured(), config=_CUT_IMAGES, vision=True),
            # In float32 its parts differ by 4e-5 on one make of CPU, and by less on another.
            Case(
                vision_folder("gemma4_small"),
                pictured(),
                config=_CUT_IMAGES,
                vision=True,
                dtype=torch.float64,
            ),
            Case(vision_folder("gemma4"), pictured(), config={"image_tokens": 21}, vision=True),
            Case(
                vision_folder("gemma3"),
                pictured("gemma3"),
                config={"max_batched_tokens": 19, "image_tokens": 21},
                vision=True,
            ),
            Case(tiny_model("gemma3_text"), rows(5)),
            Case(
                tiny_model("deepseek_v3"),
                rows(4, tokens=4),
                kv_cache_dtype="fp8",
                tolerance=0.05,
            ),
            Case(tiny_model("gpt_oss"), rows(5), columns=(ROUTED_EXPERTS,)),
        ],
        2,
    )


def all_cases(tiny_model: TinyModel, heads: Path) -> list[Case]:
    """What the two tests below run, of every family of models."""
    spec = rows(6, tokens=24)
    llama = tiny_model("llama", tie_word_embeddings=True, vocab_size=130)
    wide: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    return [
        Case(llama, rows(12)),
        Case(tiny_model("qwen2"), rows(6), config={"overlap": True, "chunk_tokens": 16}),
        Case(tiny_model("qwen3_moe", split_experts=False), rows(6), columns=(ROUTED_EXPERTS,)),
        Case(tiny_model("qwen3_moe"), rows(6), load_format="dummy"),
        # Their recurrence makes more of a difference in rounding.
        Case(tiny_model("qwen3_next", **wide), rows(6), columns=(ROUTED_EXPERTS,), tolerance=1e-4),
        Case(tiny_model("qwen3_next", **wide), rows(6), load_format="dummy"),
        Case(tiny_model("qwen3_5_moe", **wide), rows(6), tolerance=1e-4),
        Case(tiny_model("deepseek_v2"), rows(6), columns=(ROUTED_EXPERTS,)),
        Case(tiny_model("deepseek_v3"), rows(6), load_format="dummy"),
        Case(tiny_model("glm4_moe_lite"), rows(6)),
        Case(tiny_model("glm4_moe"), rows(6), columns=(ROUTED_EXPERTS,)),
        Case(tiny_model("minimax_m2"), rows(6), columns=(ROUTED_EXPERTS,)),
        Case(tiny_model("minimax_m2"), rows(6), load_format="dummy"),
        Case(tiny_model("gpt_oss"), rows(6), load_format="dummy"),
        Case(tiny_model("ministral3"), rows(6)),
        Case(tiny_model("mistral3"), rows(6)),
        Case(tiny_model("olmo3"), rows(6)),
        Case(tiny_model("smollm3"), rows(6)),
        *(Case(tiny_model(kind), rows(6)) for kind in CLASSES),
        Case(tiny_model("gemma3"), rows(6)),
        Case(tiny_model("gemma4_text", num_global_key_value_heads=2), rows(6)),
        Case(tiny_model("gemma4_moe"), rows(6), columns=(ROUTED_EXPERTS,)),
        Case(tiny_model("gemma4_moe"), rows(6), load_format="dummy"),
        Case(tiny_model("gemma4_e2b"), rows(6)),
        preempted(llama),
        Case(llama, spec, strategy=ARSpecStrategy("draft"), draft=llama, adaptive=True),
        Case(
            llama,
            spec,
            strategy=ARSpecStrategy("ngram", adaptive=False, ngram_min=1, ngram_pool=True),
        ),
        Case(
            llama,
            spec,
            strategy=ARSpecStrategy("draft", adaptive=False, verifier="rejection"),
            draft=llama,
        ),
        Case(heads, spec, strategy=ARSpecStrategy("mtp", adaptive=False), heads=("mtp",)),
        *(
            Case(
                tiny_model(kind),
                rows(8, repetition_penalty=1.0),
                strategy=DLLMStrategy(block_length=4),
            )
            for kind in ("sdar", "llada2_moe", "fast_dllm_qwen")
        ),
        Case(
            tiny_model("sdar", vocab_size=WIDTH),
            constrained(6),
            strategy=DLLMStrategy(block_length=4),
            has_text=True,
        ),
        Case(
            tiny_model("qwen3", vocab_size=WIDTH),
            constrained(12),
            strategy=ARSpecStrategy("ngram", adaptive=False),
            has_text=True,
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_family_and_paradigm_is_divided(
    tiny_model: TinyModel, tmp_path: Path, size: int
) -> None:
    """The key heads are 2: with four ranks, two of them have the same one."""
    compare(all_cases(tiny_model, TheirHead("deepseek_v3").save(tmp_path)), size)
