"""Constrained rows in the engine have the tokens of a plain loop, whatever rows run beside them."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.matcher import Grammar, Matcher
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows import sequence as engine_sequence
from batchgen.engine.rows.compile_queue import CompileQueue
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.cases import some_slow
from tests.support.engine.constrained_rows import (
    END,
    NUM_TOKENS,
    SIMPLE,
    TURN,
    WIDTH,
    assert_same,
    compiler,
    encode,
    load,
    make_tokenizer,
    mixed_requests,
    reference,
)
from tests.support.engine.engine_rows import Request, block_bytes, expect_short_rows, run

ROWS = 44
SOME = 14
"""Rows of an example of the property."""
DIGITS = Constraint.make("regex", "[0-9]{2,6}")
AB = Constraint.make("choice", ["ab"])
NEVER = Constraint("regex", r"\p{Nonsense}")
"""Made without the checks of `make`: the compiler is who refuses it."""


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> CausalLM:
    return load(tiny_model("llama", vocab_size=WIDTH, num_hidden_layers=2))


def make_engine(model: CausalLM, config: EngineConfig = SIMPLE, **more: Any) -> LLMEngine:
    options = {"compiler": compiler()} | more
    return LLMEngine(model, make_tokenizer(), (END,), ARStrategy(), config, **options)


def small_cache(model: CausalLM, tokens: int, **changes: Any) -> EngineConfig:
    """A configuration whose cache holds so many tokens: rows fight for it."""
    config = replace(
        SIMPLE,
        **({"max_batched_tokens": 24, "chunk_tokens": 16, "block_size": 4} | changes),
    )
    config = replace(config, prefix_caching=changes.get("prefix_caching", True))
    per_block = block_bytes(config.block_size, model)
    blocks = -(-tokens // config.block_size) + 1.5
    return replace(config, kv_cache_gib=blocks * per_block / 2**30)


@pytest.fixture(scope="module")
def simple(tiny: CausalLM) -> Callable[[int], tuple[list[Request], list[RequestOutput]]]:
    """`simple(seed)` → rows, and what the engine's simplest loop makes of them together."""

    @functools.cache
    def run_simple(seed: int) -> tuple[list[Request], list[RequestOutput]]:
        requests = mixed_requests(ROWS, 5 + seed)
        return requests, run(make_engine(tiny), requests)

    return run_simple


Simple = Callable[[int], tuple[list[Request], list[RequestOutput]]]


# --- the tokens -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_rows_of_every_kind_are_those_of_a_plain_loop(
    tiny: CausalLM, simple: Simple, run_paged: Callable[..., torch.Tensor]
) -> None:
    """Their logprobs too: raw ones of the model's law, processed ones of the law within the mask.
    Rows with and without constraints, with all options, share the batch."""
    requests, outputs = simple(0)

    def logits_of(token_ids: Sequence[int]) -> torch.Tensor:
        return run_paged(tiny, token_ids, [len(token_ids)])[-1]

    for (prompt, params), output in zip(requests, outputs, strict=True):
        assert_same(reference(logits_of, prompt, params), output, atol=1e-4)
    constrained = [output for output in outputs if output.constraint_satisfied is not None]
    assert len(constrained) > ROWS / 2
    assert {output.finish_reason for output in constrained} == {
        *("stop", "length", "constraint_conflict")
    }
    assert sum(output.constraint_satisfied is True for output in constrained) > ROWS / 5
    # Ids beyond the tokenizer are for rows without a constraint only.
    beyond = [max(output.token_ids, default=0) >= NUM_TOKENS for output in outputs]
    assert any(beyond)
    assert not any(max(output.token_ids, default=0) >= NUM_TOKENS for output in constrained)


