"""A trajectory that is replayed has the log-probabilities of the row that was generated, to the
bit, whatever the batch, the chunks, the cache and the company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.interface.trajectory import Trajectory
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy
from tests.strategies.dllm import test_dllm_guided
from tests.strategies.dllm.test_dllm import RULES as ALL_RULES
from tests.strategies.dllm.test_dllm import make_engine, requests
from tests.support.engine import scored_rows
from tests.support.engine.engine_rows import Request, expect_short_rows

TinyModel = Callable[..., Path]
Asked = tuple[list[int], RequestParams, Trajectory | None]
COLUMNS = ("step_map", "tail_token_ids", "tail_step_map")
LENGTHS = (4, 5, 8)
RULES = [rule for rule in ALL_RULES if rule["unmasking"] != "joint_threshold"]
EDITING: dict[str, Any] = {
    "unmasking": "joint_threshold",
    "confidence_threshold": 0.05,
    "edit_threshold": 0.1,
}


def generated(seed: int, count: int) -> list[Request]:
    """Rows of all options, which keep what a cut removes."""
    columns = (*COLUMNS, "entropy")
    return [(prompt, replace(params, columns=columns)) for prompt, params in requests(seed, count)]


def trajectory(output: RequestOutput) -> Trajectory:
    tail = (output.columns[name].tolist() for name in COLUMNS[1:])
    return Trajectory(output.token_ids, output.columns["step_map"].tolist(), *tail)


def as_replay(params: RequestParams) -> RequestParams:
    return replace(
        params, max_new_tokens=0, min_new_tokens=0, columns=("entropy",), constraint=None
    )


def run_all(engine: LLMEngine, rows: Sequence[Asked]) -> list[RequestOutput]:
    for i, (prompt, params, answer) in enumerate(rows):
        engine.add_request(i, prompt, params, answer)
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    engine.scheduler.block_manager.check_integrity([])
    return [outputs[i] for i in range(len(rows))]


def assert_replayed(found: RequestOutput, made: RequestOutput, *, counts: bool = True) -> None:
    assert (found.finish_reason, found.token_ids, found.text) == ("scored", [], "")
    assert found.answer_token_ids == made.token_ids and found.replay_exact is True
    assert not counts or found.counts == made.counts
    names = {
        name: name if name == ROUTED_EXPERTS else f"answer_{name}"
        for name in made.columns.keys() - set(COLUMNS)
    }
    assert {*names.values()} == found.columns.keys() - {"answer_rest_probs"}
    for name, here in names.items():
        np.testing.assert_array_equal(found.columns[here], made.columns[name], err_msg=name)


@given(st.data())
@settings(max_examples=2, deadline=None)
def test_bits(tiny_model: TinyModel, data: st.DataObject) -> None:
    """Rows of all options that run in any order, beside rows that generate."""
    rule, length = data.draw(st.sampled_from(RULES)), data.draw(st.sampled_from(LENGTHS))
    asked = generated(data.draw(st.integers(0, 99)), 6)
    made = run_all(make_engine(tiny_model, length, rule), [(*row, None) for row in asked])
    rows: list[Asked] = [
        (prompt, as_replay(params), trajectory(output))
        for (prompt, params), output in zip(asked, made, strict=True)
    ]
    rows += [(*row, None) for row in asked[:2]]
    order, fused = data.draw(st.permutations(range(len(rows)))), data.draw(st.booleans())
    engine = make_engine(
        tiny_model,
        length,
        {**rule, "fused_commit": fused},
        max_num_seqs=data.draw(st.integers(1, 8)),
        max_batched_tokens=8 * length * data.draw(st.integers(1, 4)),
        prefix_caching=data.draw(st.booleans()),
        overlap=data.draw(st.booleans()),
    )
    found = dict(zip(order, run_all(engine, [rows[i] for i in order]), strict=True))
    for i, output in enumerate(made):
        assert_replayed(found[i], output, counts=fused)
    for again, output in zip((found[6], found[7]), made, strict=False):
        assert again.token_ids == output.token_ids
        for name in output.columns:
            np.testing.assert_array_equal(again.columns[name], output.columns[name])


@pytest.mark.thorough
def test_bits_after_preemptions(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = generated(1, 10)
    made = run_all(make_engine(tiny_model, 4, RULES[4]), [(*row, None) for row in asked])
    expect_short_rows(monkeypatch)
    engine = make_engine(tiny_model, 4, RULES[4], block_size=4, kv_cache_gib=0.00015)
    rows = [
        (prompt, as_replay(params), trajectory(output))
        for (prompt, params), output in zip(asked, made, strict=True)
    ]
    for output, wanted in zip(run_all(engine, rows), made, strict=True):
        assert_replayed(output, wanted)
    assert engine.stats.preemptions and engine.stats.cached_tokens


@pytest.mark.quick(0, thorough=4)
@pytest.mark.parametrize(
    ("rule", "kind"), [(RULES[4], "sdar"), (RULES[4], "sdar_moe"), *((r, "sdar") for r in RULES)]
)
def test_constrained_rows(rule: dict[str, Any], kind: str, tiny_model: TinyModel) -> None:
    """Raw log-probabilities know of no constraint, whatever it has forced or excluded. A row that
    ended in a conflict has positions that were never unmasked."""
    experts = (ROUTED_EXPERTS,) if kind == "sdar_moe" else ()
    columns = (*COLUMNS, "entropy", *experts)
    asked = [
        (prompt, replace(params, columns=columns, logprobs_mode="raw"))
        for prompt, params in test_dllm_guided.requests(3, 10)
    ]
    make = partial(
        test_dllm_guided.make_engine, tiny_model, 8, rule, kind=kind, context_columns=experts
    )
    made = run_all(make(), [(*row, None) for row in asked])
    assert {"stop", "constraint_conflict"} <= {output.finish_reason for output in made}
    rows: list[Asked] = [
        (prompt, replace(as_replay(params), columns=("entropy", *experts)), trajectory(output))
        for (prompt, params), output in zip(asked, made, strict=True)
        if output.token_ids
    ]
    rows += [(*asked[0], None)]
    found = run_all(make(overlap=True, max_num_seqs=4), rows)
    for output, wanted in zip(found, [each for each in made if each.token_ids], strict=False):
        assert_replayed(output, wanted, counts=False)


def one_row(tiny_model: TinyModel) -> tuple[LLMEngine, Request, RequestOutput]:
    """A row that ends inside a block."""
    rule = RULES[4]
    params = RequestParams(
        temperature=1.0, max_new_tokens=7, ignore_eos=True, columns=COLUMNS, logprobs=True
    )
    asked = [3, 4, 5], params
    engine = make_engine(tiny_model, 4, rule)
    made = run_all(engine, [(*asked, None)])[0]
    return engine, asked, made


def test_a_tail_that_is_not_known_is_said(tiny_model: TinyModel) -> None:
    """What stands before the last block has its bits all the same."""
    engine, (prompt, params), made = one_row(tiny_model)
    whole = trajectory(made)
    assert len(whole.tail_token_ids or ()) == 2
    cases = {
        "no tail": replace(whole, tail_token_ids=None, tail_steps=None),
        "to the end of a block": Trajectory(whole.token_ids[:5], whole.steps[:5]),
        "constrained": replace(whole, same_distribution=False),
    }
    rows = [(prompt, as_replay(params), case) for case in cases.values()]
    found = dict(zip(cases, run_all(engine, rows), strict=True))
    exact = {name: output.replay_exact for name, output in found.items()}
    assert exact == {"no tail": False, "to the end of a block": True, "constrained": False}
    for output in found.values():
        np.testing.assert_array_equal(
            output.columns["answer_logprobs"][:5], made.columns["logprobs"][:5]
        )


@pytest.mark.parametrize("constrained", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_edited_rows_are_replayed_by_their_last_writes(
    constrained: bool, tiny_model: TinyModel
) -> None:
    """The tokens are final from their first step on, and no step edits them. Where nothing was
    replaced in a block, its log-probabilities have their bits, whatever was replaced before."""
    columns = (*COLUMNS, "edit_log")
    params = RequestParams(temperature=1.0, max_new_tokens=40, logprobs=True, columns=columns)
    free = replace(params, ignore_eos=True)
    rows: list[Asked] = [([3, 4, 5], replace(free, seed=seed), None) for seed in range(4)]
    engine = make_engine(tiny_model, 8, EDITING)
    if constrained:
        rows = [
            (prompt, replace(params, constraint=asked.constraint, seed=seed), None)
            for seed, (prompt, asked) in enumerate(test_dllm_guided.requests(3, 12))
        ]
        engine = test_dllm_guided.make_engine(tiny_model, 8, EDITING, overlap=True)
    made = [each for each in run_all(engine, rows) if each.token_ids]
    again: list[Asked] = [
        (each.prompt_token_ids, as_replay(params), trajectory(each)) for each in made
    ]
    exact = edited = 0
    for output, found in zip(made, run_all(engine, again), strict=True):
        steps, edits = output.columns["step_map"].tolist(), output.columns["edit_log"].tolist()
        newest = {place: (step, new) for place, step, _, new in edits}
        for place, (step, new) in newest.items():
            assert (steps[place], output.token_ids[place]) == (step, new)
        assert found.replay_exact is False and found.answer_token_ids == output.token_ids
        before = len(output.prompt_token_ids)
        whole = (before + len(steps)) // 8 * 8 - before  # the last block may have lost edits
        touched = {(before + place) // 8 for place in newest}
        same = [at for at in range(max(whole, 0)) if (before + at) // 8 not in touched]
        np.testing.assert_array_equal(
            found.columns["answer_logprobs"][same], output.columns["logprobs"][same]
        )
        assert np.isfinite(found.columns["answer_logprobs"]).all()
        exact, edited = exact + len(same), edited + len(touched)
    assert exact and edited


def test_steps_that_no_row_can_have_had(tiny_model: TinyModel) -> None:
    engine, (prompt, params), made = one_row(tiny_model)
    whole = trajectory(made)
    wrong = {
        "9 tokens have 6 steps": replace(whole, steps=whole.steps[:-3]),
        "is below 1": replace(whole, steps=[0, *whole.steps[1:]]),
        "the block before its own": replace(whole, steps=[9, *whole.steps[1:]]),
        "its block has 0 after": replace(
            whole, token_ids=whole.token_ids[:5], steps=whole.steps[:5]
        ),
    }
    for message, answer in wrong.items():
        with pytest.raises(RequestError, match=message) as caught:
            engine.add_request(0, prompt, as_replay(params), answer)
        assert caught.value.type == "bad_step_map"
    with pytest.raises(RequestError, match="tail token ids") as caught:
        bad = replace(whole, tail_token_ids=[9999] * len(whole.tail_token_ids or ()))
        engine.add_request(0, prompt, as_replay(params), bad)
    assert caught.value.type == "bad_token_ids" and not engine.has_unfinished()


def test_what_is_refused(tiny_model: TinyModel) -> None:
    engine, (prompt, params), made = one_row(tiny_model)
    with pytest.raises(ValueError, match="answer_step_map_column"):
        engine.add_request(0, prompt, as_replay(params), made.token_ids)
    with pytest.raises(ValueError, match="column step_map describes generated tokens"):
        asked = replace(as_replay(params), columns=("step_map",))
        engine.add_request(0, prompt, asked, trajectory(made))
    with pytest.raises(ValueError, match="unmasking low_confidence_dynamic replaces none"):
        engine.add_request(0, prompt, replace(params, columns=("edit_log",)))
    plain = scored_rows.make_engine(tiny_model("llama"), ARStrategy())
    with pytest.raises(ValueError, match="strategy ar reads it from left to right"):
        plain.add_request(0, prompt, as_replay(params), trajectory(made))
