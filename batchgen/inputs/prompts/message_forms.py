"""Finds out in which form a chat template accepts messages, and what it leaves out of them.

Templates expect the arguments of tool calls either as objects or as JSON text, and write the other
form wrongly, without an error. A template may also drop whole messages: those with unknown roles,
tool calls, or tools. `MessageForms` detects both by rendering a *probe*: a conversation of the same
shape, whose texts are words that occur in no template, such as `zq0qz` for message 0. The *shape*
is everything that decides how a template treats a conversation, except the texts; each shape is
probed once. A word that is missing from the rendered probe shows what the template leaves out.

`ChatPrompt` calls `MessageForms.formed` before it renders a conversation, and `MessageForms.check`
after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.prompts.formed_messages import (
    ABSENT,
    MessageForm,
    formed_message,
    named_call,
    named_tool,
    without_absent,
)
from batchgen.util.shorten import beginning
from batchgen.util.templates.template_bounds import TemplateLimit
from batchgen.util.templates.template_sandbox import RENDER_ERRORS

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Render = Callable[[Messages, Tools], str]
ADVICE = (
    "write it into a message that the template takes, or give another template with "
    "prompt.template_kwargs={chat_template: …}"
)
_MOST_SHAPES = 4096
"""The number of shapes whose forms are cached. Most data sets have a few."""
_QUOTED = re.compile(r"""'((?:[^'\\\n]|\\.){2,80})'|"((?:[^"\\\n]|\\.){2,80})\"""")
"""A string literal of 2 to 80 characters in a template's source."""


