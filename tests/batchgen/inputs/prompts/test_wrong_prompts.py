"""Configurations of prompts that cannot be, and rows that do not fit them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from batchgen.config.groups.prompt_config import (
    ChatPromptConfig,
    PromptConfig,
    TextPromptConfig,
    TokensPromptConfig,
)
from batchgen.engine.interface.outputs import RequestError
from batchgen.util.errors import ConfigError
from tests.support.jobs.byte_prompts import COLUMNS, TOKENIZER, build, byte_tokenizer, row, text

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ messages[0].content + '!' }}"
)

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
        "prompt.template_kwargs.thinking: the model's chat template has no such option",
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
        "prompt.text prints a value that is null (q): write {{ q or '' }} to allow that",
    ),
    (
        "missing below",
        text("{{ row['x'] }}"),
        {"q": "y"},
        "missing_field",
        "prompt.text: the row has no column 'x'; the row has q",
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