# What is changed, and with which loop that is quick.
CHANGES: list[tuple[dict[str, Any], bool | None]] = [
    ({}, None),
    ({"max_num_seqs": 3, "block_size": 1}, False),
    ({"block_size": 8, "max_batched_tokens": 100, "max_num_seqs": 17}, None),
    ({"prefix_caching": False, "chunk_tokens": 3}, True),
    ({"max_batched_tokens": 7, "block_size": 2}, True),
    ({"chunk_tokens": 0}, False),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("changes", "overlap"),
    [
        pytest.param(changes, overlap, marks=[] if quick == overlap else [pytest.mark.slow])
        for changes, quick in CHANGES
        for overlap in (False, True)
    ],
    ids=str,
)
def test_chunking_preemption_and_caching_change_nothing(
    tiny: CausalLM,
    simple: Simple,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    overlap: bool,
) -> None:
    expect_short_rows(monkeypatch)
    requests, expected = simple(0)
    requests, expected = requests[:32], expected[:32]
    engine = make_engine(tiny, small_cache(tiny, 96, overlap=overlap, **changes))
    outputs = run(engine, requests)
    for one, other in zip(expected, outputs, strict=True):
        assert_same(one, other)
    assert (engine.stats.cached_tokens > 0) == engine.config.prefix_caching
    if changes.get("max_num_seqs") not in (3, 17):
        preempted = [output for output in outputs if output.num_preemptions]
        assert sum(output.constraint_satisfied is not None for output in preempted) > 2


