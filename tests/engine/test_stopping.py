"""Stop strings across token boundaries, whatever the tokens are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batchgen.engine.stopping import IncrementalDecoder, Stop, StopRule, decode

TEXT = "the cat sat on the mat. STOP the end. über straße 日本語 🙂 the the cat"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: characters outside ASCII are several tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    raw.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def make_rule(
    tokenizer: PreTrainedTokenizerFast,
    strings: tuple[str, ...],
    min_new_tokens: int = 0,
    max_new_tokens: int = 1000,
) -> StopRule:
    stop_ids = {0: "<end>"}
    return StopRule(
        stop_ids, strings, min_new_tokens, max_new_tokens, IncrementalDecoder(tokenizer)
    )


def first_match(text: str, strings: tuple[str, ...]) -> int | None:
    """Length of the shortest beginning of the text that contains a stop string."""
    ends = [text.find(s) + len(s) for s in strings if s in text]
    return min(ends, default=None)


@given(
    text=st.text(alphabet="thecasn. STOPüß日🙂\n", max_size=60),
    strings=st.lists(st.text(alphabet="thecas. STü日🙂", min_size=1, max_size=4), max_size=3),
    chunk=st.integers(1, 5),
)
def test_stop_strings_end_the_row_at_the_first_token_that_completes_one(
    tokenizer: PreTrainedTokenizerFast, text: str, strings: list[str], chunk: int
) -> None:
    ids = tokenizer.encode(text)
    rule = make_rule(tokenizer, tuple(strings))
    kept, stop = 0, None
    while kept < len(ids) and stop is None:
        stop = rule.first(ids[kept : kept + chunk], kept)
        kept += stop.num_tokens if stop else len(ids[kept : kept + chunk])
    matched = first_match(text, tuple(strings))
    if matched is None:
        assert stop is None and rule.text_before_stop is None
        return
    assert stop is not None and stop.reason == "stop" and stop.text in strings
    # Exactly the tokens needed: one fewer does not show the string yet.
    assert first_match(decode(tokenizer, ids[:kept]), tuple(strings)) == matched
    before = decode(tokenizer, ids[: kept - 1])
    assert first_match(before.rstrip("\ufffd"), tuple(strings)) is None
    assert rule.text_before_stop is not None
    assert text.startswith(rule.text_before_stop + stop.text)
    assert not any(s in rule.text_before_stop for s in strings)


@given(text=st.text(max_size=80))
def test_incremental_text_is_the_decoded_text(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.encode(text)
    decoder = IncrementalDecoder(tokenizer)
    for token_id in ids:
        decoder.push(token_id)
        assert decode(tokenizer, ids).startswith(decoder.text)
    if not text.endswith("\ufffd"):
        assert decoder.text == decode(tokenizer, ids) == text


def test_a_string_inside_one_token_is_found_and_the_text_cut_before_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tokenizer.encode("on the mat")
    rule = make_rule(tokenizer, ("h",))
    stop = rule.first(ids, 0)
    assert stop is not None and stop.num_tokens < len(ids)
    assert rule.text_before_stop == "on t"


def test_strings_before_min_new_tokens_do_not_stop_nor_cut(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tokenizer.encode("STOP the cat STOP the mat")
    first = len(tokenizer.encode("STOP"))
    rule = make_rule(tokenizer, ("STOP",), min_new_tokens=first + 1)
    stop = rule.first(ids, 0)
    assert stop is not None and stop.num_tokens > first
    assert rule.text_before_stop == "STOP the cat "


def test_the_first_stop_wins(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("the cat")
    assert make_rule(tokenizer, ()).first([*ids, 0, *ids], 0) == Stop(len(ids) + 1, "stop", "<end>")
    assert make_rule(tokenizer, (), max_new_tokens=1).first(ids, 0) == Stop(1, "length", None)
    # A stop on the very last token allowed is a stop, not a cut.
    assert make_rule(tokenizer, (), max_new_tokens=1).first([0], 0) == Stop(1, "stop", "<end>")
    assert make_rule(tokenizer, (), min_new_tokens=2).first([0], 0) is None
    assert make_rule(tokenizer, (), min_new_tokens=2).first([0], 1) == Stop(1, "stop", "<end>")
