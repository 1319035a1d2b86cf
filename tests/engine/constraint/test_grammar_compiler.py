"""What compiles and what does not; it compiles once, and is dropped when nothing uses it."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.constraint import compiler as grammar_module
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.matcher import Matcher, fill_all
from batchgen.engine.interface.constraint_error import ConstraintError
from tests.support.engine.grammars import (
    END,
    JSON,
    TAG,
    THINK,
    WIDTH,
    compiler,
    ids,
    make_tokenizer,
)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("regex", "(ab"), "regex: .*(not closed|unterminated)"),
        (Constraint("grammar", "root ::= foo"), 'grammar: EBNF parser error.*"foo" is not defined'),
        (
            Constraint("grammar", 'root ::= root "a"'),
            "no text that this tokenizer can spell",
        ),
        (Constraint("json_schema", '{"type":"objct"}'), "json_schema: .*objct"),
        (Constraint("structural_tag", '{"type":"structural_tag"}'), "structural_tag: "),
    ],
)
@pytest.mark.parametrize("marker", ["", THINK])
def test_what_does_not_compile_says_why(constraint: Constraint, reason: str, marker: str) -> None:
    with pytest.raises(ConstraintError, match=reason) as raised:
        compiler().compile(replace(constraint, start_after=marker))
    assert not {"cpp", "Check failed"} & set(str(raised.value).replace("/", ".").split("."))
    future = compiler().prepare(replace(constraint, start_after=marker))
    assert isinstance(future.exception(timeout=60), ConstraintError)


def test_a_grammar_with_slow_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MOST_MASK_SECONDS", 0.0)
    with pytest.raises(ConstraintError, match="avoid repeats"):
        compiler().compile(Constraint("regex", "([a-z]+ ?){1,51}"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", min_codepoint=1), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
        unique=True,
    )
)
def test_choices_are_taken_as_they_are(choices: list[str]) -> None:
    choices.append("\t\"'\\\n{}")
    grammar = compiler().compile(Constraint("choice", json.dumps(choices)))
    for choice in choices:
        matcher = Matcher(grammar, {END})
        matcher.commit(make_tokenizer().encode(choice, add_special_tokens=False))
        assert matcher.satisfied
        assert matcher.walk(ids("~", "~")) < 2


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint("json_schema", '{"enum":["née"]}'), '"née"'),
        (Constraint("json_schema", '{"enum":["x\\\\xe9e", "Größe1"]}'), '"Größe1"'),
        (Constraint("json_schema", '{"enum":["\\\\xe9e", "éa"]}'), '"\\\\xe9e"'),
        (
            Constraint(
                "json_schema",
                '{"type":"object","properties":{"über":{"const":"à1"}},"required":["über"]}',
            ),
            '{"über":"à1"}',
        ),
        (Constraint("grammar", 'root ::= "née" [^éa]'), "néeb"),
        (Constraint("regex", "né[eé]à1"), "néeà1"),
        (Constraint("choice", '["\\u007fa", "ée"]'), "\x7fa"),
    ],
)
@pytest.mark.parametrize("marker", ["", THINK])
def test_latin_letters_before_hex_digits(constraint: Constraint, text: str, marker: str) -> None:
    matcher = Matcher(compiler().compile(replace(constraint, start_after=marker)), {END})
    matcher.commit(make_tokenizer().encode(marker + text, add_special_tokens=False))
    assert matcher.satisfied


def test_structural_tags_with_such_letters_are_refused() -> None:
    tags = [TAG | {"begin": "<née>"}]
    tag = {"type": "triggered_tags", "triggers": ["<née"], "tags": tags}
    text = json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False)
    for marker in ("", THINK):
        with pytest.raises(ConstraintError, match="write its tags in ASCII"):
            compiler().compile(Constraint("structural_tag", text, start_after=marker))


def test_json_is_compact_unless_whitespace_is_asked_for() -> None:
    compact, loose = (compiler().compile(replace(JSON, max_whitespace=n)) for n in (0, 2))
    texts = ["{", '"a"', ":", "\n", " ", '"', "x", '"', ",", " "]
    assert Matcher(compact, {END}).walk(ids(*texts)) == 3
    assert Matcher(loose, {END}).walk(ids(*texts)) == len(texts)
    assert Matcher(loose, {END}).walk(ids("{", "\n\n", " ")) == 2


def small_grammar(number: int) -> Constraint:
    return Constraint("regex", f"item {number}: [a-z]{{1,5}}")


def test_equal_constraints_compile_once_and_by_several_threads() -> None:
    make = GrammarCompiler(make_tokenizer(), WIDTH, (END,))
    constraints = [small_grammar(i) for i in range(10)]
    with ThreadPoolExecutor(8) as pool:
        asked = [c for _ in range(20) for c in constraints]
        futures = list(pool.map(lambda c: make.prepare(replace(c)), asked))
    assert len(set(futures)) == 10
    assert make.prepare(replace(constraints[0], start_after="x")) not in futures
    for future, constraint in zip(futures, asked, strict=True):
        assert make.compile(constraint) is future.result()
        number = constraint.text.split(":")[0].removeprefix("item ")
        text = make_tokenizer().encode(f"item {number}: abc", add_special_tokens=False)
        matcher = Matcher(future.result(), {END})
        matcher.commit(text)
        assert matcher.satisfied


@pytest.mark.parametrize("limit", ["_CACHE_BYTES", "_CACHE_ENTRIES"])
def test_the_longest_unused_grammar_is_dropped(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = GrammarCompiler(make_tokenizer(), WIDTH, (END,))
    one = make.compile(small_grammar(0)).num_bytes
    monkeypatch.setattr(grammar_module, limit, int(one * 2.5) if limit == "_CACHE_BYTES" else 3)
    grammars = [make.compile(small_grammar(i)) for i in (0, 1, 2)]
    matcher = Matcher(grammars[1], {END})
    assert make.compile(small_grammar(0)) is grammars[0]  # used again
    make.compile(small_grammar(3))
    assert make.compile(small_grammar(0)) is grammars[0]
    assert make.compile(small_grammar(2)) is grammars[2]
    assert make.compile(small_grammar(1)) is not grammars[1]
    del grammars
    assert matcher.walk(make_tokenizer().encode("item 1: ab", add_special_tokens=False))


def test_a_closed_compiler_compiles_nothing_more_and_its_grammars_go_on() -> None:
    make = GrammarCompiler(make_tokenizer(), WIDTH, (END,))
    matcher = Matcher(make.compile(small_grammar(1)), {END})
    make.close()
    make.close()
    for number in (1, 2):
        with pytest.raises(RuntimeError, match="closed"):
            make.prepare(small_grammar(number))
    assert matcher.walk(make_tokenizer().encode("item 1: ab", add_special_tokens=False))


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
def test_nothing_outlives_its_last_reference() -> None:
    threads_before = threading.enumerate()
    make = GrammarCompiler(make_tokenizer(), WIDTH, (END,))
    matcher = Matcher(make.compile(replace(JSON, start_after=THINK)), {END})
    matcher.commit(ids("a", THINK, "{"))
    matcher.walk(ids('"a"'))
    fill_all([matcher], torch.zeros(1, 11, dtype=torch.int32), [0])
    dead = weakref.ref(matcher)
    others = [weakref.ref(thing) for thing in (matcher.grammar, make)]
    del matcher
    assert dead() is None
    for failed in range(3):
        with pytest.raises(ConstraintError):
            make.compile(Constraint("regex", "(" * (1 + failed % 2)))
    threads = [t for t in threading.enumerate() if t not in threads_before]
    assert threads
    del make
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert [ref() for ref in others] == [None, None]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_ten_thousand_matchers_leave_memory_as_it_was() -> None:
    make = GrammarCompiler(make_tokenizer(), WIDTH, (END,))
    text = ids("{", '"a"', ":", '"')
    sizes = []
    for _ in range(4):
        for i in range(500):
            schema = {"type": "object", "properties": {"a": {"type": "string"}, f"b{i}": {}}}
            grammar = make.compile(Constraint("json_schema", json.dumps(schema)))
            matchers = [Matcher(grammar, {END}) for _ in range(5)]
            for matcher in matchers:
                assert matcher.walk(text) == 4
                matcher.rewind(2)
        sizes.append(resident_bytes())
    assert max(sizes) - sizes[0] < 16 * 2**20
