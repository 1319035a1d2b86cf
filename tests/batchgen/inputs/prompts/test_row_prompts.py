"""Prompts: what the tokenizer gets, and every row and configuration that gives none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from datasets import Value

from batchgen.config.groups.prompt_config import (
    ChatPromptConfig,
    OpenAIPromptConfig,
    PromptConfig,
    TextPromptConfig,
    TokensPromptConfig,
)
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import Prompt, build_prompt, constant_prompt_refusal
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_templates import RowTemplate
from tests.support.jobs.byte_prompts import BOS, TOKENIZER, build, byte_tokenizer, chat, row


def shown(prompt: Prompt, **fields: Any) -> str:
    return str(TOKENIZER.decode(prompt.token_ids(row(**fields))))


def test_chat_has_one_bos_and_ends_where_the_answer_starts() -> None:
    prompt = build(ChatPromptConfig(user="{{ q }}?", system="Be {{ note }}."))
    ids = prompt.token_ids(row(q="Why", note="kind"))
    assert ids.count(BOS) == 1
    assert TOKENIZER.decode(ids) == "<s><system>Be kind.</><user>Why?</><assistant>"


def test_template_kwargs_reach_the_chat_template() -> None:
    prompt = build(ChatPromptConfig(user="x", template_kwargs={"enable_thinking": False}))
    assert shown(prompt) == "<s><user>x</><assistant><no_think>"
    own = build(
        ChatPromptConfig(user="x", template_kwargs={"chat_template": "{{ messages[0].content }}"})
    )
    assert shown(own) == "x"


def test_messages_column() -> None:
    turns = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "name": None},
        {"role": "user", "content": "c", "name": None},
    ]
    plain = build(ChatPromptConfig(messages_column="messages"))
    assert shown(plain, messages=turns) == "<s><user>a</><assistant>b</><user>c</><assistant>"
    system = build(ChatPromptConfig(messages_column="messages", system="S{{ n }}"))
    assert shown(system, messages=turns[:1], n=1) == "<s><system>S1</><user>a</><assistant>"
    assert "name" in turns[0]


def test_conversations_of_sharegpt() -> None:
    turns = [
        {"from": "system", "value": "s", "role": None, "weight": None},
        {"from": "human", "value": "a", "role": None, "weight": 1},
        {"from": "gpt", "value": "b", "role": None, "weight": 0},
        {"from": "user", "value": "c", "role": None, "weight": None},
    ]
    prompt = build(ChatPromptConfig(messages_column="messages"))
    assert shown(prompt, messages=turns) == (
        "<s><system>s</><user>a</><assistant>b</><user>c</><assistant>"
    )


def test_messages_that_end_with_the_assistants_get_a_further_turn() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt = build(ChatPromptConfig(messages_column="messages"))
    assert shown(prompt, messages=turns) == "<s><user>a</><assistant>b</><assistant>"


def test_roles_that_the_chat_template_asks_for_are_known() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'critic' %}C{% endif %}{{ m.content }}"
        "{% endfor %}x"
    )
    kwargs = {"chat_template": template}
    prompt = build(ChatPromptConfig(messages_column="messages", template_kwargs=kwargs))
    assert shown(prompt, messages=[{"role": "critic", "content": "a"}]) == "Cax"
    with pytest.raises(RequestError, match=r"use system, user, .*, developer, critic$"):
        prompt.token_ids(row(messages=[{"role": "poet", "content": "a"}]))


def test_nested_columns() -> None:
    columns = {"body": {"messages": [{"role": Value("string")}], "ids": Value("int64")}}
    fields = {"body": {"messages": [{"role": "user", "content": "a"}], "ids": [1, 2]}}
    chat = ChatPromptConfig(messages_column="body.messages")
    prompt = build_prompt(chat, TOKENIZER, vocab_size=257, columns=columns)
    assert shown(prompt, **fields) == "<s><user>a</><assistant>"
    with pytest.raises(RequestError, match=r"'body\.messages' must hold a list .*, got None"):
        prompt.token_ids(row(body=None))
    tokens = TokensPromptConfig(token_ids_column="body.ids")
    ids = build_prompt(tokens, None, vocab_size=257, columns=columns)
    assert ids.token_ids(row(**fields)) == [1, 2]


def test_the_text_before_it_becomes_tokens() -> None:
    assert build(ChatPromptConfig(user="{{ q }}")).text(row(q="x")) == "<s><user>x</><assistant>"
    assert build(TextPromptConfig(text="{{ q }}")).text(row(q="x")) == "x"
    assert build(TokensPromptConfig(token_ids_column="ids"), None).text(row(ids=[1])) is None


@pytest.mark.parametrize(
    ("config", "constant"),
    [
        (ChatPromptConfig(user="t.jinja"), True),
        (ChatPromptConfig(user="Hi", system="Be kind."), True),
        (ChatPromptConfig(user="{{ q }}", system="Be kind."), False),
        (ChatPromptConfig(user="Summarise.", system="{{ q }}"), False),
        (ChatPromptConfig(messages_column="messages", system="Be kind."), False),
        (TextPromptConfig(text="Hi {% set a = 1 %}{{ a }}"), True),
        (TextPromptConfig(text="{{ row.q }}"), False),
        (TokensPromptConfig(token_ids_column="ids"), False),
    ],
)
def test_prompts_without_a_column(config: PromptConfig, constant: bool) -> None:
    assert build(config).is_constant == constant


def test_the_refusal_of_a_constant_prompt_shows_it() -> None:
    said = constant_prompt_refusal(
        "prompt.text", build(TextPromptConfig(text="q")), row(a="", q="x")
    )
    assert "write {{ q }} for the column q (prompt.text_file=…" in said
    assert said.endswith("The prompt:\nq")


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        *(("Say {q}.", True), ("{ q }", True), ("A:{q}", True), ("{% if q %}{q}{% endif %}", True)),
        *(("{{ q }}", False), ("{{ '{q}' }}", False), ("{z}", False), ("{q: 1}", False)),
        *((r"\boxed{q}", False), (r"\frac{1}{q}", False), ("x^{q}", False), ("{ {{ q }}}", False)),
        *(("{# {q} #}", False), ("f(x)_{q}", False)),
    ],
)
def test_a_column_in_single_braces(text: str, refused: bool) -> None:
    if not refused:
        RowTemplate("prompt.user", text, ["q"])
        return
    with pytest.raises(ConfigError, match=r"is plain text and not a column: write \{\{ q \}\}"):
        RowTemplate("prompt.user", text, ["q"])


def test_text_gets_the_tokenizers_special_tokens_unless_told() -> None:
    assert shown(build(TextPromptConfig(text="{{ q }}\n")), q="x") == "<s>x\n"
    bare = build(TextPromptConfig(text="{{ q }}", add_special_tokens=False))
    assert shown(bare, q="x") == "x"


def test_token_ids_are_taken_as_they_are() -> None:
    prompt = build(TokensPromptConfig(token_ids_column="ids"), tokenizer=None)
    assert prompt.token_ids(row(ids=[5, 0, 256])) == [5, 0, 256]


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        ("{{ q }}", {"q": "<b> & 'ü🙂'"}, "<b> & 'ü🙂'"),
        ("{{ note or 'none' }}", {"note": None}, "none"),
        ("{% if note %}{{ note }}{% else %}-{% endif %}", {"note": None}, "-"),
        ("{{ hint | default('no hint') }}", {"q": ""}, "no hint"),
        ("{% if hint is defined %}{{ hint }}{% endif %}.", {"q": ""}, "."),
        ("{% for i in items %}{{ i.a }}{% endfor %}", {"items": [{"a": 1}, {"a": 2}]}, "12"),
        ("{{ row['two words'] }} {{ row.q }}", {"two words": "x", "q": "y"}, "x y"),
        ("{{ items | tojson }}", {"items": [{"a": "<ü>"}]}, '[{"a": "<ü>"}]'),
        ("{{ n / 4 }} {{ '%.2f' | format(n) }}", {"n": 3}, "0.75 3.00"),
        ("{% set w = q %}{{ w }}{{ range(3) | list }}", {"q": "x"}, "x[0, 1, 2]"),
    ],
)
def test_templates(template: str, fields: dict[str, Any], text: str) -> None:
    prompt = build(TextPromptConfig(text=template, add_special_tokens=False))
    assert shown(prompt, **fields) == text


def test_rows_are_not_changed_and_prompts_repeat() -> None:
    fields = {"messages": [{"role": "user", "content": "a", "name": None}], "note": "s"}
    prompt = build(ChatPromptConfig(messages_column="messages", system="{{ note }}"))
    first = prompt.token_ids(row(**fields))
    assert prompt.token_ids(row(**fields)) == first
    assert fields == {"messages": [{"role": "user", "content": "a", "name": None}], "note": "s"}


def test_prompts_name_the_day_of_the_job() -> None:
    tokenizer = byte_tokenizer("{{ strftime_now('%d %b %Y %H:%M') }}{{ messages[0].content }}")
    columns = {"q": Value("string"), "body": Value("string")}
    body = {"messages": [{"role": "user", "content": "x"}]}
    asked: list[tuple[ChatPromptConfig | OpenAIPromptConfig, Row]] = [
        (ChatPromptConfig(user="{{ q }}"), row(q="x")),
        (OpenAIPromptConfig(), row(body=body)),
    ]
    for config, asking in asked:
        dated = replace(config, date="2026-03-04")
        for each, of_job in ((dated, "1999-01-01"), (config, "2026-03-04")):
            day = partial(str, of_job)
            made = build_prompt(each, tokenizer, vocab_size=300, columns=columns, day=day)
            assert made.day == "2026-03-04" and made.text(asking) == "04 Mar 2026 00:00x"
    assert chat("{{ messages }}").day is None
