"""The column `entropy`: of the distribution that logprobs_mode names, with every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling.sampling import entropy_of
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.engine.engine_rows import run
from tests.support.engine.scored_rows import make_engine, scored

TinyModel = Callable[..., Path]
PROMPT = [5, 9, 5, 9, 5]


def test_it_is_that_of_the_softmax_whatever_rows_there_are() -> None:
    logits = 5 * torch.randn(70, 901, generator=torch.manual_seed(0))
    logits[3, 10:] = -torch.inf
    logits[4, 1:] = -torch.inf
    found = entropy_of(logits)
    wanted = Categorical(logits=logits.double().clamp(min=-1e30)).entropy()
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)
    assert found[4] == 0
    for rows in (slice(0, 1), slice(60, 66), slice(69, 70)):
        assert torch.equal(entropy_of(logits[rows]), found[rows])
    assert entropy_of(logits[:0]).shape == (0,)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_generated_scored_and_drafted_tokens_have_the_same(
    mode: str, tiny_model: TinyModel
) -> None:
    options: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 9,
        "logprobs_mode": mode,
        "columns": ("entropy",),
    }
    params = RequestParams(max_new_tokens=6, ignore_eos=True, logprobs=True, **options)
    folder = tiny_model("llama")
    (made,) = run(make_engine(folder), [(PROMPT, params)])
    spec = ARSpecStrategy("ngram", adaptive=False, ngram_min=1)
    (drafted,) = run(make_engine(folder, spec), [(PROMPT, params)])
    (again,) = run(make_engine(folder), [scored(PROMPT, made.token_ids, **options)])
    np.testing.assert_array_equal(drafted.columns["entropy"], made.columns["entropy"])
    np.testing.assert_array_equal(again.columns["answer_entropy"], made.columns["entropy"])
    assert (made.columns["entropy"] > 0).all()
    assert (made.columns["entropy"] <= np.log(9 if mode == "processed" else 128) + 1e-5).all()
