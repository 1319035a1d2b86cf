"""Rows of Phi-3 on both sides of LongRoPE's border: transformers' choices, however scheduled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.engine.models.test_family_rows import check_greedy, load, make_engine
from tests.engine.models.test_variants import LONG
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import Request, expect_short_rows, run
from tests.support.engine.pooled_rows import Reference, read

TinyModel = Callable[..., Path]
BORDER = 64
ROPE = {
    "rope_parameters": LONG | {"original_max_position_embeddings": BORDER},
    "original_max_position_embeddings": BORDER,
}


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("phi3", **ROPE)


def rows(**params: Any) -> list[Request]:
    """Rows that begin alike, some of them long; one ends at the border."""
    found: list[Request] = []
    for i, length in enumerate((20, 65, 100, 57, 160, 64, 65, 20)):
        most = min(8, BORDER + 1 - length) if length <= BORDER else 24
        own = RequestParams(max_new_tokens=most, seed=i, logprobs=True, **params)
        found.append(([(7 * j * j + 3 * j) % 125 + 3 for j in range(length)], own))
    return found


def test_tokens_are_those_of_transformers(
    folder: Path, reference_logits: Callable[[Path, list[int]], torch.Tensor]
) -> None:
    """The row of 57 tokens grows up to the border."""
    asked = rows(temperature=0)
    engine = make_engine(load(folder), max_batched_tokens=32, block_size=4)
    for (prompt, _), output in zip(asked, run(engine, asked), strict=True):
        logits = reference_logits(folder, (prompt + output.token_ids)[:-1])
        check_greedy(output, logits[len(prompt) - 1 :].log_softmax(-1))
    assert engine.stats.cached_tokens > 0


@pytest.mark.parametrize("drafts", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_any_schedule(drafts: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_short_rows(monkeypatch)
    alone = Alone(make_engine(load(folder), max_num_seqs=1, prefix_caching=False), run)
    strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1) if drafts else None
    engine = make_engine(
        load(folder), strategy, max_batched_tokens=32, block_size=4, max_num_seqs=6,
        kv_cache_gib=0.00016, max_model_len=184,
    )  # fmt: skip
    asked = rows(temperature=0.8)
    alone.check(asked, run(engine, asked))
    assert engine.stats.preemptions and engine.stats.cached_tokens


def test_rows_that_are_read(folder: Path) -> None:
    asked = [read(prompt, "mean") for prompt, _ in rows()]
    reference = Reference(folder, classifies=False)
    for request, output in zip(asked, run(make_engine(load(folder)), asked), strict=True):
        expected = reference.embedding(request)
        np.testing.assert_allclose(output.columns["embedding"], expected, atol=1e-5)


def test_given_answers_count(
    folder: Path, reference_logits: Callable[[Path, list[int]], torch.Tensor]
) -> None:
    """A short prompt with an answer over the border is one long row."""
    (prompt, _), (answer, _) = rows()[0], rows()[3]
    engine = make_engine(load(folder))
    engine.add_request("0", prompt, RequestParams(max_new_tokens=0), answer)
    while not (outputs := engine.step()):
        pass
    logits = reference_logits(folder, prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)
    expected = logits[torch.arange(len(answer)), torch.tensor(answer)]
    found = torch.from_numpy(outputs[0].columns["answer_logprobs"])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_rows_that_may_cross_the_border_are_refused(folder: Path) -> None:
    engine = make_engine(load(folder))
    prompt, params = rows()[3]
    advice = "lower max_new_tokens to 8, or max_model_len to 65"
    with pytest.raises(RequestError, match=advice) as refused:
        engine.add_request("0", prompt, replace(params, max_new_tokens=9))
    assert refused.value.type == "crosses_longrope"
    short = make_engine(load(folder), max_model_len=BORDER + 1)
    (output,) = run(short, [(prompt, replace(params, max_new_tokens=100))])
    assert (output.finish_reason, len(output.token_ids)) == ("length", 8)
