"""Stop strings across token boundaries, whatever the tokens are."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batchgen.engine.rows.stopping import IncrementalDecoder, StopRule, decode

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


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """Tokens like those of SentencePiece: words, and a token for each byte of all else."""
    words = ["<unk>", "<end>", "▁", "▁the", "▁cat", "the", "!"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: number for number, word in enumerate(words)}
    raw = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>")


PIECES = st.sampled_from(["▁the", "!", "▁", "日", "本", "🙂", "é", "▁cat", "\ufffd"])


def ids_of(tokenizer: PreTrainedTokenizerFast, pieces: list[str]) -> list[int]:
    """A token for each piece of the vocabulary, and one for each byte of the others."""
    vocab = tokenizer.get_vocab()
    return [
        id
        for piece in pieces
        for id in (
            [vocab[piece]]
            if piece in vocab
            else [vocab[f"<0x{byte:02X}>"] for byte in piece.encode()]
        )
    ]


@given(pieces=st.lists(PIECES, max_size=8), data=st.data())
def test_whole_characters_stay_wherever_bytes_are_cut(
    byte_fallback: PreTrainedTokenizerFast, pieces: list[str], data: st.DataObject
) -> None:
    ids = ids_of(byte_fallback, pieces)
    cut = data.draw(st.integers(0, len(ids)))
    spelled = b"".join(
        bytes([int(word[3:5], 16)]) if word.startswith("<0x") else word.replace("▁", " ").encode()
        for word in byte_fallback.convert_ids_to_tokens(ids[:cut])
    )
    kept = spelled.decode(errors="ignore").removeprefix(" ")
    text = decode(byte_fallback, ids[:cut])
    assert text.startswith(kept) and set(text[len(kept) :]) <= {"\ufffd"}
    later = [*ids[:cut], *ids_of(byte_fallback, ["!", "日"])]
    assert decode(byte_fallback, later).replace("\ufffd", "") == f"{kept}!日".replace("\ufffd", "")


def test_a_stop_string_behind_a_whole_character_is_found_before_the_next_one_is_whole(
    byte_fallback: PreTrainedTokenizerFast,
) -> None:
    ids = ids_of(byte_fallback, ["▁the", "日", "本", "é"])
    rule = make_rule(byte_fallback, ("本",))
    assert rule.find_string(ids, 0) == (7, "本") and rule.text_before_stop == "the日"
    decoder = IncrementalDecoder(byte_fallback)
    shown = []
    for token_id in ids:
        decoder.push(token_id)
        shown.append(decoder.text)
    assert shown == ["the"] * 3 + ["the日"] * 3 + ["the日本"] * 2 + ["the日本é"]
    assert decode(byte_fallback, ids[:-1]) == "the日本\ufffd"


def make_rule(
    tokenizer: PreTrainedTokenizerFast, strings: tuple[str, ...], min_new_tokens: int = 0
) -> StopRule:
    return StopRule({}, strings, min_new_tokens, 1000, IncrementalDecoder(tokenizer))


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
    kept, found = 0, None
    while kept < len(ids) and found is None:
        found = rule.find_string(ids[kept : kept + chunk], kept)
        kept += found[0] if found else len(ids[kept : kept + chunk])
    matched = first_match(text, tuple(strings))
    if matched is None:
        assert found is None and rule.text_before_stop is None
        return
    assert found is not None and found[1] in strings
    # Exactly the tokens needed: one fewer does not show the string yet.
    assert first_match(decode(tokenizer, ids[:kept]), tuple(strings)) == matched
    before = decode(tokenizer, ids[: kept - 1])
    assert first_match(before.rstrip("\ufffd"), tuple(strings)) is None
    assert rule.text_before_stop is not None
    assert text.startswith(rule.text_before_stop + found[1])
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
    found = rule.find_string(ids, 0)
    assert found is not None and found[0] < len(ids) and found[1] == "h"
    assert rule.text_before_stop == "on t"


def test_strings_before_min_new_tokens_do_not_stop_nor_cut(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tokenizer.encode("STOP the cat STOP the mat")
    first = len(tokenizer.encode("STOP"))
    rule = make_rule(tokenizer, ("STOP",), min_new_tokens=first + 1)
    found = rule.find_string(ids, 0)
    assert found is not None and found[0] > first
    assert rule.text_before_stop == "STOP the cat "


def test_of_several_strings_that_one_token_ends_the_first_in_the_text_wins(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    (token,) = tokenizer.encode(" the")
    assert make_rule(tokenizer, ("he", "e", " t", "th")).find_string([token], 0) == (1, " t")


@pytest.mark.parametrize(
    ("stop_ids", "strings", "exact"),
    [({}, (), True), ({0: "<end>"}, (), False), ({}, ("x",), False)],
)
def test_only_a_row_without_stops_has_an_exact_length(
    stop_ids: dict[int, str], strings: tuple[str, ...], exact: bool
) -> None:
    assert StopRule(stop_ids, strings, 0, 9).exact_length is exact


def test_a_token_that_ends_one_character_and_begins_the_next_shows_the_first() -> None:
    class Bytes:
        backend_tokenizer = Tokenizer(models.BPE())

        def decode(self, ids: list[int], **_: bool) -> str:
            pieces = {0: b"a\xc3", 1: b"\x9f", 2: b"b"}
            return b"".join(pieces[i] for i in ids).decode(errors="replace")

    decoder = IncrementalDecoder(cast("PreTrainedTokenizerFast", Bytes()))
    shown = []
    for token_id in (0, 1, 2, 0, 0, 1):
        decoder.push(token_id)
        shown.append(decoder.text)
    assert shown == ["a", "aß", "aßb", "aßba", "aßba\ufffda", "aßba\ufffdaß"]