class MessageForms:
    """Converts messages into the form that a chat template accepts, and refuses those that the
    template would leave out.

    Args:
        render: returns the text of a conversation; raises RENDER_ERRORS if the template does not
            accept it.
        source: the source text of the template.
    """

    def __init__(self, render: Render, source: str) -> None:
        self._render, self._source = render, source
        self._forms: dict[Any, MessageForm] = {}

    def formed(self, messages: Messages, tools: Tools) -> Messages:
        """Return a conversation in the form that the template accepts.

        Raises:
            RequestError: template_error: the template leaves out messages of such a conversation.
                bad_messages: the template needs the arguments of a tool call as an object, and they
                are no JSON object.
        """
        form = self._form(messages, tools)
        if form is None:
            return messages
        if form.left_out is not None:
            _, description = form.left_out
            raise _left_out(description)
        return [without_absent(formed_message(message, form)) for message in messages]

    def check(self, messages: Messages, text: str) -> None:
        """Raise RequestError (template_error) if `text`, which the template has made of the
        messages, lacks the content of one."""
        for index, message in enumerate(messages):
            for content in texts_of(message):
                if content.strip() not in text and not self._is_kept(content, message, text):
                    excerpt = beginning(content, 60)
                    raise _left_out(f"or changes {_named(index, message)}, {excerpt!r}")

    def left_out(self, messages: Messages) -> tuple[int, str] | None:
        """Return the index of a message that the template leaves out, and a description of that
        message. None if the template leaves out none, or does not accept the conversation."""
        form = self._form(messages, None)
        return None if form is None else form.left_out

    def _form(self, messages: Messages, tools: Tools) -> MessageForm | None:
        """Return the form of a conversation; None if the template accepts no conversation of its
        shape in any form."""
        shape = (tools is not None, *map(_shape, messages))
        if (form := self._forms.get(shape)) is None:
            try:
                form = self._decide(messages, tools)
            except TemplateLimit as error:
                text = f"the model's chat template: {error}"
                raise RequestError("template_error", text) from None
            # That no form renders may be due to this row alone, such as an id that is too long, so
            # None is not cached.
            if form is not None:
                if len(self._forms) >= _MOST_SHAPES:
                    self._forms.clear()
                self._forms[shape] = form
        return form

    def _decide(self, messages: Messages, tools: Tools) -> MessageForm | None:
        """Try the forms for a conversation, and return the first without an omission, or else one
        that leaves something out; None if the template accepts none.

        A form has the arguments of tool calls as objects or as text, and one of three contents for
        messages with tool calls and no content: the empty text, null, or no key. The one that the
        messages have is tried first. If the template takes arguments both as objects and as text,
        they stay as they are.
        """
        calling = [message for message in messages if message.get("tool_calls")]
        empty = [message["content"] for message in calling if not message["content"]]
        # transformers renders a message whose content is null without the key.
        contents = [ABSENT, None, ""] if empty and empty[0] is None else ["", ABSENT, None]
        incomplete: MessageForm | None = None
        for content in contents if empty else contents[:1]:
            forms = [
                MessageForm(as_objects, no_content=content, left_out=None)
                for as_objects in ((True, False) if calling else (None,))
            ]
            tried = [self._try(messages, tools, form) for form in forms]
            usable = [form for form in tried if form is not None]
            complete = [form for form in usable if form.left_out is None]
            if complete:
                first = complete[0]
                return first if len(complete) == 1 else first._replace(as_objects=None)
            incomplete = incomplete or (usable[0] if usable else None)
        # The template may ignore tool calls because it has no use for them: it writes such messages
        # from their other keys.
        if incomplete is not None and empty and self._knows_no_content(messages, tools):
            return incomplete._replace(no_content=None, left_out=None)
        return incomplete

    def _knows_no_content(self, messages: Messages, tools: Tools) -> bool:
        """Return whether the template was made for messages that have tool calls and no content. It
        is taken to be if it does not mention tool calls, and still renders such a message unlike
        one with an empty content."""
        if "tool_calls" in self._source:
            return False
        forms = (MessageForm(None, no_content=content, left_out=None) for content in (None, ""))
        texts = [self._probed(messages, tools, form, []) for form in forms]
        return None not in texts and texts[0] != texts[1] and "None" not in str(texts[0])

    def _try(self, messages: Messages, tools: Tools, form: MessageForm) -> MessageForm | None:
        """Probe a form. Return it with what the template leaves out, or None if the template does
        not accept it."""
        words: list[_Word] = []
        text = self._probed(messages, tools, form, words)
        if text is None:
            return None
        for word in words:
            if word.text not in text or (word.is_key and _is_miswritten(word.text, text)):
                return form._replace(left_out=(word.message, word.what))
        if form.no_content in (None, ABSENT) and "None" in text:
            # The template writes Python's None as the content, so the empty text is better.
            with_empty = self._try(messages, tools, form._replace(no_content=""))
            if with_empty is not None and with_empty.left_out is None:
                return with_empty
        return form

    def _probed(
        self, messages: Messages, tools: Tools, form: MessageForm, words: list[_Word]
    ) -> str | None:
        """Render the probe of a conversation in a form, and append its words to `words`. Returns
        None if the template does not accept the probe."""
        probes = [_probe(at, message, form, words) for at, message in enumerate(messages)]
        named = None
        if tools is not None:
            words += [
                _Word(message=-1, text=f"zq{at}tqz", what=f"tool {at}") for at in range(len(tools))
            ]
            named = [named_tool(tool, f"zq{at}tqz") for at, tool in enumerate(tools)]
        try:
            return self._render([without_absent(probe) for probe in probes], named)
        except TemplateLimit:
            raise
        except RENDER_ERRORS:
            return None

    def _is_kept(self, content: str, message: Mapping[str, Any], text: str) -> bool:
        """Return whether a content that is not in `text` literally is there escaped as JSON, or
        without what the template removes on purpose: the reasoning of earlier turns, and switches
        such as /no_think."""
        escaped = (json.dumps(content.strip(), ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        if any(each in text for each in escaped):
            return True
        # Such parts begin or end with a text that the template's source has as a string literal.
        pieces = self._marks.split(content)
        if len(pieces) == 1:
            return False
        kept = pieces[-1:] if message["role"] == "assistant" else pieces
        return all(piece.strip() in text for piece in kept)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """The pattern of the string literals in the template's source, which it writes or looks
        for."""
        quoted = {a or b for a, b in _QUOTED.findall(self._source)}
        texts = {text.replace("\\n", "\n").strip() for text in quoted}
        longest_first = sorted(map(re.escape, filter(None, texts)), key=len, reverse=True)
        return re.compile("|".join(longest_first) or r"(?!)")


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message's content: a text, a list of parts, or None."""
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if "text" in part]


def _left_out(what: str) -> RequestError:
    return RequestError("template_error", f"the model's chat template leaves out {what}: {ADVICE}")


def _named(index: int, message: Mapping[str, Any]) -> str:
    """Return the description of a message for an error, such as "message 2 (tool)"."""
    return f"message {index} ({message['role']})"


def _shape(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return, as a hashable key, all that decides how a template treats a message, except the texts
    themselves."""
    content = message["content"]
    if isinstance(content, list):
        content = tuple((part["type"], _says(part.get("text"))) for part in content)
    elif content is not None:
        content = bool(content), _says(content)
    calls = tuple("function" in call for call in message.get("tool_calls") or ())
    return message["role"], content, calls, tuple(message)


class _Word(NamedTuple):
    """A word of a probe, which replaces a text of a message.

    Attributes:
        message: the index of the message; -1 for a tool.
        text: the word.
        what: a description of the text that it replaces, for an error.
        is_key: whether the word is a key in the arguments of a tool call.
    """

    message: int
    text: str
    what: str
    is_key: bool = False


def _is_miswritten(key: str, text: str) -> bool:
    """Return whether the arguments with this key are written as JSON within JSON, or as a Python
    dictionary."""
    return f'\\"{key}' in text or f"'{key}':" in text


def _probe(
    index: int, message: dict[str, Any], form: MessageForm, words: list[_Word]
) -> dict[str, Any]:
    """Return a message of the same shape in a form, with words instead of texts, and append the
    words to `words`."""
    named = _named(index, message)

    def word(name: str, what: str = "", is_key: bool = False) -> str:
        words.append(_Word(index, f"zq{index}{name}qz", f"{what}{named}", is_key))
        return words[-1].text

    probe, content = dict(message), message["content"]
    if isinstance(content, list):
        probe["content"] = [
            {**part, "text": word(f"p{at}", f"part {at} of ")} if _says(part.get("text")) else part
            for at, part in enumerate(content)
        ]
    elif _says(content):
        probe["content"] = word("")
    if calls := message.get("tool_calls"):
        if not content:
            probe["content"] = form.no_content
        probe["tool_calls"] = []
        for at, call in enumerate(calls):
            of = f"tool call {at} of "
            key = word(f"k{at}", f"the arguments of {of}", is_key=True)
            arguments = {key: word(f"v{at}", f"the arguments of {of}")}
            value = arguments if form.as_objects else json.dumps(arguments)
            probe["tool_calls"].append(named_call(call, f"zq{index}n{at}qz", value))
    return probe


def _says(text: str | None) -> bool:
    """Return whether a text has more than white space, so that a template should write it."""
    return text is not None and bool(text.strip())
