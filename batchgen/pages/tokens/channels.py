"""Splits the output of a gpt-oss model into reasoning, answer and tool calls.

These models write messages in the format Harmony. A message is a header and a text:

    <|start|>assistant to=functions.NAME<|channel|>commentary
    <|constrain|>json<|message|>TEXT<|call|>

The header names a role, a recipient (`to=`, for a tool call), a channel and the kind of the text,
of which all but the message itself may be missing. The channel is `analysis` (reasoning),
`commentary` (tool calls, and remarks) or `final` (the answer). `<|end|>`, `<|return|>` or
`<|call|>` ends a message. The prompt usually ends after `<|start|>assistant`.

`HarmonyChannels.split` is the entry point: it cuts the tokens of an output into messages
(`Messages`), and returns the text of the channel `final` and the other texts as columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from batchgen.engine.constraint.harmony import FINAL, WHITESPACE, HarmonyTokens
from batchgen.engine.interface.outputs import FinishReason, RequestOutput
from batchgen.engine.rows.stopping import decode
from batchgen.storage.shards.output_fields import CHANNEL, REASONING, TEXT, described_field
from batchgen.storage.shards.output_schema import SplitOutput

ANALYSIS, COMMENTARY = "analysis", "commentary"
_CHANNELS = (ANALYSIS, COMMENTARY, FINAL)
HEADER = "header"
"""The channel of a row that was cut before a message began."""
_BLANK_LINE = "\n\n"
# The parts of a header, each with the white space around it.
_ROLE = re.compile(r"\s*(assistant|user|system|developer|tool|functions\.\S+)?\s*")
_TO = re.compile(r"\s*to=(\S+)\s*")
_KIND = re.compile(r"\s*(json|code)?\s*")
_PEOPLE = ("assistant", "user", "all")
"""Recipients that are not tools."""
_FIELDS = (
    described_field(REASONING, pa.string(), "the channel analysis; null without one, and on error"),
    described_field(
        COMMENTARY,
        pa.string(),
        "what the model writes besides analysis, answer and calls; null if there is none",
    ),
    described_field(
        "tool_calls",
        pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())])),
        "the tools that the model calls, with arguments as it wrote them; null without a call",
    ),
    described_field(
        CHANNEL,
        pa.string(),
        "where the row ended: analysis, commentary, final, or header (before a message began); "
        "null if nothing was begun, and on error",
    ),
)


@dataclass(slots=True)
class Message:
    """One message, as token ids. A part that has not begun is None.

    Attributes:
        role: the tokens before `<|channel|>`: the role and perhaps a recipient.
        channel: the tokens after `<|channel|>`: the channel and perhaps a recipient.
        kind: the tokens after `<|constrain|>`.
        content: the tokens after `<|message|>`: the text.
        end: the token that ended the message; None if it has not ended, or a new header ended it.
        has_role: whether a role is expected. It is not after a prompt without Harmony tokens.
    """

    role: list[int] = field(default_factory=list)
    channel: list[int] | None = None
    kind: list[int] | None = None
    content: list[int] | None = None
    end: int | None = None
    has_role: bool = True

    @property
    def is_begun(self) -> bool:
        """Whether the message has any token."""
        return bool(self.role) or self.last is not self.role

    @property
    def last(self) -> list[int]:
        """The part to which the next token of text belongs."""
        parts = (self.content, self.kind, self.channel)
        return next((part for part in parts if part is not None), self.role)


class Messages:
    """Cuts token ids into messages. Every sequence of ids is accepted: a message without an end
    token ends where the next header begins, and text before the first header is a message, too.

    Attributes:
        ended: the messages that have ended.
        open: the message that has not ended; it may be empty.
    """

    def __init__(self, tokens: HarmonyTokens, prompt: Sequence[int] = ()) -> None:
        """Begin after a prompt. If its last message has not ended, the output continues it. Only
        its header is kept, because the text of a prompt is no output."""
        self._tokens, self._format = tokens, tokens.all  # the ids of all tokens of the format
        self.ended: list[Message] = []
        self.open = Message(has_role=False)
        if tokens.start in prompt:
            last_start = len(prompt) - 1 - prompt[::-1].index(tokens.start)
            self.read(prompt[last_start:])
            self.ended = []
            if self.open.content is not None:
                self.open.content = []

    def read(self, ids: Sequence[int]) -> None:
        """Read the next ids."""
        rest_start = 0
        for index in [index for index, id in enumerate(ids) if id in self._format]:
            self.open.last.extend(ids[rest_start:index])
            self._take(ids[index])
            rest_start = index + 1
        self.open.last.extend(ids[rest_start:])

    def _take(self, id: int) -> None:
        """Read a token of the format."""
        tokens, current = self._tokens, self.open
        if id == tokens.message:
            current.content = [] if current.content is None else current.content
        elif id == tokens.constrain:
            if current.content is None and current.kind is None:
                current.kind = []
        elif id == tokens.channel:
            if current.last is not current.role:  # a second channel begins another message
                self._end(end=None)
            self.open.channel = []
        else:
            self._end(end=None if id == tokens.start else id)

    @property
    def all(self) -> list[Message]:
        """The messages so far, including the open one if it has begun."""
        return [*self.ended, *([self.open] if self.open.is_begun else [])]

    def _end(self, *, end: int | None) -> None:
        """End the open message with the token `end`, and open the next one."""
        self.open.end = end
        if self.open.is_begun or end == self._tokens.call:
            self.ended.append(self.open)
        self.open = Message()


class _Part(NamedTuple):
    """A piece of text of a message.

    Attributes:
        channel: its channel; None if no header names one.
        tool: the tool that a call names, or None.
        is_header: whether the message has no text, only a header.
    """

    channel: str | None
    text: str
    is_call: bool = False
    tool: str | None = None
    is_header: bool = False


class HarmonyChannels:
    """Splits the text of a row by channel, from the ids of its tokens.

    Attributes:
        fields: the columns that it fills besides the text.
    """

    fields = _FIELDS

    def __init__(self, tokens: HarmonyTokens, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokens, self._tokenizer = tokens, tokenizer
        self._format = tokens.all

    def split(self, output: RequestOutput) -> SplitOutput:
        """Return the output with the answer as its text, and the values of the columns.

        If there is no answer, the text in the output folder is null, so `columns` sets it to None.
        If the model ended by itself, the finish reason is `stop` after the channel `final`,
        `tool_call` after a call, and `no_answer` otherwise.
        """
        if output.finish_reason == "error":
            return SplitOutput(output)
        messages = Messages(self._tokens, output.prompt_token_ids)
        messages.read(output.token_ids)
        parts = [part for message in messages.all for part in self._parts(message)]
        parts = _without_end(parts, self._num_cut(output))
        named = {channel: _texts(parts, channel) for channel in (ANALYSIS, FINAL, None)}
        # If the model leaves out the format, text without a channel is the answer.
        is_plain = not named[FINAL] and bool(named[None])
        answer = named[None] if is_plain else named[FINAL]
        others = [
            part.text
            for part in parts
            if not part.is_call and not part.is_header
            if part.channel == COMMENTARY or (part.channel is None and not is_plain)
        ]
        calls = [{"name": part.tool, "arguments": part.text} for part in parts if part.is_call]
        channel = _ended_in(parts, is_plain=is_plain)
        columns = {
            REASONING: _joined(named[ANALYSIS]),
            COMMENTARY: _joined(others),
            "tool_calls": calls or None,
            CHANNEL: channel,
            **({} if answer else {TEXT: None}),
        }
        reason = self._reason(output, channel)
        return SplitOutput(
            replace(output, text=_joined(answer) or "", finish_reason=reason), columns
        )

    def _reason(self, output: RequestOutput, channel: str | None) -> FinishReason:
        """Return the finish reason of an output that ends in `channel`; see `split`."""
        if output.finish_reason != "stop":
            return output.finish_reason
        if output.token_ids[-1] == self._tokens.call:
            return "tool_call"
        return "stop" if channel == FINAL else "no_answer"

    def _num_cut(self, output: RequestOutput) -> int:
        """Return how many characters of the decoded tokens are not part of the output's text: a
        stop string, or the text of a stop token."""
        if output.finish_reason != "stop" or output.token_ids[-1] in self._format:
            return 0
        return len(self._decoded(output.token_ids)) - len(output.text)

    def _parts(self, message: Message) -> list[_Part]:
        """Return the text of a message, after any text of its header that is not part of the
        format."""
        has_text = message.content is not None
        role, tool, before = "", None, self._decoded(message.role)
        if message.has_role:
            role, before = _headed(_ROLE, before)
            tool, before = _addressed(before)
        channel, content_start = None, before
        if message.channel is not None:
            channel, content_start = _named(self._decoded(message.channel))
            named, content_start = _addressed(content_start)
            tool = tool or named
        if message.kind is not None:
            _, after_kind = _headed(_KIND, self._decoded(message.kind))
            content_start += after_kind
        text = self._decoded(message.content) if message.content is not None else content_start
        is_call = message.end == self._tokens.call or (tool is not None and channel != FINAL)
        parts = []
        if message.channel is not None and before.strip():
            parts.append(_Part(channel=None, text=before))
        if channel is None and role not in ("", "assistant"):
            channel = COMMENTARY
        is_bare = not has_text and not text.strip() and message.end != self._tokens.call
        tool = None if tool is None else tool.removeprefix("functions.")
        text_part = _Part(
            channel, text, is_call=is_call and not is_bare, tool=tool, is_header=is_bare
        )
        return [*parts, text_part]

    def _decoded(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids) if ids else ""


def _headed(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    """Split a text into its first word, as group 1 of the pattern matches it, and the rest. The
    word is empty if the pattern does not match."""
    match = pattern.match(text)
    word = match and match[1]
    return (word, text[match.end() :]) if match and word else ("", text)


def _addressed(text: str) -> tuple[str | None, str]:
    """Return the tool that a header names as recipient, or None, and the header without that."""
    match = _TO.match(text)
    if match is None:
        return None, text
    return None if match[1] in _PEOPLE else match[1], text[match.end() :]


def _named(header: str) -> tuple[str | None, str]:
    """Return the channel that a header names, or None, and the text after the name.

    An unknown name counts as commentary. It is returned as text, too, unless it may be the
    beginning of a known name: then the output was cut in the middle of it.
    """
    header = header.strip(WHITESPACE)
    for channel in _CHANNELS:
        if header.lower().startswith(channel):
            return channel, header[len(channel) :].lstrip(WHITESPACE)
    is_begun = any(channel.startswith(header.lower()) for channel in _CHANNELS)
    return (COMMENTARY if header else None), ("" if is_begun else header)


def _without_end(parts: Sequence[_Part], size: int) -> list[_Part]:
    """Return the parts without the last `size` characters of the last one."""
    if not size or not parts:
        return list(parts)
    last = parts[-1]
    return [*parts[:-1], last._replace(text=last.text[: max(0, len(last.text) - size)])]


def _texts(parts: Sequence[_Part], channel: str | None) -> list[str]:
    """Return the texts of a channel, without calls."""
    return [
        part.text
        for part in parts
        if part.channel == channel and not part.is_call and not part.is_header
    ]


def _joined(texts: Sequence[str]) -> str | None:
    """Return texts with a blank line between them; None if there are none."""
    return _BLANK_LINE.join(filter(None, texts)) if texts else None


def _ended_in(parts: Sequence[_Part], *, is_plain: bool) -> str | None:
    """Return the channel of the last part. `is_plain`: text without a channel is the answer."""
    if not parts:
        return None
    last = parts[-1]
    if last.is_header:
        return HEADER
    return last.channel or (FINAL if is_plain and not last.is_call else COMMENTARY)
