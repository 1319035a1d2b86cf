"""Texts that are nearly the same: none is called so that is not, and most that are so are found."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.inputs.ngrams.kept_rows import HashTable, SpillFile
from batchgen.inputs.ngrams.near_duplicates import NearDuplicates
from batchgen.inputs.ngrams.word_ngrams import jaccard, ngram_hashes, words

VOCABULARY = [f"w{number}" for number in range(3000)]


def similarity(a: str, b: str, n: int) -> float:
    """The Jaccard similarity of the sets of word n-grams, by Python's own sets."""
    sets = []
    for text in (a, b):
        found = words(text)
        length = min(n, len(found))
        sets.append({tuple(found[i : i + length]) for i in range(len(found) - length + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20), min_size=2, max_size=12),
    st.sampled_from([0.5, 0.7, 0.8, 0.95, 1.0]),
    st.integers(1, 4),
)
def test_only_what_is_near_is_said_to_be(texts: list[list[str]], near: float, ngram: int) -> None:
    index, kept = NearDuplicates(near), dict[str, str]()
    for number, some in enumerate(texts):
        text = " ".join(some)
        found = index.earlier(ngram_hashes(text, ngram), f"q{number}")
        if found is None:
            assert text not in kept.values()  # the same text is always found
            kept[f"q{number}"] = text
        else:
            exact = similarity(kept[found.name], text, ngram)
            assert exact == pytest.approx(found.similarity) and exact >= near


@pytest.mark.parametrize(("length", "changed"), [(150, 3), (60, 1), (12, 0)])
def test_most_of_what_is_near_is_found(length: int, changed: int) -> None:
    draw, index = random.Random(length), NearDuplicates(0.8)
    pairs, found = 400, 0
    texts = [draw.choices(VOCABULARY, k=length) for _ in range(pairs)]
    for number, text in enumerate(texts):
        assert index.earlier(ngram_hashes(" ".join(text), 3), str(number)) is None
    for number, text in enumerate(texts):
        other = list(text)
        for place in draw.sample(range(length), changed):
            other[place] = "another"
        near = index.earlier(ngram_hashes(" ".join(other), 3), f"copy {number}")
        found += near is not None and near.name == str(number)
    assert found >= 0.95 * pairs


@pytest.mark.thorough
def test_it_takes_so_much_memory_a_row() -> None:
    draw, index, rows = np.random.default_rng(0), NearDuplicates(0.8), 20_000
    for number in range(rows):
        hashes = np.unique(draw.integers(0, 2**64, 40, np.uint64))
        assert index.earlier(hashes, str(number)) is None
    assert 64 <= index.num_bytes / rows <= 128


def test_words_are_the_same_in_any_spelling() -> None:
    assert words("Don't STOP, ﬁne_1!") == [b"don", b"t", b"stop", b"fine_1"]
    assert words("don't stop") == words("DON'T  stop?!")
    assert words("東京タワー is high") == [
        *(sign.encode() for sign in "東京タワ"),
        "ー".encode(),
        b"is",
        b"high",
    ]
    assert [word.decode() for word in words("größe Größe")] == ["grösse", "grösse"]
    assert len(ngram_hashes("", 3)) == 0 and len(ngram_hashes("one", 3)) == 1
    assert jaccard(ngram_hashes("a b c", 2), ngram_hashes("c b a", 2)) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=3000), st.integers(0, 2**32 - 1))
def test_a_table_finds_all_rows_in_order(values: list[int], salt: int) -> None:
    """Few values and all at the end of the range, where tables have the least room."""
    table, rows = HashTable(), dict[int, list[int]]()
    for row, value in enumerate(values):
        key = (2**32 - 1 - value * (salt % 1000)) % 2**64
        table.add(key, row)
        rows.setdefault(key % 2**32, []).append(row)
    for key, expected in rows.items():
        assert list(table.find(key)) == expected
    assert list(table.find(12345)) == rows.get(12345, [])


def test_kept_rows_are_read_while_others_are_added() -> None:
    kept = SpillFile()
    contents = [bytes([number]) * number for number in range(50)]
    for number, content in enumerate(contents):
        assert kept.append(content) == number
        assert kept.read(number // 2) == contents[number // 2]
    assert [kept.read(number) for number in range(50)] == contents
    kept.close()
