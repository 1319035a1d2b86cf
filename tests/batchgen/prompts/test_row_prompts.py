"""Prompts: what the tokenizer gets, and every row and configuration that gives none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from datasets import Value
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchgen.config.prompt_config import (
    ChatPromptConfig,
    OpenAIPromptConfig,
    PromptConfig,
    TextPromptConfig,
    TokensPromptConfig,
)
from batchgen.dataset.source import Row
from batchgen.engine.base.outputs import RequestError
from batchgen.prompts.row_prompts import Prompt, build_prompt, constant_prompt_warning, fit_prompt
from batchgen.util.errors import ConfigError

BOS = 256
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking is defined and not "
    "enable_thinking %}<no_think>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ messages[0].content + '!' }}"
)


def byte_tokenizer(chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """A token per byte, in the order of the byte-level alphabet, then `<s>`, put before texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", BOS)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = chat_template
    return fast


TOKENIZER = byte_tokenizer()
COLUMNS = ("q", "note", "n", "items", "messages", "ids", "two words")


def build(config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None = TOKENIZER) -> Prompt:
    columns = dict.fromkeys(COLUMNS, Value("string"))
    return build_prompt(config, tokenizer, vocab_size=257, columns=columns)


def row(**fields: Any) -> Row:
    return Row(0, "0", fields)


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
    template = "{% for m in messages %}{% if m['role'] == 'critic' %}C{% endif %}{% endfor %}x"
    kwargs = {"chat_template": template}
    prompt = build(ChatPromptConfig(messages_column="messages", template_kwargs=kwargs))
    assert shown(prompt, messages=[{"role": "critic", "content": "a"}]) == "Cx"
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


def test_the_size_tells_how_much_of_a_row_is_in_its_prompt() -> None:
    chat = build(ChatPromptConfig(user="{{ q }}", system="S{{ q }}"))
    assert chat.size(row(q="äx")) == 3 + 4
    assert build(TextPromptConfig(text="{{ q }}!")).size(row(q="äx")) == 4
    assert build(TokensPromptConfig(token_ids_column="ids"), None).size(row(ids=[1, 2])) == 2
    talk = build(ChatPromptConfig(messages_column="messages"))
    one, two = ([{"role": "user", "content": text}] for text in ("a", "ab"))
    assert talk.size(row(messages=two)) == talk.size(row(messages=one)) + 1
    for config in (ChatPromptConfig(user="{{ q }}"), TextPromptConfig(text="{{ q }}")):
        with pytest.raises(RequestError, match="null"):
            build(config).size(row(q=None))


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


def test_the_warning_of_a_constant_prompt_shows_it() -> None:
    said = constant_prompt_warning(build(TextPromptConfig(text="t.jinja")), row(q="x"))
    assert said.endswith("The first prompt:\nt.jinja")
    long = constant_prompt_warning(build(TextPromptConfig(text="x" * 5000)), row(q="x"))
    assert long.endswith("\n" + "x" * 1000 + "…")
    wrong = constant_prompt_warning(build(TextPromptConfig(text="{{ 1 / 0 }}")), row(q="x"))
    assert wrong.endswith("\n(prompt.text: ZeroDivisionError: division by zero)")


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


