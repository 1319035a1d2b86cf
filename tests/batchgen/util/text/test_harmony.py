"""Rows of Harmony, cut into channels by the ids of their tokens."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.constraint.final_channel import FinalChannel
from batchgen.engine.constraint.harmony import HarmonyTokens
from batchgen.engine.constraint.vocabulary import Vocabulary
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.rows.stopping import decode
from batchgen.pages.tokens.channels import HarmonyChannels, Message, Messages
from tests.support.jobs.harmony_model import FORMAT, WORDS, ids, tokenizer

TOKENS = HarmonyTokens.of(tokenizer())
assert TOKENS is not None
CHAT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
A, F = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
C = "<|channel|>commentary<|message|>"
N = "<|end|><|start|>assistant"
ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
STOPS = ("<|return|>", "<|call|>", "<|endoftext|>")

# What the model wrote; then text, reasoning, commentary, calls, channel and finish reason.
Row = tuple[str, str | None, str | None, str | None, list[tuple[str | None, str]], str | None, str]
STOPPED, CALLED = ("final", "stop"), ("commentary", "tool_call")
SAID, CUT = ("commentary", "no_answer"), ("commentary", "length")
RUN = ("analysis", "tool_call")
NOTHING = None, None, None
ADDED: list[tuple[str | None, str]] = [("add", "{}")]
CASES: list[Row] = [
    # As it should be.
    (f"{A}Hm{N}{F}4<|return|>", "4", "Hm", None, [], *STOPPED),
    (f"{F}4<|return|>", "4", None, None, [], *STOPPED),
    (f"{A}Hm{N}{A}So{N}{F}4<|return|>", "4", "Hm\n\nSo", None, [], *STOPPED),
    (f"{A}Hm{N}{C}I add{N}{F}4<|return|>", "4", "Hm", "I add", [], *STOPPED),
    (f'{A}Hm{N}{ADD}{{"a": 1}}<|call|>', None, "Hm", None, [("add", '{"a": 1}')], *CALLED),
    (f"{ADD}{{}}<|call|>", *NOTHING, ADDED, *CALLED),
    (f"{A}Hm{N}{C}I add{N}{ADD}{{}}<|call|>", None, "Hm", "I add", ADDED, *CALLED),
    ("<|channel|>analysis to=py code<|message|>1<|call|>", *NOTHING, [("py", "1")], *RUN),
    ("<|channel|>commentary to=a.b<|message|>x<|call|>", *NOTHING, [("a.b", "x")], *CALLED),
    (" to=functions.add<|channel|>commentary<|message|>{}<|call|>", *NOTHING, ADDED, *CALLED),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", None, None, [], *STOPPED),
    (f"{F}a\n\nb<|return|>", "a\n\nb", None, None, [], *STOPPED),
    # Cut.
    (f"{A}Hm so", None, "Hm so", None, [], "analysis", "length"),
    (f"{A}Hm{N}{F}4 is", "4 is", "Hm", None, [], "final", "length"),
    (f"{A}Hm{N}{F}", "", "Hm", None, [], "final", "length"),
    (f"{A}Hm{N}{C}I ad", None, "Hm", "I ad", [], *CUT),
    (f'{A}Hm{N}{ADD}{{"a', None, "Hm", None, [("add", '{"a')], *CUT),
    (f"{A}Hm<|end|>", None, "Hm", None, [], "analysis", "length"),
    (f"{A}Hm<|end|><|start|>", None, "Hm", None, [], "analysis", "length"),
    (f"{A}Hm{N}", None, "Hm", None, [], "header", "length"),
    (f"{A}Hm{N}<|channel|>", None, "Hm", None, [], "header", "length"),
    (f"{A}Hm{N}<|channel|>fi", None, "Hm", None, [], "header", "length"),
    (f"{A}Hm{N}<|channel|>final", None, "Hm", None, [], "header", "length"),
    (f"{A}Hm{N}<|channel|>commentary to=functions.add", None, "Hm", None, [], "header", "length"),
    (A, None, "", None, [], "analysis", "length"),
    ("<|channel|>", None, None, None, [], "header", "length"),
    # Ended where no answer is.
    (f"{A}Hm<|return|>", None, "Hm", None, [], "analysis", "no_answer"),
    (f"{A}Hm{N}{C}I add<|return|>", None, "Hm", "I add", [], *SAID),
    ("<|return|>", None, None, None, [], "header", "no_answer"),
    ("<|channel|>final<|return|>", None, None, None, [], "header", "no_answer"),
    (f"{A}Hm<|endoftext|>", None, "Hm", None, [], "analysis", "no_answer"),
    (f"{A}Hm{N}<|return|>", None, "Hm", None, [], "header", "no_answer"),
    # Ended in the answer, otherwise than it should.
    (f"{F}<|return|>", "", None, None, [], *STOPPED),
    (f"{A}Hm{N}{F}4<|endoftext|>", "4", "Hm", None, [], *STOPPED),
    (f"{A}Hm{N}{F}4<|end|>", "4", "Hm", None, [], "final", "length"),
    # Two finals.
    (f"{F}4{N}{F}5<|return|>", "4\n\n5", None, None, [], *STOPPED),
    (f"{F}4{N}{A}Hm{N}{F}5<|return|>", "4\n\n5", "Hm", None, [], *STOPPED),
    (f"{F}4{N}{A}Hm", "4", "Hm", None, [], "analysis", "length"),
    (f"{F}4{N}{A}Hm<|return|>", "4", "Hm", None, [], "analysis", "no_answer"),
    (f"{F}4{N}{ADD}{{}}<|call|>", "4", None, None, ADDED, *CALLED),
    # Several calls, and wrong ones.
    (f"{ADD}1{N}{ADD}2<|call|>", *NOTHING, [("add", "1"), ("add", "2")], *CALLED),
    (f"{C}{{}}<|call|>", *NOTHING, [(None, "{}")], *CALLED),
    (f"{F}{{}}<|call|>", *NOTHING, [(None, "{}")], "final", "tool_call"),
    ("<|call|>", *NOTHING, [(None, "")], *CALLED),
    ("<|channel|>commentary to=functions.add json<|message|>{}<|call|>", *NOTHING, ADDED, *CALLED),
    ("<|channel|>commentary to=functions.add<|constrain|>json{}<|call|>", *NOTHING, ADDED, *CALLED),
    (" to=functions.add<|message|>{}<|call|>", *NOTHING, ADDED, *CALLED),
    ("<|channel|>commentary to=user<|message|>Hi<|return|>", None, None, "Hi", [], *SAID),
    # Wrong headers.
    ("<|channel|>Final<|message|>4<|return|>", "4", None, None, [], *STOPPED),
    ("<|channel|> final\n<|message|>4<|return|>", "4", None, None, [], *STOPPED),
    ("<|channel|>final answer<|message|>4<|return|>", "4", None, None, [], *STOPPED),
    ("<|channel|>final 4 is right<|return|>", "4 is right", None, None, [], *STOPPED),
    ("<|channel|>thought<|message|>Hm<|end|>", None, None, "Hm", [], *CUT),
    ("<|channel|>Well, 4<|return|>", None, None, "Well, 4", [], *SAID),
    (f"{A}Hm{F}4<|return|>", "4", "Hm", None, [], *STOPPED),
    (f"{A}Hm<|start|>assistant{F}4<|return|>", "4", "Hm", None, [], *STOPPED),
    (f"{A}Hm<|end|>assistant{F}4<|return|>", "4", "Hm", None, [], *STOPPED),
    (f"{A}Hm<|end|>{F}4<|return|>", "4", "Hm", None, [], *STOPPED),
    (f"{A}Hm<|message|>so{N}{F}4<|return|>", "4", "Hmso", None, [], *STOPPED),
    (f"<|channel|>analysis{F}4<|return|>", "4", None, None, [], *STOPPED),
    # Without channels.
    ("4<|return|>", "4", None, None, [], *STOPPED),
    ("<|message|>4<|return|>", "4", None, None, [], *STOPPED),
    ("<|channel|><|message|>4<|return|>", "4", None, None, [], *STOPPED),
    ("I set a to=4", "I set a to=4", None, None, [], "final", "length"),
    ("4 is", "4 is", None, None, [], "final", "length"),
    (f"Sure{A}Hm{N}{F}4<|return|>", "4", "Hm", "Sure", [], *STOPPED),
    (f"{A}Hm<|end|>4<|return|>", "4", "Hm", None, [], *STOPPED),
    (f"{A}Hm<|end|><|start|>user<|message|>And 5?<|end|>", None, "Hm", "And 5?", [], *CUT),
]  # fmt: skip


def output(wrote: str, prompt: str = CHAT, **more: Any) -> RequestOutput:
    """The output of a row, as the engine makes it."""
    generated = ids(wrote)
    ended = wrote.endswith(STOPS)
    more.setdefault("finish_reason", "stop" if ended else "length")
    shown = decode(tokenizer(), generated)
    return RequestOutput("0", ids(prompt), generated, more.pop("text", shown), **more)


def split(wrote: str, prompt: str = CHAT, **more: Any) -> Row:
    assert TOKENS is not None
    given = output(wrote, prompt, **more)
    found, columns = HarmonyChannels(TOKENS, tokenizer()).split(given)
    assert found.token_ids == given.token_ids
    calls = [(call["name"], call["arguments"]) for call in columns["tool_calls"] or ()]
    answer = columns.get("text", found.text)
    beside = columns["reasoning"], columns["commentary"]
    return (wrote, answer, *beside, calls, columns["channel"], found.finish_reason)


@pytest.mark.parametrize("case", CASES, ids=[f"{n}: {case[0]}" for n, case in enumerate(CASES)])
def test_what_the_page_says(case: Row) -> None:
    assert split(case[0]) == case


def test_an_error_has_nothing() -> None:
    assert TOKENS is not None
    given = output(f"{A}Hm", finish_reason="error")
    assert HarmonyChannels(TOKENS, tokenizer()).split(given) == (given, {})


def test_the_prompt_may_have_begun_the_message() -> None:
    assert split("4<|return|>", f"{CHAT}{F}It is ")[1:] == ("4", None, None, [], "final", "stop")
    assert split(f"m{N}{F}4", f"{CHAT}{A}H")[1:] == ("4", "m", None, [], "final", "length")
    assert split("final<|message|>4", f"{CHAT}<|channel|>")[1] == "4"
    # Without the format no word is a role.
    assert split("assistant", "Who?")[1:] == ("assistant", None, None, [], "final", "length")
    assert split(f"user: {A}Hm", "Who?")[1:4] == ("user: ", "Hm", None)
    assert split("to=me", "Who?")[1:5] == ("to=me", None, None, [])


def test_a_stop_string_cuts_the_last_text() -> None:
    shown = decode(tokenizer(), ids(f"{A}Hm{N}{F}4. "))
    found = split(f"{A}Hm{N}{F}4. STOP", text=shown, finish_reason="stop")
    assert found[1:] == ("4. ", "Hm", None, [], "final", "stop")
    shown = decode(tokenizer(), ids(f"{A}Hm "))
    found = split(f"{A}Hm STOP", text=shown, finish_reason="stop")
    assert found[1:] == (None, "Hm ", None, [], "analysis", "no_answer")


def test_tokens_are_known_by_their_names() -> None:
    assert TOKENS is not None
    assert TOKENS.stops == (ids("<|return|>")[0], ids("<|call|>")[0])
    # Text that spells a token is text.
    spelled = [id for letter in "<|end|>" for id in ids(letter)]
    messages = Messages(TOKENS)
    messages.read([*ids(A), *spelled])
    assert messages.open.content == spelled


NAMED = ids(" to=functions.add")[0]
NO_NAMES = [id for word in ("Hm", " so", " well", " yes", '{"a": 1}', "x") for id in ids(word)]
PIECES = [ids(text) for text in (*FORMAT, *WORDS, "x", " ", A, A, F, F, C, N, N, ADD)]
PIECES += [[id] for id in ids("é")]
ANY = st.lists(st.sampled_from(PIECES)).map(lambda pieces: [*chain(*pieces)])
PROMPTS = st.sampled_from(["Hi", CHAT, CHAT + A, CHAT + F, f"{CHAT}<|channel|>"])


@given(ANY, PROMPTS, st.lists(st.integers(1, 4)))
def test_any_tokens_are_cut_alike_in_pieces_and_no_text_is_lost(
    tokens: list[int], prompt: str, sizes: list[int]
) -> None:
    assert TOKENS is not None
    whole, pieces = Messages(TOKENS, ids(prompt)), Messages(TOKENS, ids(prompt))
    whole.read(tokens)
    at = 0
    for size in [*sizes, len(tokens)]:
        pieces.read(tokens[at : at + size])
        at += size
    assert whole.all == pieces.all
    first = Messages(TOKENS, ids(prompt)).open
    kept = [id for message in whole.all for id in [*_header(message), *(message.content or ())]]
    assert sorted(kept) == sorted([*_header(first), *(i for i in tokens if i not in TOKENS.all)])
    given = RequestOutput("0", ids(prompt), tokens, decode(tokenizer(), tokens), "length")
    found, columns = HarmonyChannels(TOKENS, tokenizer()).split(given)
    answers = [columns.get("text", found.text), columns["reasoning"], columns["commentary"]]
    answers += [call["arguments"] for call in columns["tool_calls"] or ()]
    said = "|".join(text for text in answers if text is not None)
    for message in whole.all:
        if message.content is not None:
            assert decode(tokenizer(), message.content) in said
        elif NAMED not in (header := _header(message)):
            words = [decode(tokenizer(), [id]).strip() for id in header if id in NO_NAMES]
            assert all(word in said for word in words)


def _header(message: Message) -> list[int]:
    return [*message.role, *(message.channel or ()), *(message.kind or ())]


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), len(tokenizer()), ids("<|return|><|call|>"))


@given(ANY, PROMPTS)
def test_a_constraint_begins_where_the_final_channel_does(tokens: list[int], prompt: str) -> None:
    assert TOKENS is not None
    search = FinalChannel(vocabulary())
    state = search.begin(ids(prompt))
    if prompt == "Hi":
        assert state is None
        return
    messages = Messages(TOKENS, ids(prompt))
    channels = HarmonyChannels(TOKENS, tokenizer())
    for place, token in enumerate(tokens):
        so_far = RequestOutput("0", ids(prompt), tokens[:place], "", "length")
        _, columns = channels.split(so_far)
        has_name = bool(decode(tokenizer(), messages.open.channel or []).strip())
        in_text = has_name and messages.open.content is not None
        assert (state is None) == (in_text and columns["channel"] == "final")
        if state is None:
            return
        state, rest = search.advance(state, token)
        assert not rest
        messages.read([token])