# Shrinking an example of so many steps takes minutes and tells little more.
@pytest.mark.thorough
@settings(
    max_examples=max(1, settings().max_examples // 20),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(data=st.data())
def test_any_schedule_gives_the_same_rows(
    tiny: CausalLM, simple: Simple, data: st.DataObject
) -> None:
    requests, expected = simple(data.draw(st.integers(0, 1), label="rows"))
    order = data.draw(st.permutations(range(ROWS)), label="order")[:SOME]
    config = small_cache(
        tiny,
        data.draw(st.integers(96, 400), label="cache"),
        max_num_seqs=data.draw(st.integers(1, 20), label="max_num_seqs"),
        max_batched_tokens=data.draw(st.integers(1, 80), label="max_batched_tokens"),
        chunk_tokens=data.draw(st.integers(0, 40), label="chunk_tokens"),
        block_size=data.draw(st.sampled_from([1, 2, 4, 8]), label="block_size"),
        prefix_caching=data.draw(st.booleans(), label="prefix_caching"),
        overlap=data.draw(st.booleans(), label="overlap"),
    )
    aborts = data.draw(
        st.dictionaries(
            st.integers(0, 40), st.lists(st.integers(0, SOME - 1), max_size=3), max_size=4
        ),
        label="aborts",
    )
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="hopeful admission"):
            expect_short_rows(patch)
        outputs = run(make_engine(tiny, config), [requests[i] for i in order], aborts)
    for output in outputs:
        assert_same(expected[order[int(output.request_id)]], output)
    gone = {i for rows in aborts.values() for i in rows}
    assert {*range(SOME)} - {int(output.request_id) for output in outputs} <= gone


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", some_slow([False, True], quick=[True]))
def test_a_constraint_that_many_share_is_followed_by_each(tiny: CausalLM, overlap: bool) -> None:
    """Samples of one prompt, alone and together; the prompt is computed once."""
    prompt = list(range(10, 75))
    params = RequestParams(constraint=DIGITS, max_new_tokens=9, logprobs=True)
    config = replace(SIMPLE, overlap=overlap, prefix_caching=True)
    requests = [(prompt, replace(params, seed=i)) for i in range(8)]
    engine = make_engine(tiny, config)
    outputs = run(engine, requests)
    assert engine.stats.prefill_tokens == 65 + 7 * 1  # 64 tokens are four whole blocks
    assert len({output.text for output in outputs}) > 5
    for request, output in zip(requests, outputs, strict=True):
        assert output.constraint_satisfied and output.text.isdigit()
        assert_same(run(make_engine(tiny), [request])[0], output)


@pytest.mark.quick(0, thorough=2)
@pytest.mark.parametrize(
    ("overlap", "aborts_after"),
    some_slow(
        itertools.product([False, True], range(7)),
        quick=[(False, 3), *((True, after) for after in (0, 1, 2, 4))],
    ),
)
def test_an_abort_and_its_id_again_at_any_moment(
    tiny: CausalLM, simple: Simple, overlap: bool, aborts_after: int
) -> None:
    """What is on its way for the aborted row reaches no matcher of its slot's or id's next one."""
    requests, expected = simple(1)
    engine = make_engine(tiny, replace(SIMPLE, max_num_seqs=3, overlap=overlap))
    for i in range(5):
        engine.add_request(str(i), *requests[i])
    outputs: dict[str, RequestOutput] = {}
    for _ in range(aborts_after):
        outputs |= {output.request_id: output for output in engine.step()}
    aborted = [str(i) for i in range(5) if str(i) not in outputs and engine.abort(str(i))]
    assert len(aborted) > 2 and not engine.has_unfinished()
    # Each id comes back as another row, with another constraint.
    for name in aborted:
        engine.add_request(name, *requests[int(name) + 1])
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    for i in range(5):
        assert_same(expected[i + (str(i) in aborted)], outputs[str(i)])


# --- how rows end ---------------------------------------------------------------------------------


def end_of(tiny: CausalLM, *requests: Request, overlap: bool) -> list[RequestOutput]:
    """What comes of them, run beside rows that nothing may harm."""
    together = run(make_engine(tiny, replace(SIMPLE, overlap=overlap)), [*requests, *OTHERS])
    for alone, output in zip(others_alone(tiny), together[len(requests) :], strict=True):
        assert_same(alone, output)
    return together[: len(requests)]


OTHERS = mixed_requests(6, 2)


@functools.cache
def others_alone(tiny: CausalLM) -> list[RequestOutput]:
    return [run(make_engine(tiny), [request])[0] for request in OTHERS]


# The plain loop makes what all others are compared with; these cases of it are exhaustive.
both_loops = pytest.mark.parametrize(
    "overlap", some_slow([False, True], quick=[True]), ids=["plain", "overlap"]
)


@pytest.mark.quick(1)
@both_loops
def test_a_row_that_is_complete_stops_and_one_that_is_cut_is_not_satisfied(
    tiny: CausalLM, overlap: bool
) -> None:
    params = RequestParams(constraint=DIGITS, max_new_tokens=20)
    complete, cut, whole, marked = end_of(
        tiny,
        ([5, 6], params),
        ([5, 6], replace(params, max_new_tokens=1)),  # of at least two digits
        ([5, 6], replace(params, max_new_tokens=2)),
        ([5, 6], replace(params, constraint=replace(DIGITS, start_after="\n\n\n"))),
        overlap=overlap,
    )
    assert (complete.finish_reason, complete.stop) == ("stop", "<|end|>")
    assert complete.token_ids[-1] == END and 2 <= len(complete.text) <= 6
    assert complete.constraint_satisfied is True
    assert (cut.finish_reason, cut.constraint_satisfied) == ("length", False)
    assert (whole.finish_reason, whole.constraint_satisfied) == ("length", True)
    assert whole.token_ids == complete.token_ids[:2]
    # The marker never came: nothing that was constrained is there.
    assert (marked.finish_reason, marked.constraint_satisfied) == ("length", False)


@pytest.mark.quick(1)
@both_loops
def test_a_stop_string_cuts_the_text_that_was_to_be_complete(tiny: CausalLM, overlap: bool) -> None:
    exact = Constraint.make("choice", ["12345"])
    params = RequestParams(constraint=exact, max_new_tokens=20)
    free, cut, last = end_of(
        tiny,
        ([5, 6], params),
        ([5, 6], replace(params, stop=("34",))),
        ([5, 6], replace(params, stop=("5",))),
        overlap=overlap,
    )
    assert (free.text, free.constraint_satisfied) == ("12345", True)
    assert (cut.text, cut.finish_reason, cut.stop) == ("12", "stop", "34")
    assert (last.text, last.finish_reason, last.stop) == ("1234", "stop", "5")
    assert cut.constraint_satisfied is False and last.constraint_satisfied is False


@pytest.mark.quick(1)
@both_loops
def test_a_stop_id_ends_a_row_where_its_constraint_is_complete(
    tiny: CausalLM, overlap: bool
) -> None:
    """Even one that is text, which the constraint could go on with."""
    (six,) = encode("6")
    params = RequestParams(constraint=DIGITS, max_new_tokens=20, temperature=1.5, logprobs=True)
    requests = [([5, 6], replace(params, stop_token_ids=(six, TURN), seed=i)) for i in range(40)]
    outputs = end_of(tiny, *requests, overlap=overlap)
    assert {output.token_ids[-1] for output in outputs} >= {six, TURN, END}
    for output in outputs:
        assert output.constraint_satisfied and output.finish_reason == "stop"
        assert 2 <= len(output.text) <= 6 and output.text.isdigit() and "6" not in output.text


@pytest.mark.thorough
@both_loops
def test_a_minimum_that_the_constraint_does_not_allow_is_a_conflict(
    tiny: CausalLM, overlap: bool
) -> None:
    """The tokens until then are kept, and their columns."""
    params = RequestParams(
        constraint=AB, max_new_tokens=20, temperature=0, logprobs=True, top_logprobs=2
    )
    conflict, at_once, enough = end_of(
        tiny,
        ([5, 6], replace(params, min_new_tokens=10)),
        (
            [5, 6],
            replace(params, min_new_tokens=1, constraint=Constraint("regex", "(ab)?")),
        ),
        ([5, 6], replace(params, min_new_tokens=1)),
        overlap=overlap,
    )
    assert conflict.finish_reason == "constraint_conflict" and conflict.error is None
    assert conflict.text == "ab" and conflict.stop is None
    # What there is of it is complete.
    assert conflict.constraint_satisfied is True
    assert len(conflict.columns["logprobs"]) == len(conflict.token_ids)
    assert conflict.columns["top_logprobs"].shape == (len(conflict.token_ids), 2)
    assert at_once.text == "ab" and at_once.finish_reason == "stop"
    assert enough.text == "ab" and enough.finish_reason == "stop"


@pytest.mark.quick(1)
@both_loops
def test_a_conflict_at_the_first_token_ends_the_row_without_any(
    tiny: CausalLM, overlap: bool
) -> None:
    """All that may follow is a stop id, which may not come yet."""
    nothing = Constraint("grammar", 'root ::= ""')
    params = RequestParams(constraint=nothing, max_new_tokens=5, logprobs=True)
    conflict, empty = end_of(
        tiny, ([5, 6], replace(params, min_new_tokens=1)), ([5, 6], params), overlap=overlap
    )
    assert conflict.finish_reason == "constraint_conflict" and conflict.token_ids == []
    assert conflict.columns["logprobs"].shape == (0,)
    assert (empty.token_ids, empty.text, empty.finish_reason) == ([END], "", "stop")


@pytest.mark.thorough
@both_loops
def test_a_row_that_fails_is_not_satisfied_and_keeps_what_it_had(
    tiny_model: Callable[..., Path], overlap: bool
) -> None:
    """A token is poisoned that rows generate; a mask does not hide that it broke the logits."""
    model = load(tiny_model("llama", vocab_size=WIDTH, num_hidden_layers=2))
    requests = mixed_requests(40, 3, free=4)
    healthy = run(make_engine(model), requests)
    inner = [i for output in healthy for i in output.token_ids[1:-1] if i not in (END, TURN)]
    poisoned = max(set(inner), key=inner.count)
    model.model.embed_tokens.weight.data[poisoned] = float("nan")
    outputs = run(make_engine(model, replace(SIMPLE, overlap=overlap)), requests)
    failed = 0
    for output, before in zip(outputs, healthy, strict=True):
        read = [*before.prompt_token_ids, *before.token_ids[:-1]]
        if poisoned not in read:
            assert_same(before, output)
            continue
        count = max(0, read.index(poisoned) + 1 - len(before.prompt_token_ids))
        assert output.error is not None and output.error.type == "non_finite_logits"
        assert output.token_ids == before.token_ids[:count]
        assert all(len(values) == count for values in output.columns.values())
        assert output.constraint_satisfied in (None, False)
        failed += output.constraint_satisfied is False
    assert 2 < failed < 30


# --- constraints that compile late or never -------------------------------------------------------


class SlowCompiler(GrammarCompiler):
    """Says a constraint is compiled when the test lets it."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer(), WIDTH, (END,))
        self.waited = threading.Event()
        self._held: list[tuple[Future[Grammar], Constraint]] = []

    def prepare(self, constraint: Constraint) -> Future[Grammar]:
        held: Future[Grammar] = Future()
        self._held.append((held, constraint))
        self.waited.set()
        return held

    def release(self, count: int) -> None:
        """Let the oldest of them be done."""
        for held, constraint in self._held[:count]:
            done = GrammarCompiler.prepare(self, constraint)
            error = done.exception()
            if error is None:
                held.set_result(done.result())
            else:
                held.set_exception(error)
        del self._held[:count]


@pytest.mark.quick(1)
@both_loops
def test_a_constraint_that_does_not_compile_is_an_error_of_its_row(
    tiny: CausalLM, overlap: bool
) -> None:
    params = RequestParams(constraint=NEVER, max_new_tokens=5, logprobs=True)
    bad, again = end_of(tiny, ([5, 6], params), ([5, 6], params), overlap=overlap)
    for output in (bad, again):
        assert output.error is not None and output.error.type == "bad_constraint"
        assert "regex" in str(output.error)
        assert (output.finish_reason, output.constraint_satisfied) == ("error", False)
        assert output.token_ids == [] and output.text == ""
        assert output.columns["logprobs"].shape == (0,)


@pytest.mark.thorough
@both_loops
def test_rows_run_while_the_constraints_of_others_compile(tiny: CausalLM, overlap: bool) -> None:
    slow = SlowCompiler()
    engine = make_engine(tiny, replace(SIMPLE, overlap=overlap), compiler=slow)
    free = RequestParams(temperature=0, max_new_tokens=30, ignore_eos=True)
    guided = RequestParams(constraint=DIGITS, max_new_tokens=9)
    engine.add_request("gone", [5, 6], guided)
    engine.add_request("first", [5, 7], guided)
    engine.add_request("bad", [5, 7], replace(guided, constraint=NEVER))
    engine.add_request("last", [5, 8], guided)
    engine.add_request("free", [5, 6], free)
    outputs: dict[str, RequestOutput] = {}
    for step in range(20):
        outputs |= {output.request_id: output for output in engine.step()}
        if step == 3:
            assert len(engine.scheduler.running) == 1
            assert engine.abort("gone") and not engine.abort("gone")
        if step == 5:
            slow.release(2)
        if step == 6:
            assert len(engine.scheduler.running) == 2
            engine.add_request("gone", [5, 9], guided)  # the same id, another row
    slow.release(3)
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    assert len(outputs) == 5 and outputs["bad"].finish_reason == "error"
    alone = [("gone", 9, guided), ("first", 7, guided), ("last", 8, guided), ("free", 6, free)]
    for name, token_id, params in alone:
        assert_same(run(make_engine(tiny), [([5, token_id], params)])[0], outputs[name])


def test_a_tokenizer_that_constraints_do_not_work_with_leaves_no_row_behind(
    tiny: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is made when the first constrained row comes."""

    def refuse(self: GrammarCompiler, *_: object) -> None:
        raise ConstraintError("constraints need another tokenizer")

    engine = make_engine(tiny, compiler=None)
    monkeypatch.setattr(GrammarCompiler, "__init__", refuse)
    with pytest.raises(ConstraintError, match="another tokenizer"):
        engine.add_request("0", [5], RequestParams(constraint=AB))
    assert not engine.has_unfinished()
    assert run(engine, [([5, 6], RequestParams(temperature=0, max_new_tokens=3))])[0].token_ids


@both_loops
def test_an_engine_with_nothing_else_to_do_waits(tiny: CausalLM, overlap: bool) -> None:
    """It returns when there is something to run, and not before."""
    slow = SlowCompiler()
    engine = make_engine(tiny, replace(SIMPLE, overlap=overlap), compiler=slow)
    for i in range(3):
        engine.add_request(str(i), [5, 6 + i], RequestParams(constraint=AB, max_new_tokens=9))
    stepped = threading.Event()

    def step() -> None:
        engine.step()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert not stepped.wait(0.2)
    finally:
        slow.release(1)
        thread.join()
    # The others still compile.
    assert len(engine.scheduler.running) == 1 and len(engine._compiling) == 2
    assert engine.abort("1") and engine.abort("2")
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [output.text for output in outputs] == ["ab"]


def test_a_row_that_nothing_could_end_is_an_error(tiny: CausalLM) -> None:
    """Its only stop id is an EOS beyond the logits, as of a model that a vocabulary outgrew."""
    engine = LLMEngine(tiny, make_tokenizer(), (WIDTH + 1,), ARStrategy(), SIMPLE)
    params = RequestParams(constraint=AB, max_new_tokens=9)
    good = replace(params, stop_token_ids=(TURN,))
    bad, ended = run(engine, [([5, 6], params), ([5, 6], good)])
    assert bad.error is not None and bad.error.type == "bad_constraint"
    assert "stop_token_ids" in str(bad.error)
    assert ended.text == "ab" and ended.token_ids[-1] == TURN
    engine = LLMEngine(tiny, make_tokenizer(), (), ARStrategy(), SIMPLE)
    with pytest.raises(ValueError, match="ends with EOS or a stop id"):
        engine.add_request("0", [5], params)


def test_a_constraint_needs_a_tokenizer(tiny: CausalLM) -> None:
    engine = LLMEngine(tiny, None, (END,), ARStrategy(), SIMPLE)
    with pytest.raises(ValueError, match="a constraint needs a tokenizer"):
        engine.add_request("0", [5], RequestParams(constraint=AB))


# --- what comes before the marker -----------------------------------------------------------------


@pytest.mark.quick(1)
@both_loops
def test_text_before_the_marker_is_free_and_what_follows_is_not(
    tiny: CausalLM, overlap: bool
) -> None:
    params = RequestParams(max_new_tokens=40, temperature=1.5, ignore_eos=True)
    requests = [([5, 6 + i], replace(params, seed=i)) for i in range(20)]
    free = run(make_engine(tiny), requests)
    texts = "".join(output.text for output in free)
    marker = max("abcdefghijklmnopqrstuvwxyz", key=texts.count)
    constraint = replace(DIGITS, start_after=marker)
    outputs = end_of(
        tiny,
        *((p, replace(o, ignore_eos=False, constraint=constraint)) for p, o in requests),
        overlap=overlap,
    )
    found = [output for output in outputs if marker in output.text]
    assert sum(output.constraint_satisfied is True for output in found) > 3
    for output in found:
        behind = output.text.partition(marker)[2]
        digits = behind.lstrip(" \n\r\t")
        assert digits.isdigit() or not digits
        assert output.constraint_satisfied == (2 <= len(digits) <= 6)
        assert len(behind) - len(digits) <= 4
    for output in outputs:
        assert END not in output.token_ids[:-1]
        if output not in found:
            assert (output.finish_reason, output.constraint_satisfied) == ("length", False)
    lengths = []
    for before, output in zip(free, outputs, strict=True):
        # Until the marker only ids that spell nothing are excluded.
        ids = before.token_ids
        differs = (i for i in range(40) if not spells(ids[i]) or marker in decode(ids[: i + 1]))
        lengths.append(next(differs, 40))
        assert output.token_ids[: lengths[-1]] == ids[: lengths[-1]]
    assert sum(lengths) > 60


def spells(token_id: int) -> bool:
    return token_id != END and token_id < NUM_TOKENS


def decode(token_ids: list[int]) -> str:
    return str(make_tokenizer().decode(token_ids))


# --- lifecycle ------------------------------------------------------------------------------------


def live_matchers() -> int:
    return sum(type(thing) is Matcher for thing in gc.get_objects())


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is left without it is what nothing refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.thorough
@both_loops
@pytest.mark.usefixtures("no_collector")
def test_matchers_die_with_their_rows(
    tiny: CausalLM, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """At once, whether rows end, are preempted on their way or are aborted."""
    expect_short_rows(monkeypatch)
    engine = make_engine(tiny, small_cache(tiny, 100, overlap=overlap, max_num_seqs=20))
    before = live_matchers()
    requests = mixed_requests(28, 4)
    rng = random.Random(0)
    for i, request in enumerate(requests):
        engine.add_request(str(i), *request)
    most = 0
    for step in range(60):
        engine.step()
        if step % 10 == 0:
            engine.abort(str(rng.randrange(28)))
            most = max(most, live_matchers() - before)
    assert most > 15 and engine.stats.preemptions > 3
    while engine.has_unfinished():
        engine.step()
    assert live_matchers() == before
    run(engine, requests[:10])
    for i, request in enumerate(requests[:10]):
        engine.add_request(str(i), *request)
    for _ in range(3):
        engine.step()
    assert live_matchers() > before
    for i in range(10):
        engine.abort(str(i))
    # Nobody steps an engine that has nothing to do.
    assert not engine.has_unfinished() and live_matchers() == before


@pytest.mark.quick(1)
@both_loops
@pytest.mark.usefixtures("no_collector")
def test_an_engine_that_is_dropped_drops_its_compiler_and_rows(
    tiny: CausalLM, overlap: bool
) -> None:
    before = live_matchers()
    engine = make_engine(tiny, replace(SIMPLE, overlap=overlap), compiler=None)
    run(engine, mixed_requests(4))
    bad = RequestParams(constraint=NEVER)
    assert run(engine, [([5], bad)])[0].finish_reason == "error"
    for i, request in enumerate(mixed_requests(6)):
        engine.add_request(str(i), *request)
    engine.step()
    assert engine._compiling._compiler is not None
    made = weakref.ref(engine._compiling._compiler)
    del engine
    assert made() is None and live_matchers() == before


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@both_loops
def test_rows_on_a_gpu_are_those_of_the_cpu(
    tiny_model: Callable[..., Path], simple: Simple, cuda_graph: bool, overlap: bool
) -> None:
    model = load(tiny_model("llama", vocab_size=WIDTH, num_hidden_layers=2), "cuda")
    requests, expected = simple(0)
    config = replace(SIMPLE, cuda_graph=cuda_graph, overlap=overlap)
    few: dict[str, Any] = {"max_num_seqs": 7, "chunk_tokens": 16, "max_batched_tokens": 40}
    for changes in ({}, few):
        outputs = run(make_engine(model, replace(config, **changes)), requests)
        for one, other in zip(expected, outputs, strict=True):
            assert_same(one, other, atol=1e-3)


@pytest.mark.parametrize("given", [False, True])
def test_a_queue_closes_the_compiler_that_it_made(given: bool) -> None:
    own = GrammarCompiler(make_tokenizer(), WIDTH, (END,))
    queue = CompileQueue(own if given else None, make_tokenizer(), WIDTH, (END,))
    stop = StopRule({END: ""}, (), min_new_tokens=0, max_new_tokens=9)
    seq = engine_sequence.Sequence("0", [1], RequestParams(constraint=AB), stop, ())
    queue.add(seq)
    queue.close()
    queue.close()
    assert len(queue) == 0 and list(queue.take(block=True)) == []
    if given:
        assert own.compile(DIGITS)
    else:
        with pytest.raises(RuntimeError, match="closed"):
            queue.add(seq)
