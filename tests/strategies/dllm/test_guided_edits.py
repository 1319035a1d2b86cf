"""Constrained rows whose rule replaces tokens: the text stays one of the constraint, and what was
replaced, and what was refused, is what a plain loop says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex  # type: ignore[import-untyped]

pytest.importorskip("xgrammar")

from batchgen.strategies.dllm.guided import _Run
from tests.strategies.dllm.test_dllm import Request, check, run
from tests.strategies.dllm.test_dllm_guided import MASK, forward_of, language, make_engine, requests
from tests.support.engine.dllm_reference import Forward, Options, generate
from tests.support.engine.engine_rows import expect_short_rows
from tests.support.engine.grammars import END, PLAIN

__all__ = ["forward_of"]
EAGER: dict[str, Any] = {
    "unmasking": "joint_threshold",
    "confidence_threshold": 0.02,
    "edit_threshold": 0.0,
    "max_edit_steps": 2,
}
"""Replaces a token in most steps."""


def eager_rows(count: int, longest: int) -> list[Request]:
    asked = []
    for prompt, params in requests(6, count, longest):
        columns = ("step_map", "edit_log")
        asked.append((prompt, replace(params, top_logprobs=0, columns=columns, temperature=1.0)))
    return asked


def count_verdicts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many replacements the constraints have allowed, and how many refused, from now on."""
    verdicts, edit = [0, 0], _Run.edit

    def counted(self: _Run, known: list[int], drawn: list[int], places: list[int]) -> list[int]:
        allowed = edit(self, known, drawn, places)
        verdicts[0] += len(allowed)
        verdicts[1] += len(places) - len(allowed)
        return allowed

    monkeypatch.setattr(_Run, "edit", counted)
    return verdicts


def test_edits_stay_inside_the_constraint(
    tiny_model: Callable[..., Path],
    forward_of: Callable[[int], Forward],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, verdicts = eager_rows(6, 24), count_verdicts(monkeypatch)
    options = Options(block_length=8, mask_token_id=MASK, eos=(END,), max_model_len=128, **EAGER)
    found = run(make_engine(tiny_model, 8, EAGER, overlap=True, max_num_seqs=7), rows)
    edits = 0
    for output, (prompt, params) in zip(found, rows, strict=True):
        words = language(params.constraint)
        wanted = generate(forward_of(8), prompt, params, options, words)
        check(output, wanted, params)
        log = [[at - len(prompt), *rest] for at, *rest in wanted.edits]
        kept = sorted(one for one in log if one[0] < len(wanted.token_ids))
        assert output.columns["edit_log"].tolist() == kept
        assert output.counts["num_forwards"] == wanted.num_forwards
        if words is not None:
            text = words.text([i for i in output.token_ids if i < len(PLAIN)])
            assert regex.fullmatch(words.pattern, text, partial=True)
            edits += len(kept)
    allowed, refused = verdicts
    assert allowed >= edits > 3 and refused > 3


@pytest.mark.thorough
def test_preempted_rows_replace_the_same(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = eager_rows(16, 40)
    expected = run(make_engine(tiny_model, 4, EAGER), rows)
    expect_short_rows(monkeypatch)
    cache: dict[str, Any] = {"max_model_len": 96, "block_size": 4, "kv_cache_gib": 0.0001}
    engine = make_engine(tiny_model, 4, EAGER, overlap=True, **cache)
    outputs = run(engine, rows)
    assert engine.stats.preemptions > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.token_ids == wanted.token_ids and output.counts == wanted.counts
        for name, values in wanted.columns.items():
            np.testing.assert_array_equal(output.columns[name], values)
