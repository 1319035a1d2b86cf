"""Templates of strangers end in a word, whatever they do; those of others are as ever."""

# ruff: noqa: E501 (templates in one line)

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.engine.interface.outputs import RequestError
from batchgen.util.errors import ConfigError
from batchgen.util.templates import template_bounds as bounds
from batchgen.util.templates.row_templates import RowTemplate
from batchgen.util.templates.template_bounds import TemplateLimit
from batchgen.util.templates.template_sandbox import BoundedEnvironment
from batchgen.util.templates.used_columns import used_columns

BIG = "b" * 100_000
_NESTED = "{% set n = namespace(a=('a',), b=('a',)) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% set n.b = (n.b, n.b) %}{% endfor %}"
LARGE = [
    "{{ 'a'|center(3000000000) }}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ ['a'] * 10**9 }}",
    "{{ big.encode() * 10**6 }}",
    "{{ big.replace('b', big) }}",
    "{{ big|replace('b', big) }}",
    "{{ big|replace('', big) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{w:1000000000}'.format_map({'w': 1}) }}",
    "{{ ('{0}' * 1000).format(big) }}",
    "{{ big.join(['a'] * 10000) }}",
    "{{ (['a'] * 10000)|join(big) }}",
    "{{ range(10000)|map('string')|join(big) }}",
    "{{ big.join(range(10000)|map('string')) }}",
    "{{ 'a'.zfill(10000000000) }}",
    "{{ ('\t' * 10000).expandtabs(10000) }}",
    "{{ big.translate({98: big}) }}",
    "{{ (5).to_bytes(10000000000, 'big') }}",
    "{{ ('a\n' * 10000)|indent(10000) }}",
    "{{ [[1]]|tojson(indent=1000000000) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ ([[1]] * 10000)|sum(start=[]) }}",
    "{{ range(100000)|map('center', 1000)|list }}",
    "{% for i in range(100000) %}{{ big }}{% endfor %}",
    "{% for i in range(100000) %}" + 1000 * "x" + "{% endfor %}",
    "{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    _NESTED + "{{ n.a }}",
    _NESTED + "{{ n }}",
    _NESTED + "{{ n.a == n.b }}",
    _NESTED + "{{ n.a is eq(n.b) }}",
    _NESTED + "{{ n.a in [n.b] }}",
    _NESTED + "{{ {n.a: 1} }}",
    _NESTED + "{{ {}[n.a] }}",
    _NESTED + "{{ {}.get(n.a) }}",
    _NESTED + "{{ [n.a].index(n.b) }}",
    _NESTED + "{{ [n.a, n.b]|sort }}",
    _NESTED + "{{ [n.a, n.b]|unique|list }}",
    _NESTED + "{{ n.a|tojson }}",
    _NESTED + "{{ n.a|string|length }}",
    _NESTED + "{{ '%s' % (n.a,) }}",
]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(100) }}",
    "{{ range(100000)|select('in', range(100000)|list)|list|length }}",
]
OTHERS = [
    ("{% set n = namespace(a=9) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}{% endfor %}",
     "an integer of more than 100,000 bits"),
    ("{{ 10 ** (10 ** 10) }}", "an integer of more than 100,000 bits"),
    ("{{ 1.5|round(10000000000, 'ceil') }}", "an integer of more than 100,000 bits"),
    ("{{ ('f' * 100000)|int(base=16) }}", "an integer of more than 100,000 bits"),
    ("{{ '%*d' % (1000000000, 1) }}", "width from a value"),
    ("{{ '{:{}}'.format(1, 1000000000) }}", "width from a value"),
    ("{{ (big * 2)|wordwrap(1) }}", "its filter wordwrap is applied to more than 100,000 characters"),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    ("x" * (2**20 + 1), "has more than 1,048,576 characters"),
]  # fmt: skip


def render(source: str) -> str:
    return BoundedEnvironment().from_string(source).render(big=BIG)


