"""Constrained rows of block diffusion: tokens, steps and log-probabilities of the plain reference.

Their text always follows the constraint, and the rows beside them do not change.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

pytest.importorskip("xgrammar")

import batchgen
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.validator import make_validator
from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.tokenizer import eos_token_ids, load_tokenizer
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.strategies.dllm.test_dllm import RULES, RULES_AND_OVERLAP, Request, check, run
from tests.support.cases import some_slow
from tests.support.engine.dllm_reference import Forward, Language, Options, generate, model_forward
from tests.support.engine.engine_rows import expect_short_rows
from tests.support.engine.grammars import (
    END,
    PAD,
    PLAIN,
    TURN,
    WIDTH,
    compiler,
    ids,
    make_tokenizer,
)
from tests.support.engine.routers import router_ids
from tests.support.engine.schemas import SCHEMAS, random_schema

MASK = WIDTH - 1
"""Beyond the tokenizer."""
MODEL: dict[str, Any] = {"vocab_size": WIDTH, "mask_token_id": MASK}
CPU = torch.device("cpu")
PATTERNS = (
    r'\{"a":"[abc]{5,40}","thin":(true|[12]{1,3})\}',
    "(ab|abc)+[12]{0,3}",
    "(é日本|éab)x*",
    "[a-c12]{20,70}",
    '(\\{"a":12,"b":"abcabcabc"\\}){1,3}',
)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "top_logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "logprobs_mode": "processed", "top_logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "logprobs_mode": "processed"},
    {"temperature": 1.2, "min_p": 0.02, "stop_token_ids": (PAD, *ids("b", "}", "2"))},
    {"temperature": 0.9, "stop_token_ids": (TURN,), "min_new_tokens": 9},
]


def language(constraint: Constraint | None) -> Language | None:
    if constraint is None:
        return None
    return Language(constraint.text.encode(), PLAIN, lambda text: make_tokenizer().encode(text))


def requests(seed: int, count: int, longest: int = 30) -> list[Request]:
    """Rows of all options with prompts of every length modulo small blocks; one in four is free."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [rng.randrange(WIDTH) for _ in range(1 + i % 11 + 4 * (i % 3))]
        kind = KINDS[rng.randrange(len(KINDS))]
        constraint = Constraint("regex", PATTERNS[i % len(PATTERNS)]) if i % 4 != 3 else None
        params = RequestParams(
            max_new_tokens=max(rng.randint(1, longest), kind.get("min_new_tokens", 0)),
            seed=i,
            logprobs=True,
            columns=("step_map",),
            constraint=constraint,
            **kind,
        )
        made.append((prompt, params))
    return made


def favour(head: nn.Module, *texts: str, by: float = 3.0) -> None:
    """Make a model say these tokens more often, and EOS."""
    bias = torch.zeros(WIDTH)
    bias[[*ids(*texts), END]] += by
    head.register_forward_hook(lambda _, __, logits: logits + bias.to(logits.device))


FAVOURED = ("a", "b", "ab", "abc", "1", "2", '"', "}", '"}')


@pytest.fixture(scope="module")
def forward_of(tiny_model: Callable[..., Path]) -> Callable[[int], Forward]:
    folder = tiny_model("qwen3", vocab_size=WIDTH)
    model = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    favour(model.lm_head, *FAVOURED)
    return lambda length: model_forward(model, length)


def make_engine(
    tiny_model: Callable[..., Path],
    length: int,
    rule: dict[str, Any],
    *,
    device: str = "cpu",
    favoured: tuple[str, ...] = FAVOURED,
    seed: int | None = None,
    kind: str = "sdar",
    context_columns: tuple[str, ...] = (),
    **config: Any,
) -> LLMEngine:
    model = load_model(tiny_model(kind, **MODEL), device=torch.device(device), dtype=torch.float32)
    assert model.lm_head is not None
    if seed is not None:
        torch.nn.init.normal_(model.lm_head.weight, std=0.2, generator=torch.manual_seed(seed))
    favour(model.lm_head, *favoured)
    config = {"max_model_len": 128, "kv_cache_gib": 0.02, **config}
    strategy = DLLMStrategy(length, **rule)
    return LLMEngine(
        model,
        make_tokenizer(),
        (END,),
        strategy,
        EngineConfig(**config),
        compiler=compiler(),
        context_columns=context_columns,
    )