WRONG_CONFIGS: list[tuple[str, PromptConfig, PreTrainedTokenizerBase | None, str]] = [
    (
        "syntax",
        ChatPromptConfig(user="a\n{{ q"),
        TOKENIZER,
        "prompt.user, line 2: unexpected end of template, expected 'end of print statement'.",
    ),
    (
        "filter",
        ChatPromptConfig(user="{{ q | shout }}"),
        TOKENIZER,
        "prompt.user, line 1: No filter named 'shout'.",
    ),
    (
        "column",
        ChatPromptConfig(user="{{ question }}"),
        TOKENIZER,
        f"prompt.user: the data set has no column 'question': choose among {', '.join(COLUMNS)}",
    ),
    (
        "column of the system message",
        ChatPromptConfig(user="x", system="{{ who }}"),
        TOKENIZER,
        f"prompt.system: the data set has no column 'who': choose among {', '.join(COLUMNS)}",
    ),
    (
        "messages column",
        ChatPromptConfig(messages_column="chat"),
        TOKENIZER,
        "prompt.messages_column: the data set has no column 'chat': choose among "
        + ", ".join(COLUMNS),
    ),
    (
        "ids column",
        TokensPromptConfig(token_ids_column="tokens"),
        None,
        "prompt.token_ids_column: the data set has no column 'tokens': choose among "
        + ", ".join(COLUMNS),
    ),
    (
        "no chat template",
        ChatPromptConfig(user="x"),
        byte_tokenizer(None),
        "prompt.kind=chat: the model's tokenizer has no chat template: use prompt=text and write "
        "the whole prompt",
    ),
    (
        "no tokenizer",
        TextPromptConfig(text="x"),
        None,
        "prompt.kind=text needs a tokenizer, and the model comes without one: use prompt=tokens",
    ),
    (
        "unknown option",
        ChatPromptConfig(user="x", template_kwargs={"thinking": True}),
        TOKENIZER,
        "prompt.template_kwargs.thinking: the model's chat template knows no such option",
    ),
    (
        "no system role",
        ChatPromptConfig(user="x", system="y"),
        byte_tokenizer(NO_SYSTEM),
        "prompt: the model's chat template cannot take the roles system and user: no system role",
    ),
]