@pytest.mark.quick(11)
@pytest.mark.parametrize("source", LARGE)
def test_what_would_be_large_is_refused_before_it_is_made(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MOST_CHARACTERS", 2**20)
    with pytest.raises(TemplateLimit, match="more than 1,048,576 characters"):
        render(source)


@pytest.mark.quick(2)
@pytest.mark.parametrize("source", ENDLESS)
def test_what_takes_forever_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_SECONDS", 0.2)
    with pytest.raises(TemplateLimit, match=r"takes longer than 0.2 s"):
        render(source)


@pytest.mark.parametrize(("source", "message"), OTHERS)
def test_what_grows_in_other_ways_is_refused(source: str, message: str) -> None:
    with pytest.raises(TemplateLimit, match=message):
        render(source)


def test_bounds_hold_in_every_thread_and_are_those_of_one_render(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "MOST_CHARACTERS", 300_000)
    template = BoundedEnvironment().from_string(
        "{{ big }}{{ big }}{% if more %}{{ big * 2 }}{% endif %}"
    )
    ended: list[str] = []

    def work() -> None:
        for _ in range(5):
            ended.append(str(len(template.render(big=BIG))))
        try:
            template.render(big=BIG, more=True)
        except TemplateLimit:
            ended.append("refused")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["200000"] * 15 + ["refused"] * 3


ORDINARY = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '!' }}{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }} {% endfor %}",
    "{% set n = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.content.startswith('b') and "
    "n.last == 0 %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}{{ n.last }}",
    "{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'eq', 'user')|list }}",
    "{{ messages|tojson }}{{ messages|tojson(indent=2) }}{{ messages[0].content.split('o')[-1] }}",
    "{{ '%05d %s' % (n, 'x') }}{{ '{:>8}|{}'.format(n, 'é') }}{{ 'a'|center(9) }}{{ ['a', 'b']|join }}",
    "{% macro f(x) %}[{{ x|upper|trim }}]{% endmacro %}{{ f(' é ') }}{{ 7 % 3 }}{{ 2 ** 10 }}{{ 'a' * 3 }}",
    "{{ [1, 2] + [3] }}{{ n + 1 }}{{ (n, 'a') == (n, 'a') }}{{ {'a': 1}['a'] }}{{ [3, 1, 2]|sort }}",
    "{{ text|replace('o', '0')|indent(2) }}{{ 'ab\tc'.expandtabs(4) }}{{ text|truncate(20) }}{{ none }}",
    "{{ '-'.join(messages|map(attribute='role')) }}{{ [1, 2, 3]|sum }}{{ 2.567|round(1) }}{{ text|wordcount }}",
    "{% filter upper %}{{ text }}{% endfilter %}{% set x %}a{{ n }}{% endset %}{{ x ~ x }}{{ text[2:5] }}",
    "{{ [3, 4]|batch(3, 'x')|list }}{{ range(5)|list }}{{ 'a' in text }}{{ n in (1, 7) }}{{ text is string }}",
]  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("source", ORDINARY)
@given(text=st.text(max_size=80), n=st.integers(0, 10**12))
def test_ordinary_templates_say_what_jinja_says(source: str, text: str, n: int) -> None:
    roles = ("system", "user", "assistant")
    messages = [{"role": role, "content": text + "boo"} for role in roles]
    values: dict[str, Any] = {"messages": messages, "text": text, "n": n}
    usual = ImmutableSandboxedEnvironment().from_string(source).render(values)
    assert BoundedEnvironment().from_string(source).render(values) == usual


def test_the_error_of_a_row_names_the_template_and_the_bound() -> None:
    template = RowTemplate("prompt.user", "{{ q * n }}", ["q", "n"])
    assert template.render({"q": "ab", "n": 2}) == "abab"
    with pytest.raises(RequestError, match=r"^prompt.user: .* more than 67,108,864 char") as raised:
        template.render({"q": "ab", "n": 10**10})
    assert raised.value.type == "template_error"


def test_looking_for_columns_makes_nothing_large() -> None:
    source = "{% if n %}{{ 'a'|center(3000000000) }}{% endif %}{{ q }}"
    tracemalloc.start()
    try:
        assert used_columns({"user": source}) == ["n", "q"]
        assert RowTemplate("prompt.user", source, ["q", "n"]).render({"q": "x", "n": 0}) == "x"
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_template_that_cannot_be_compiled_is_refused() -> None:
    deep = "{{ " + "(" * 3000 + "q" + ")" * 3000 + " }}"
    with pytest.raises(ConfigError, match=r"prompt.user: it is nested too deeply"):
        RowTemplate("prompt.user", deep, ["q"])
    assert used_columns({"user": deep}) == []