def same(found: RequestOutput, wanted: RequestOutput) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.finish_reason == wanted.finish_reason
    assert found.constraint_satisfied == wanted.constraint_satisfied
    for name, values in wanted.columns.items():
        np.testing.assert_allclose(found.columns[name], values, atol=1e-5)


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("length", "rule"),
    some_slow(
        itertools.product([2, 4, 8, 32], RULES),
        quick=list(zip([4, 2, 32, 2, 8, 4, 8, 4, 8, 8, 4, 8], RULES, strict=True)),
    ),
    ids=str,
)
def test_rows_are_those_of_the_reference(
    tiny_model: Callable[..., Path],
    forward_of: Callable[[int], Forward],
    length: int,
    rule: dict[str, Any],
) -> None:
    rows = requests(length, 9)
    config: dict[str, Any] = {"max_num_seqs": 7, "block_size": 32 if length == 32 else 8}
    plain, overlapped = (
        run(make_engine(tiny_model, length, rule, overlap=overlap, **config), rows)
        for overlap in (False, True)
    )
    options = Options(
        block_length=length, mask_token_id=MASK, eos=(END,), max_model_len=128, **rule
    )
    for output, other, (prompt, params) in zip(plain, overlapped, rows, strict=True):
        words = language(params.constraint)
        wanted = generate(forward_of(length), prompt, params, options, words)
        # Where the distribution has fewer tokens than asked for.
        nothing = [(-1, -np.inf)] * params.top_logprobs
        wanted.top_logprobs = [
            (pairs + nothing)[: params.top_logprobs] for pairs in wanted.top_logprobs
        ]
        check(output, wanted, params)
        same(other, output)
        assert output.counts["num_forwards"] == other.counts["num_forwards"] == wanted.num_forwards
        if words is not None:
            ended = output.finish_reason == "stop"
            assert output.constraint_satisfied == (ended or words.complete(output.token_ids))


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", some_slow([False, True], quick=[True]))
def test_rows_keep_the_experts_of_their_final_blocks(
    overlap: bool, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a block that a conflict cut short, of a forward that reads all its known tokens."""
    expect_short_rows(monkeypatch)
    length, rule = 8, RULES[4]
    model = Qwen3MoeForCausalLM.from_pretrained(
        tiny_model("qwen3_moe", vocab_size=WIDTH), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    favour(model.lm_head, *FAVOURED)
    rows = [
        (prompt, replace(params, columns=("step_map", ROUTED_EXPERTS)))
        for prompt, params in requests(3, 14)
    ]
    engine = make_engine(
        tiny_model, length, rule, kind="sdar_moe", context_columns=(ROUTED_EXPERTS,),
        overlap=overlap, block_size=8, max_model_len=64, kv_cache_gib=0.00007,
    )  # fmt: skip
    options = Options(block_length=length, mask_token_id=MASK, eos=(END,), max_model_len=64, **rule)
    conflicts = 0
    for output, (prompt, params) in zip(run(engine, rows), rows, strict=True):
        wanted = generate(
            model_forward(model, length), prompt, params, options, language(params.constraint)
        )
        wanted.top_logprobs = [
            (pairs + [(-1, -np.inf)] * params.top_logprobs)[: params.top_logprobs]
            for pairs in wanted.top_logprobs
        ]
        check(output, wanted, params)
        read = wanted.ids + [MASK] * (-len(wanted.ids) % length)
        experts = router_ids(model, read, length)[: len(prompt) + len(output.token_ids) - 1]
        assert output.columns[ROUTED_EXPERTS].tolist() == experts.tolist()
        conflicts += len(read) > len(wanted.ids)
    assert conflicts and engine.stats.preemptions


def without_constraint(rows: list[Request]) -> list[int]:
    return [i for i, (_, params) in enumerate(rows) if params.constraint is None]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "rule",
    some_slow([RULES[1], RULES[3], RULES[4]], quick=[RULES[3], RULES[4]]),
    ids=str,
)
def test_rows_without_a_constraint_notice_nothing(
    tiny_model: Callable[..., Path], rule: dict[str, Any]
) -> None:
    rows = requests(5, 12, longest=50)
    free = without_constraint(rows)
    alone = run(make_engine(tiny_model, 8, rule), [rows[i] for i in free])
    mixed = run(make_engine(tiny_model, 8, rule, overlap=True), rows)
    for i, wanted in zip(free, alone, strict=True):
        same(mixed[i], wanted)
        assert mixed[i].counts["num_forwards"] == wanted.counts["num_forwards"]
        assert mixed[i].constraint_satisfied is None


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [RULES[2], RULES[4]], ids=str)
@pytest.mark.parametrize("length", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_commits_may_go_alone_or_find_no_room(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    rule: dict[str, Any],
) -> None:
    rows = requests(length + 1, 12, longest=80)
    engines = [
        make_engine(tiny_model, length, rule),
        make_engine(tiny_model, length, rule | {"fused_commit": False}),
        make_engine(tiny_model, length, rule, overlap=True),
    ]
    expected, alone = (run(engine, rows) for engine in engines[:2])
    rng = random.Random(0)
    monkeypatch.setattr(DLLMStrategy, "_room", lambda self, rows: rng.choice((0, 0, 1, rows + 2)))
    tight = run(engines[2], rows)
    for wanted, one, other in zip(expected, alone, tight, strict=True):
        for found in (one, other):
            same(found, wanted)
        assert other.counts == wanted.counts
        denoising = one.counts["num_forwards"] - one.counts["num_commit_forwards"]
        assert denoising == wanted.counts["num_forwards"]
        assert wanted.counts["num_commit_forwards"] == 0
        last = len(wanted.prompt_token_ids) + len(wanted.token_ids) - 1
        # A conflict at the beginning of a block leaves nothing of it.
        last += wanted.finish_reason == "constraint_conflict"
        begun = last // length - len(wanted.prompt_token_ids) // length
        assert one.counts["num_commit_forwards"] == begun
    none, every, some = (engine.stats.strategy["commits_alone"] for engine in engines)
    assert none == 0 < some < every


@pytest.mark.thorough
@RULES_AND_OVERLAP
def test_preempted_rows_go_on_as_if_nothing_had_happened(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    rule: dict[str, Any],
    overlap: bool,
) -> None:
    rows = requests(1, 16, longest=60)
    expected = run(make_engine(tiny_model, 4, rule), rows)
    expect_short_rows(monkeypatch)
    cache: dict[str, Any] = {"max_model_len": 96, "block_size": 4, "kv_cache_gib": 0.0001}
    engine = make_engine(tiny_model, 4, rule, overlap=overlap, **cache)
    outputs = run(engine, rows)
    preempted = {i for i, output in enumerate(outputs) if output.num_preemptions}
    assert preempted - set(without_constraint(rows))
    for output, wanted in zip(outputs, expected, strict=True):
        same(output, wanted)


def live_matchers() -> int:
    gc.collect()
    return sum(type(thing) is Matcher for thing in gc.get_objects())


@pytest.mark.thorough
def test_aborts_leave_the_others_alone_and_no_matcher_behind(
    tiny_model: Callable[..., Path],
) -> None:
    rows = requests(3, 12, longest=60)
    before = live_matchers()
    expected = run(make_engine(tiny_model, 4, RULES[4]), rows)
    engine = make_engine(tiny_model, 4, RULES[4], overlap=True, max_num_seqs=6)
    for i, (prompt, params) in enumerate(rows):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    aborted = {1: "11", 3: "0", 4: "2", 6: "5"}
    for step in itertools.count():
        if step in aborted:
            assert engine.abort(aborted[step])
        if not engine.has_unfinished():
            break
        outputs |= {output.request_id: output for output in engine.step()}
        if step == 2:
            assert live_matchers() > before + 4
    assert live_matchers() == before
    assert outputs.keys() == {str(i) for i in range(len(rows))} - set(aborted.values())
    for name, output in outputs.items():
        same(output, expected[int(name)])


CLOSING = ('"', "}", "]", '"}', "1", "true", ",", '":')


def is_complete(text: str, schema: Any) -> bool:
    try:
        return bool(make_validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def checked(output: RequestOutput, schema: Any) -> bool:
    """Whether the row ended by itself; it must be right then."""
    assert output.error is None and output.finish_reason in ("stop", "length"), output
    steps = output.columns["step_map"]
    assert len(steps) == len(output.columns["logprobs"]) == len(output.token_ids)
    assert np.isfinite(output.columns["logprobs"]).all() and set(np.diff(steps)) <= {0, 1}
    if output.constraint_satisfied:
        assert is_complete(output.text, schema), output.text
    if output.finish_reason == "length":
        return False
    assert output.constraint_satisfied and output.token_ids[-1] == END
    return True


SCHEMA_CASES: list[tuple[int, dict[str, Any]]] = [(4, RULES[4]), (32, RULES[2]), (8, RULES[1])]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("length", "rule", "part"),
    [
        pytest.param(*case, part, marks=[] if i == j else [pytest.mark.slow])
        for i, case in enumerate(SCHEMA_CASES)
        for j, part in enumerate([slice(k, None, 3) for k in range(3)])
    ],
    ids=str,
)
def test_every_kind_of_schema_conforms(
    tiny_model: Callable[..., Path], length: int, rule: dict[str, Any], part: slice
) -> None:
    """Each part of the schemas is quick with one length and rule."""
    schemas = list(SCHEMAS.values())[part]
    engine = make_engine(
        tiny_model, length, rule, favoured=CLOSING, overlap=True, kv_cache_gib=0.1, block_size=32
    )
    rows = []
    for i, schema in enumerate(schemas):
        params = RequestParams(
            max_new_tokens=100,
            temperature=(0, 0.8)[i % 2],
            seed=i,
            logprobs=True,
            columns=("step_map",),
            constraint=Constraint.make("json_schema", schema),
        )
        rows.append((list(range(1 + i % (length + 1))), params))
    outputs = run(engine, rows)
    ended = [checked(output, schema) for output, schema in zip(outputs, schemas, strict=True)]
    assert len(ended) > 30 and np.mean(ended) > 0.6


@settings(max_examples=settings().max_examples // 15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_models_conform_to_random_schemas(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    rng = random.Random(seed)
    length = rng.choice((2, 4, 8, 32))
    engine = make_engine(
        tiny_model,
        length,
        rng.choice(RULES),
        seed=seed,
        favoured=CLOSING,
        overlap=rng.random() < 0.5,
        max_num_seqs=rng.choice((2, 8)),
        block_size=32,
    )
    rows: list[Request] = []
    schemas = []
    while len(rows) < 5:
        schema = random_schema(rng)
        try:
            constraint = Constraint.make("json_schema", schema, max_whitespace=rng.choice((0, 2)))
            compiler().compile(constraint)
        except ConstraintError:
            continue
        params = RequestParams(
            max_new_tokens=rng.randint(1, 48),
            temperature=rng.choice((0, 0.6, 1.3)),
            top_p=rng.choice((1, 0.7)),
            seed=rng.randrange(100),
            logprobs=True,
            columns=("step_map",),
            constraint=constraint,
        )
        rows.append(([rng.randrange(WIDTH) for _ in range(rng.randint(1, 40))], params))
        schemas.append(schema)
    for output, schema in zip(run(engine, rows), schemas, strict=True):
        checked(output, schema)


def balanced(text: str) -> bool:
    depth = list(itertools.accumulate((1 if char == "(" else -1 for char in text), initial=0))
    return set(text) <= set("()") and min(depth) == 0 == depth[-1]


THOUGHT = "</think>"
KINDS_OF_CONSTRAINTS: list[tuple[Constraint, Callable[[str], bool]]] = [
    (
        Constraint.make("choice", ["ab", "abc", "日本", '"é"']),
        {"ab", "abc", "日本", '"é"'}.__contains__,
    ),
    (Constraint.make("grammar", 'root ::= "" | "(" root ")" root'), balanced),
    (Constraint.make("json"), lambda text: isinstance(json.loads(text), dict)),
    (
        Constraint.make("regex", "[0-9]{4}-[0-9]{2}"),
        lambda text: len(text) == 7 and text[4] == "-" and text.replace("-", "").isdecimal(),
    ),
    (
        Constraint.make("json_schema", SCHEMAS["array_counts"], start_after=THOUGHT),
        lambda text: is_complete(text.partition(THOUGHT)[2], SCHEMAS["array_counts"]),
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [RULES[2], RULES[4]], ids=str)
def test_other_kinds_of_constraints(tiny_model: Callable[..., Path], rule: dict[str, Any]) -> None:
    rows = [
        (
            list(range(3, 4 + i)),
            RequestParams(max_new_tokens=100, temperature=i % 3 / 2, seed=i, constraint=constraint),
        )
        for i, (constraint, _) in enumerate(KINDS_OF_CONSTRAINTS * 4)
    ]
    favoured = (*CLOSING, THOUGHT, ")", "-")
    engine = make_engine(tiny_model, 8, rule, favoured=favoured, overlap=True, kv_cache_gib=0.05)
    ended = set()
    for i, output in enumerate(run(engine, rows)):
        assert output.error is None and output.finish_reason in ("stop", "length")
        constraint, conforms = KINDS_OF_CONSTRAINTS[i % len(KINDS_OF_CONSTRAINTS)]
        if output.finish_reason == "stop":
            assert output.constraint_satisfied and conforms(output.text), output.text
            ended.add(constraint)
    assert ended == {constraint for constraint, _ in KINDS_OF_CONSTRAINTS}


def test_no_constraint_takes_the_mask_token(tiny_model: Callable[..., Path]) -> None:
    """Though a text that is forced is cut into it, as it is one of the tokenizer's words."""
    (mask,) = ids("ab")
    folder = tiny_model("sdar", vocab_size=WIDTH, mask_token_id=mask)
    model = load_model(folder, device=torch.device("cpu"))
    config = EngineConfig(max_model_len=128, kv_cache_gib=0.02)
    engine = LLMEngine(model, make_tokenizer(), (END,), DLLMStrategy(4), config)
    params = RequestParams(max_new_tokens=8, constraint=Constraint("regex", "(ab){3}"))
    (output,) = run(engine, [([3, 4], params)])
    assert output.text == "ababab" and mask not in output.token_ids


@pytest.mark.parametrize("length", [4, 8])
def test_rows_end_at_every_offset(tiny_model: Callable[..., Path], length: int) -> None:
    """By EOS, by their length, and by a string; what comes behind in the block is dropped."""
    (letter,) = ids("a")
    base = RequestParams(
        max_new_tokens=40,
        logprobs=True,
        logprobs_mode="processed",
        columns=("step_map",),
        temperature=0,
    )
    rows, kinds = [], list(itertools.product(range(1, 2 * length + 2), ("eos", "length", "string")))
    for i, (count, kind) in enumerate(kinds):
        pattern = f"a{{{count}}}" if kind == "eos" else "a{40}"
        params = replace(base, constraint=Constraint("regex", pattern))
        if kind == "length":
            params = replace(params, max_new_tokens=count)
        elif kind == "string":
            params = replace(params, stop=("a" * count,))
        rows.append(([7] * (1 + i % length), params))
    engine = make_engine(tiny_model, length, RULES[4], favoured=("a",), overlap=True)
    for output, (count, kind) in zip(run(engine, rows), kinds, strict=True):
        ended = kind == "eos"
        assert output.token_ids == [letter] * count + [END] * ended
        assert output.finish_reason == ("length" if kind == "length" else "stop")
        assert output.constraint_satisfied == ended
        assert output.text == ("" if kind == "string" else "a" * count)
        # All letters must come, and so must what ends them.
        assert not output.columns["logprobs"].any()
        assert len(output.columns["step_map"]) == count + ended


def test_a_row_that_may_neither_go_on_nor_end(tiny_model: Callable[..., Path]) -> None:
    """What is known of its block stays, with its columns, and its neighbours go on."""
    texts = ["a" * n for n in range(1, 10)]
    stuck = [
        (
            [5] * (1 + n % 4),
            RequestParams(
                max_new_tokens=30,
                min_new_tokens=20,
                logprobs=True,
                top_logprobs=2,
                columns=("step_map",),
                seed=n,
                constraint=Constraint.make("choice", [text, text + "é"][: 1 + n % 2]),
            ),
        )
        for n, text in enumerate(texts)
    ]
    others = requests(9, 6)
    expected = run(make_engine(tiny_model, 8, RULES[4]), others)
    outputs = run(make_engine(tiny_model, 8, RULES[4], overlap=True), [*stuck, *others])
    for output, text in zip(outputs, texts, strict=False):
        assert output.finish_reason == "constraint_conflict" and output.error is None
        assert output.text in (text, text + "é") and output.constraint_satisfied
        assert all(len(values) == len(output.token_ids) for values in output.columns.values())
        assert output.columns["step_map"][0] == 1
    for output, wanted in zip(outputs[len(texts) :], expected, strict=True):
        same(output, wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_fail_alone_where_logits_are_no_numbers(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    rows = requests(11, 16, longest=40)
    expected = run(make_engine(tiny_model, 8, RULES[4]), rows)
    forward = DLLMStrategy.forward
    # Row (by its seed) → place in its first block, and step of that.
    bad = {0: (7, 1), 1: (7, 0), 4: (1, 0), 6: (7, 0), 7: (5, 0), 8: (4, 1), 9: (3, 0)}

    def poisoned(
        self: DLLMStrategy, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        output, prefilled = forward(self, runner, prefill)
        blocks = self.step_inputs.blocks
        seeds = self.step_inputs.sampling.seeds.tolist()
        for row, seed in enumerate(seeds):
            place, step = bad.get(seed, (0, -1))
            first = blocks.starts[row] == len(rows[seed][0]) // 8 * 8
            if first and blocks.denoised[row] == step and blocks.masked[row, place]:
                output.logits[row * 8 + place, 100:] = value
                failed.add(seed)
        return output, prefilled

    failed: set[int] = set()
    monkeypatch.setattr(DLLMStrategy, "forward", poisoned)
    outputs = run(make_engine(tiny_model, 8, RULES[4], overlap=True), rows)
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if i in failed:
            assert output.error is not None and output.error.type == "non_finite_logits"
            assert wanted.token_ids[: len(output.token_ids)] == output.token_ids
        else:
            same(output, wanted)
    assert len(failed) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("length", [4, 32])
def test_a_gpu_takes_the_same_tokens(
    tiny_model: Callable[..., Path], length: int, rule: dict[str, Any]
) -> None:
    rows = requests(length, 40, longest=50)
    expected = run(make_engine(tiny_model, length, rule), rows)
    modes: list[dict[str, Any]] = [
        {"overlap": False, "cuda_graph": False},
        {"overlap": True, "cuda_graph": True},
    ]
    for mode in modes:
        engine = make_engine(tiny_model, length, rule, device="cuda", block_size=32, **mode)
        for output, wanted in zip(run(engine, rows), expected, strict=True):
            assert output.token_ids == wanted.token_ids
            assert output.finish_reason == wanted.finish_reason
            assert output.constraint_satisfied == wanted.constraint_satisfied
            for name, values in wanted.columns.items():
                np.testing.assert_allclose(output.columns[name], values, atol=1e-4)


NANO = Path(batchgen.__file__).parent / "data" / "nano_sdar"


@pytest.mark.thorough
@pytest.mark.skipif(not NANO.is_dir(), reason="nano_sdar is not packaged")
def test_a_trained_model_still_answers() -> None:
    model = load_model(NANO, device=CPU, dtype=torch.float32)
    tokenizer = load_tokenizer(NANO)
    assert tokenizer is not None
    engine = LLMEngine(
        model,
        tokenizer,
        eos_token_ids(NANO, tokenizer),
        DLLMStrategy(),
        EngineConfig(max_model_len=512, kv_cache_gib=0.1),
    )
    schema = json.loads((NANO / "answer_schema.json").read_text())
    constraint = Constraint.make("json_schema", schema)
    problems = [json.loads(line) for line in (NANO / "eval.jsonl").open()][:16]
    params = RequestParams(
        temperature=0, max_new_tokens=100, constraint=constraint, columns=("step_map",)
    )
    rows = []
    for problem in problems:
        message = {"role": "user", "content": f"{problem['question']} Answer in JSON."}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        rows.append((tokenizer.encode(text, add_special_tokens=False), params))
    outputs = run(engine, rows)
    answers = [json.loads(output.text) for output in outputs]
    assert all(make_validator(schema).is_valid(answer) for answer in answers)
    right = [a["answer"] == int(p["final"]) for a, p in zip(answers, problems, strict=True)]
    assert np.mean(right) >= 0.85
    tokens = sum(len(output.token_ids) for output in outputs)
    assert tokens > 2 * sum(output.counts["num_forwards"] for output in outputs)