@pytest.mark.parametrize(
    ("config", "tokenizer", "message"),
    [w[1:] for w in WRONG_CONFIGS],
    ids=[w[0] for w in WRONG_CONFIGS],
)
def test_wrong_configs(
    config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        build(config, tokenizer)
    assert str(raised.value) == message
    assert raised.value.__cause__ is None


def text(template: str) -> TextPromptConfig:
    return TextPromptConfig(text=template, add_special_tokens=False)


MESSAGES = ChatPromptConfig(messages_column="messages")
IDS = TokensPromptConfig(token_ids_column="ids")
WRONG_ROWS: list[tuple[str, PromptConfig, dict[str, Any], str, str]] = [
    (
        "missing",
        text("{{ q }}"),
        {"n": 1, "ids": []},
        "missing_field",
        "prompt.text: 'q' is undefined; the row has n, ids",
    ),
    (
        "null",
        text("{{ n }} {{ q }}"),
        {"n": 1, "q": None},
        "missing_field",
        "prompt.text prints a value that is null (q): write {{ name or '' }} where that is meant",
    ),
    (
        "missing below",
        text("{{ row['x'] }}"),
        {"q": "y"},
        "missing_field",
        "prompt.text: 'dict object' has no attribute 'x'; the row has q",
    ),
    (
        "types",
        text("{{ q + 1 }}"),
        {"q": "y"},
        "template_error",
        'prompt.text: TypeError: can only concatenate str (not "int") to str',
    ),
    (
        "division",
        text("{{ 1 / n }}"),
        {"n": 0},
        "template_error",
        "prompt.text: ZeroDivisionError: division by zero",
    ),
    (
        "sandbox",
        text("{{ q.__class__.__mro__ }}"),
        {"q": "y"},
        "template_error",
        "prompt.text: SecurityError: access to attribute '__class__' of 'str' object is unsafe.",
    ),
    (
        "change",
        text("{{ items.append(1) }}"),
        {"items": [1]},
        "template_error",
        "prompt.text: SecurityError: access to attribute 'append' of 'list' object is unsafe.",
    ),
    (
        "long loop",
        text("{% for i in range(1000000) %}{% endfor %}"),
        {"q": "y"},
        "template_error",
        "prompt.text: OverflowError: Range too big. The sandbox blocks ranges larger than "
        "MAX_RANGE (100000).",
    ),
    ("empty", text("{{ q }}"), {"q": ""}, "empty_prompt", "the prompt has no tokens"),
    (
        "no list",
        MESSAGES,
        {"messages": "hi"},
        "bad_messages",
        "column 'messages' must hold a list of {role, content}, got 'hi'",
    ),
    (
        "no messages",
        MESSAGES,
        {"messages": []},
        "bad_messages",
        "column 'messages' must hold a list of {role, content}, got []",
    ),
    (
        "no content",
        MESSAGES,
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": None}]},
        "bad_messages",
        "column 'messages', message 1: role and content must be strings, got {'role': 'user', "
        "'content': None}",
    ),
    (
        "unknown role",
        MESSAGES,
        {"messages": [{"role": "User", "content": "a"}]},
        "bad_messages",
        "column 'messages', message 0: unknown role 'User': use system, user, assistant, tool, "
        "developer",
    ),
    (
        "unknown name of ShareGPT",
        MESSAGES,
        {"messages": [{"from": "bing", "value": "a"}]},
        "bad_messages",
        "column 'messages', message 0: unknown role 'bing': use system, user, assistant, tool, "
        "developer",
    ),
    (
        "two system messages",
        ChatPromptConfig(messages_column="messages", system="x"),
        {"messages": [{"role": "system", "content": "a"}]},
        "bad_messages",
        "the row's messages have a system message of their own (messages): set prompt.system=null, "
        "or take it out of the row",
    ),
    (
        "refused by the chat template",
        ChatPromptConfig(messages_column="messages", template_kwargs={"chat_template": NO_SYSTEM}),
        {"messages": [{"role": "system", "content": "a"}]},
        "template_error",
        "the model's chat template: TemplateError: no system role",
    ),
    (
        "no ids",
        IDS,
        {"ids": None},
        "bad_token_ids",
        "column 'ids' must hold a list of integers, got None",
    ),
    ("empty ids", IDS, {"ids": []}, "empty_prompt", "the prompt has no tokens"),
    (
        "large id",
        IDS,
        {"ids": [1, 257]},
        "bad_token_ids",
        "column 'ids', position 1: 257 is not an id of the model, 0 to 256",
    ),
    (
        "negative id",
        IDS,
        {"ids": [-1]},
        "bad_token_ids",
        "column 'ids', position 0: -1 is not an id of the model, 0 to 256",
    ),
    (
        "text as id",
        IDS,
        {"ids": ["7"]},
        "bad_token_ids",
        "column 'ids', position 0: '7' is not an id of the model, 0 to 256",
    ),
    (
        "bool as id",
        IDS,
        {"ids": [True]},
        "bad_token_ids",
        "column 'ids', position 0: True is not an id of the model, 0 to 256",
    ),
]


@pytest.mark.parametrize(
    ("config", "fields", "kind", "message"),
    [w[1:] for w in WRONG_ROWS],
    ids=[w[0] for w in WRONG_ROWS],
)
def test_wrong_rows(config: PromptConfig, fields: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        build(config).token_ids(row(**fields))
    assert (raised.value.type, str(raised.value)) == (kind, message)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.integers(1, 50),
    st.sampled_from([None, BOS]),
    st.booleans(),
)
def test_truncate_left_keeps_the_tail(
    tail: list[int], max_len: int, bos_id: int | None, starts_with_bos: bool
) -> None:
    ids = [BOS] * starts_with_bos + tail
    cut = fit_prompt(ids, max_len, "truncate_left", bos_id)
    assert len(cut) == min(len(ids), max_len)
    if len(ids) > max_len > 1 and ids[0] == bos_id:
        assert cut == [bos_id, *ids[len(ids) - max_len + 1 :]]
    else:
        assert cut == ids[len(ids) - len(cut) :]


def test_a_prompt_that_is_too_long_says_what_to_do() -> None:
    assert fit_prompt([1, 2, 3], 3, "error") == [1, 2, 3]
    with pytest.raises(RequestError) as raised:
        fit_prompt([1, 2, 3], 2, "error")
    assert raised.value.type == "prompt_too_long"
    assert str(raised.value) == (
        "the prompt has 3 tokens and at most 2 leave room for the answer: raise "
        "engine.max_model_len, lower sampling.max_new_tokens, or set "
        "prompt.too_long=truncate_left"
    )


def test_rows_are_not_changed_and_prompts_repeat() -> None:
    fields = {"messages": [{"role": "user", "content": "a", "name": None}], "note": "s"}
    prompt = build(ChatPromptConfig(messages_column="messages", system="{{ note }}"))
    first = prompt.token_ids(row(**fields))
    assert prompt.token_ids(row(**fields)) == first
    assert fields == {"messages": [{"role": "user", "content": "a", "name": None}], "note": "s"}


class _NeverTokenises(PreTrainedTokenizerFast):
    """A tokenizer that may not be asked for tokens."""

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was tokenised")


@pytest.mark.parametrize(
    "config", [TextPromptConfig(text="{{ q }}"), ChatPromptConfig(user="{{ q }}")]
)
def test_a_text_that_no_tokens_could_hold_is_refused_untokenised(config: PromptConfig) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = _NeverTokenises
    columns = dict.fromkeys(COLUMNS, Value("string"))
    prompt = build_prompt(config, tokenizer, vocab_size=257, columns=columns, room=512)
    with pytest.raises(RequestError, match=r"prompt has 6,000,0\d\d bytes; 512 tokens .*2,097,152"):
        prompt.token_ids(row(q="é" * 3_000_000))


def test_a_text_that_long_tokens_could_hold_is_tokenised() -> None:
    tokenizer = byte_tokenizer()
    columns = dict.fromkeys(COLUMNS, Value("string"))
    config = TextPromptConfig(text="{{ q }}", add_special_tokens=False)
    prompt = build_prompt(config, tokenizer, vocab_size=257, columns=columns, room=2_100_000)
    assert len(prompt.token_ids(row(q="a" * 2_100_000))) == 2_100_000


def chat(template: str) -> Prompt:
    return build(ChatPromptConfig(user="{{ q }}"), byte_tokenizer(template))


def test_chat_templates_have_the_same_bounds() -> None:
    prompt = chat(
        "{% for m in messages %}{{ m.content * 10**10 if m.content == 'x' else m.content }}"
        "{% endfor %}"
    )
    assert prompt.text(row(q="good")) == "good"
    with pytest.raises(RequestError, match=r"^the model's chat template: .* more than 67,108,864"):
        prompt.text(row(q="x"))
    with pytest.raises(ConfigError, match=r"the model's chat template .* more than 67,108,864"):
        chat("{{ 'a'|center(3000000000) }}")


def test_prompts_name_the_day_of_the_job() -> None:
    tokenizer = byte_tokenizer("{{ strftime_now('%d %b %Y %H:%M') }}")
    columns = {"q": Value("string"), "body": Value("string")}
    body = {"messages": [{"role": "user", "content": "x"}]}
    asked: list[tuple[PromptConfig, Row]] = [
        (ChatPromptConfig(user="{{ q }}"), row(q="x")),
        (OpenAIPromptConfig(), row(body=body)),
    ]
    for config, asking in asked:
        dated = replace(config, date="2026-03-04")
        for each, of_job in ((dated, "1999-01-01"), (config, "2026-03-04")):
            made = build_prompt(
                each, tokenizer, vocab_size=300, columns=columns, day=lambda day=of_job: day
            )
            assert made.day == "2026-03-04" and made.text(asking) == "04 Mar 2026 00:00"
    assert chat("{{ messages }}").day is None


def test_chat_templates_keep_what_transformers_gives_them() -> None:
    prompt = chat(
        "{%- for m in messages %}\n  {%- generation %}{{ m|tojson }}{% endgeneration %}\n"
        "{%- if loop.first %}{% continue %}{% endif %}{% endfor %}{{ strftime_now('%%') }}"
    )
    assert prompt.text(row(q="é<")) == '{"role": "user", "content": "é<"}%'
    with pytest.raises(ConfigError, match="cannot take the roles user: no good"):
        chat("{{ raise_exception('no good') }}")
