"""What a chat template takes of messages, and that what it leaves out is an error."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.chat_prompt import ChatPrompt
from batchgen.util.errors import ConfigError
from tests.support.jobs.byte_prompts import byte_tokenizer

ROLES = "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
END = "{% endif %}{% endfor %}"
OBJECT = ROLES + (
    "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}>{{ c.function.arguments | tojson }}{% endfor %}" + END
)
ITEMS = OBJECT.replace(
    "{{ c.function.arguments | tojson }}",
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
)
TEXT = OBJECT.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
PRINTED = OBJECT.replace("c.function.arguments | tojson", "c.function.arguments")
BOTH = OBJECT.replace(
    "{{ c.function.arguments | tojson }}",
    "{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}",
)
ESCAPED = '{"city": "Oslo", "n": 1.0}'


def prompt(template: str, **keys: Any) -> ChatPrompt:
    keys = keys or {"messages_column": "messages"}
    return ChatPrompt(
        ChatPromptConfig(**keys), byte_tokenizer(template), dict.fromkeys(["messages", "q"])
    )


def text(template: str, *messages: dict[str, Any], **keys: Any) -> str:
    if keys:
        keys["messages_column"] = "messages"
    return prompt(template, **keys).text(Row(0, "0", {"messages": list(messages)}))


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, content: Any = "") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return say("assistant", content, tool_calls=[{"type": "function", "function": function}])


USER = say("user", "hi")


@pytest.mark.parametrize("arguments", [ESCAPED, {"city": "Oslo", "n": 1.0}])
@pytest.mark.parametrize(
    ("template", "written"),
    [
        (OBJECT, ESCAPED),
        (ITEMS, "city=Oslo;n=1.0;"),
        (TEXT, ESCAPED),
        (PRINTED, ESCAPED),
        (BOTH, ESCAPED),
    ],
    ids=["tojson", "items", "text", "printed", "both"],
)
def test_arguments_have_the_form_of_the_template(
    template: str, written: str, arguments: Any
) -> None:
    for content in ("", None, "so"):
        made = text(template, USER, call(arguments, content))
        assert made == f"<user>hi<assistant>{content or ''}<f>{written}"


def test_a_text_that_both_forms_allow_stays_as_it_is() -> None:
    assert text(BOTH, USER, call('{"n":1.50}')).endswith('<f>{"n":1.50}')
    assert text(TEXT, USER, call(None)).endswith("<f>{}")
    assert text(OBJECT, USER, call("")).endswith("<f>{}")


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": 1, "a": 2}', "7"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    with pytest.raises(RequestError, match=r"as an object, and .* is not a JSON object") as caught:
        text(OBJECT, USER, call(arguments))
    assert caught.value.type == "bad_messages"
    assert text(TEXT, USER, call(arguments)).endswith(arguments)


@pytest.mark.parametrize(
    "calls", ["x", [1], [{"function": "f"}], [{"function": {"name": "f", "arguments": [1]}}]]
)
def test_tool_calls_that_are_none(calls: Any) -> None:
    with pytest.raises(RequestError, match="tool") as caught:
        text(OBJECT, USER, say("assistant", "", tool_calls=calls))
    assert caught.value.type == "bad_messages"


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        (OBJECT, [say("developer", "a"), USER], r"message 0 \(developer\)"),
        (OBJECT, [USER, call("{}"), say("tool", "i")], r"message 2 \(tool\)"),
        (ROLES + "{{ m.content }}" + END, [USER, call("{}")], "the arguments of tool call 0 of"),
        (
            ROLES + "{{ m.content[:20] }}" + END,
            [say("user", "twenty letters and more")],
            r"or changes message 0",
        ),
        (
            "{{ messages[-1].content }}",
            [say("user", "a"), say("assistant", "a"), USER],
            "message 0",
        ),
    ],
)
def test_a_message_that_is_left_out_is_an_error_of_its_row(
    template: str, messages: list[Any], what: str
) -> None:
    with pytest.raises(RequestError, match=what) as caught:
        text(template, *messages)
    assert caught.value.type == "template_error" and "prompt.template_kwargs" in str(caught.value)


def test_a_content_that_depends_on_its_words_is_looked_for_itself() -> None:
    template = ROLES + "{{ '' if 'secret' in m.content else m.content }}" + END
    assert text(template, USER) == "hi"
    with pytest.raises(RequestError, match=r"message 0 \(user\), 'a secret'"):
        text(template, say("user", "a secret"))


def test_what_a_template_takes_out_by_its_name_is_meant() -> None:
    thoughts = ROLES + (
        "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] | trim }}{% else %}"
        "{{ m.content.replace('/no_think', '') | trim }}{% endif %}" + END
    )
    assert (
        text(thoughts, say("user", "/no_think hi"), say("assistant", "<think>a</think> b")) == "hib"
    )
    assert text(OBJECT.replace("m.content or ''", "m.content | tojson"), say("user", 'a "b"\n'))


def test_roles_that_a_template_leaves_out_are_refused_before_a_job() -> None:
    turns = ({"developer": "Be short."}, {"user": "{{ q }}"})
    with pytest.raises(ConfigError, match=r"prompt\.messages\[0\]\.developer: .* leaves out"):
        prompt(OBJECT, messages=turns)
    no_system = OBJECT.replace("'system', ", "")
    with pytest.raises(ConfigError, match=r"prompt\.system: .* leaves out"):
        prompt(no_system, user="{{ q }}", system="Be short.")


def test_a_content_that_is_null() -> None:
    asks = (
        "{% for m in messages %}{% if m['content'] is not none %}{{ '<M>' + m['content'] }}"
        "{% else %}<N>{% endif %}{% endfor %}"
    )
    assert text(asks, USER, call("{}", None), say("tool", "r")) == "<M>hi<N><M>r"
    adds = OBJECT.replace("m.content or ''", "'' + m.content")
    assert text(adds, USER, call(ESCAPED, None)).endswith(f"<assistant><f>{ESCAPED}")
    prints = OBJECT.replace("m.content or ''", "m.content | trim")
    assert text(prints, USER, call(ESCAPED, None)).endswith(f"<assistant><f>{ESCAPED}")
    with pytest.raises(RequestError, match="role and content must be strings"):
        text(OBJECT, say("user", None))
    with pytest.raises(RequestError, match="function_call is not supported"):
        text(OBJECT, say("assistant", "", function_call={"name": "f", "arguments": "{}"}))


def test_parts_of_text_are_text_where_no_images_are_read() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}]
    assert text(OBJECT, say("user", parts)) == "<user>a b"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(RequestError, match="has an image, but only text is read here"):
        text(OBJECT, say("user", [*parts, image]))


@pytest.mark.parametrize("last", ["is ", "is:\n", " The", "```python\n", "x", "", " \n", "a a"])
@pytest.mark.parametrize("filter", ["trim", "string"])
def test_a_message_that_goes_on_keeps_its_white_space(last: str, filter: str) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | FILTER }}</>{% endfor %}"
    made = text(template.replace("FILTER", filter), USER, say("assistant", last), continue_=True)
    assert made == f"<user>hi</><assistant>{last}"


def test_a_row_s_form_does_not_depend_on_the_rows_before_it() -> None:
    rows = [
        [USER, call(ESCAPED)],
        [USER, call({"a": 1}, None)],
        [say("developer", "x"), USER],
        [USER],
    ]

    def made(made_by: ChatPrompt, messages: list[Any]) -> str:
        try:
            return made_by.text(Row(0, "0", {"messages": messages}))
        except RequestError as error:
            return str(error)

    alone = [made(prompt(OBJECT), messages) for messages in rows]
    together = prompt(OBJECT)
    for order in (range(4), (3, 2, 1, 0), (2, 0, 3, 1)):
        assert [made(together, rows[at]) for at in order] == [alone[at] for at in order]
