"""The n-gram index against a search in plain Python, and its kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.speculation import ngram_triton
from batchgen.kernels.speculation.ngram import NgramIndex, append_reference, propose_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES, MAX_LEN = 4, 24
SIZES = [(1, 1), (1, 3), (2, 4), (3, 3)]
K = 5

Append = Callable[[NgramIndex, Tensor, Tensor, Tensor, Tensor], None]
Propose = Callable[[NgramIndex, Tensor, int], tuple[Tensor, Tensor]]
REFERENCE: tuple[Append, Propose] = (append_reference, propose_reference)
TRITON: tuple[Append, Propose] = (ngram_triton.append, ngram_triton.propose)
BOTH = pytest.mark.parametrize("operations", [REFERENCE, TRITON], ids=["reference", "triton"])


@dataclass(frozen=True)
class Step:
    """Resets, then new tokens by place (some of them instead of the last), then drafts for all."""

    resets: tuple[int, ...]
    rows: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Place, how many of its last tokens are replaced, new tokens."""


def ints(values: Collection[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def make_index(
    sizes: tuple[int, int], pool: bool, *, entries: int | None = None, max_len: int = MAX_LEN
) -> NgramIndex:
    """With garbage where nothing is known."""
    index = NgramIndex.allocate(PLACES, max_len, *sizes, pool, DEVICE)
    index.tokens.fill_(-7)
    if entries is None:
        return index
    return replace(index, entries=torch.zeros(entries, dtype=torch.int64, device=DEVICE))


def run_append(
    index: NgramIndex, rows: Collection[tuple[int, int, Collection[int]]], append: Append
) -> None:
    """Rows of place, start and new tokens, in a matrix wider than them and full of garbage."""
    width = max((len(new) for _, _, new in rows), default=0)
    wide = torch.full((len(rows), width + 3), 10**12, dtype=torch.int64, device=DEVICE)
    for row, (_, _, new) in zip(wide, rows, strict=True):
        row[: len(new)] = ints(new)
    places, starts = ints([place for place, _, _ in rows]), ints([start for _, start, _ in rows])
    append(index, places, starts, wide[:, : width + 1], ints([len(new) for *_, new in rows]).int())


def run_propose(
    index: NgramIndex, places: Collection[int], propose: Propose, k: int = K
) -> list[list[int]]:
    """The drafts of each place; what follows them is checked."""
    drafts, counts = propose(index, ints(places), k)
    assert drafts.dtype == torch.int64 and drafts.shape == (len(places), k)
    assert counts.dtype == torch.int32 and counts.shape == (len(places),)
    out = []
    for place, row, count in zip(places, drafts.tolist(), counts.tolist(), strict=True):
        length = int(index.lengths[place])
        last = int(index.tokens[place, length - 1]) if length else 0
        assert 0 <= count <= k and row[count:] == [last] * (k - count)
        out.append(row[:count])
    return out


def run_step(index: NgramIndex, step: Step, operations: tuple[Append, Propose]) -> list[list[int]]:
    append, propose = operations
    if step.resets:
        index.reset(ints(step.resets))
    lengths = index.lengths.tolist()
    rows = [(place, max(0, lengths[place] - old), new) for place, old, new in step.rows]
    run_append(index, rows, append)
    return run_propose(index, [2, 0, 3, 1, 0], propose)


@st.composite
def many_steps(draw: st.DrawFn, *, replacing: bool = True) -> list[Step]:
    """Tokens of a vocabulary of two or three, so that almost everything repeats."""
    token = st.integers(0, draw(st.integers(1, 2)))
    place = st.integers(0, PLACES - 1)
    replaced = st.sampled_from([0, 0, 0, 1, 2]) if replacing else st.just(0)
    row = st.tuples(place, replaced, st.lists(token, max_size=14).map(tuple))
    rows = st.lists(row, max_size=PLACES, unique_by=lambda row: row[0]).map(tuple)
    resets = st.sampled_from([(), (), (0,), (1,), (2, 3)])
    return draw(st.lists(st.builds(Step, resets, rows), min_size=1, max_size=8))


# --- against a search in plain Python -------------------------------------------------------------


@dataclass
class Oracle:
    """What the docstrings say, by search in lists; only the shared keys need a memory."""

    sizes: tuple[int, int]
    pool: bool
    rows: list[list[int]] = field(default_factory=lambda: [[] for _ in range(PLACES)])
    newest: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    keys: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)

    def run(self, step: Step) -> None:
        for place in step.resets:
            self.rows[place] = []
        for place, old, new in sorted(step.rows):
            row = self.rows[place]
            start = max(0, len(row) - old)
            if new:
                row[start:] = new
                del row[MAX_LEN:]
            for position in range(start, len(row)) if new else ():
                for n in range(self.sizes[0], min(self.sizes[1], position) + 1):
                    gram = tuple(row[position - n : position])
                    self.newest[gram] = (place, position)
                    self.keys |= {(place, gram), (-1, gram)} if self.pool else {(place, gram)}

    def is_true(self, place: int, position: int, gram: Collection[int]) -> bool:
        row = self.rows[place]
        start = position - len(gram)
        return start >= 0 and position < len(row) and row[start:position] == list(gram)

    def found(self, place: int) -> tuple[int, int] | None:
        row = self.rows[place]
        for n in range(min(self.sizes[1], len(row)), self.sizes[0] - 1, -1):
            gram = row[-n:]
            for position in reversed(range(n, len(row))):
                if self.is_true(place, position, gram):
                    return place, position
            found = self.newest.get(tuple(gram))
            if self.pool and found and self.is_true(*found, gram):
                return found
        return None

    def drafts(self, place: int) -> list[int]:
        found = self.found(place)
        if found is None:
            return []
        source, position = found
        text = list(self.rows[source])
        while source == place and len(text) < position + K:
            text.append(text[position + len(text) - len(self.rows[place])])
        return text[position : position + K]

    def true_drafts(self, place: int) -> list[list[int]]:
        """All that a table which forgot some n-grams may propose."""
        row = self.rows[place]
        out: list[list[int]] = [[]]
        for n in range(self.sizes[0], min(self.sizes[1], len(row)) + 1):
            for source in range(PLACES) if self.pool else (place,):
                for position in range(len(self.rows[source])):
                    if self.is_true(source, position, row[-n:]):
                        text = self.rows[source][position:]
                        out.append((text * K if source == place else text)[:K])
        return out


@pytest.mark.thorough
@given(many_steps(replacing=False), st.sampled_from(SIZES), st.booleans())
@settings(deadline=None, max_examples=80)
def test_the_most_recent_occurrence_of_the_longest_n_gram_is_continued(
    steps: list[Step], sizes: tuple[int, int], pool: bool
) -> None:
    """In a table so large that seldom two n-grams meet; where they do, drafts are only true."""
    index = make_index(sizes, pool, entries=2**18)
    oracle = Oracle(sizes, pool)
    for step in steps:
        proposed = run_step(index, step, REFERENCE)
        oracle.run(step)
        for place in range(PLACES):
            known = index.tokens[place, : int(index.lengths[place])].tolist()
            assert known == oracle.rows[place]
        exact = int((index.entries != 0).sum()) == len(oracle.keys)
        for place, drafts in zip([2, 0, 3, 1, 0], proposed, strict=True):
            if exact:
                assert drafts == oracle.drafts(place)
            assert drafts in oracle.true_drafts(place)


@pytest.mark.thorough
@given(many_steps(), st.sampled_from(SIZES), st.booleans(), st.sampled_from([1, 8, 64]))
@settings(deadline=None, max_examples=60)
def test_drafts_of_a_table_too_small_are_true(
    steps: list[Step], sizes: tuple[int, int], pool: bool, entries: int
) -> None:
    index = make_index(sizes, pool, entries=entries)
    oracle = Oracle(sizes, pool)
    for step in steps:
        proposed = run_step(index, step, REFERENCE)
        oracle.run(step)
        for place, drafts in zip([2, 0, 3, 1, 0], proposed, strict=True):
            assert drafts in oracle.true_drafts(place)


# --- the kernels ----------------------------------------------------------------------------------


@given(many_steps(), st.sampled_from(SIZES), st.booleans(), st.sampled_from([8, 1024]))
@settings(deadline=None, max_examples=settings().max_examples // 6)
def test_kernels_equal_the_reference(
    steps: list[Step], sizes: tuple[int, int], pool: bool, entries: int
) -> None:
    ours, theirs = (make_index(sizes, pool, entries=entries) for _ in range(2))
    for step in steps:
        assert run_step(ours, step, TRITON) == run_step(theirs, step, REFERENCE)
        assert_same(ours, theirs)


def assert_same(ours: NgramIndex, theirs: NgramIndex) -> None:
    for name in ("tokens", "lengths", "entries", "clock"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.thorough
@pytest.mark.parametrize("pool", [False, True])
def test_a_prompt_of_many_programs(pool: bool) -> None:
    """Ids as large as int32 allows; a second run gives the same state."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2**31 - 4, 2**31, (PLACES, 300), generator=generator)
    places, counts = ints([3, 0, 2, 1]), ints([300, 17, 0, 129])
    indices = []
    for append, propose in (TRITON, REFERENCE, TRITON):
        index = make_index((1, 4), pool, max_len=512)
        append(index, places, places * 0, prompts.to(DEVICE), counts)
        append(index, places, counts, prompts[:, :1].contiguous().to(DEVICE), counts.clamp(max=1))
        assert index.lengths.tolist() == [18, 130, 0, 301]
        drafts, num_drafts = propose(index, places.repeat(2), 3)
        assert (num_drafts.view(2, 4) > 0).tolist() == [[True, True, False, True]] * 2
        indices.append((index, drafts, num_drafts))
    for index, drafts, num_drafts in indices[1:]:
        assert_same(index, indices[0][0])
        assert torch.equal(drafts, indices[0][1]) and torch.equal(num_drafts, indices[0][2])


@BOTH
def test_a_prompt_is_indexed_as_its_tokens_one_by_one(
    operations: tuple[Append, Propose],
) -> None:
    append, propose = operations
    text = [1, 2, 1, 3, 1, 2, 2, 3, 1, 2, 1, 1, 3, 1, 2]
    whole, single = make_index((1, 3), True), make_index((1, 3), True)
    run_append(whole, [(1, 0, text)], append)
    for position, token in enumerate(text):
        run_append(single, [(1, position, [token])], append)
    where = (1 << (whole.row_bits + whole.position_bits)) - 1
    assert torch.equal(whole.entries & where, single.entries & where)
    assert run_propose(whole, [1, 0], propose) == run_propose(single, [1, 0], propose)


# --- cases ----------------------------------------------------------------------------------------


@BOTH
def test_a_repeating_text_goes_on_repeating(operations: tuple[Append, Propose]) -> None:
    append, propose = operations
    index = make_index((2, 3), False)
    run_append(index, [(0, 0, [9, 5, 6, 7, 5, 6, 7]), (1, 0, [4, 4, 4]), (2, 0, [4, 4])], append)
    assert run_propose(index, [0, 1, 2, 3], propose, 7) == [[5, 6, 7] * 2 + [5], [4] * 7, [], []]
    assert run_propose(index, [0], propose, 1) == [[5]]


@BOTH
def test_the_longest_n_gram_wins_then_the_own_place(operations: tuple[Append, Propose]) -> None:
    append, propose = operations
    index = make_index((1, 2), True)
    run_append(index, [(0, 0, [1, 2, 30, 31]), (1, 0, [2, 40, 7, 2])], append)
    assert run_propose(index, [1], propose) == [[40, 7, 2, 40, 7]]  # own, though 0 is as long
    run_append(index, [(1, 4, [1, 2])], append)
    assert run_propose(index, [1], propose) == [[30, 31]]  # two tokens of 0 before one of its own
    run_append(index, [(1, 6, [50, 1, 2])], append)
    assert run_propose(index, [1], propose, 3) == [[50, 1, 2]]


@BOTH
def test_without_the_pool_a_place_sees_only_itself(operations: tuple[Append, Propose]) -> None:
    append, propose = operations
    for pool, expected in ((False, []), (True, [3, 4])):
        index = make_index((2, 2), pool, entries=1)
        run_append(index, [(1, 0, [1, 2])], append)
        run_append(index, [(0, 0, [1, 2, 3, 4])], append)
        run_append(index, [(0, 2, [3])], append)  # makes place 0's the one entry
        assert run_propose(index, [1], propose) == [expected[:1]]


@BOTH
def test_a_place_used_again_finds_nothing_of_before(operations: tuple[Append, Propose]) -> None:
    append, propose = operations
    index = make_index((1, 2), True)
    run_append(index, [(0, 0, [1, 2, 3, 1, 2, 5]), (1, 0, [1, 2])], append)
    assert run_propose(index, [1], propose) == [[5]]
    index.reset(ints([0]))
    assert run_propose(index, [0, 1], propose) == [[], []]
    run_append(index, [(0, 0, [8, 9, 7])], append)  # shorter than the position after the old 1, 2
    assert run_propose(index, [0, 1], propose) == [[], []]
    run_append(index, [(0, 3, [6, 5, 4])], append)  # past it, with other tokens
    assert run_propose(index, [0, 1], propose) == [[], []]
    run_append(index, [(0, 6, [1, 2, 3])], append)
    assert run_propose(index, [0, 1], propose) == [[], [3]]


@BOTH
def test_rows_of_count_0_change_nothing(operations: tuple[Append, Propose]) -> None:
    """As padding rows have it: the place of another row, any start."""
    append, _ = operations
    index, expected = make_index((1, 3), True), make_index((1, 3), True)
    run_append(index, [(2, 0, []), (2, 0, [1, 2, 1]), (2, 9, []), (0, 5, [])], append)
    run_append(expected, [(2, 0, [1, 2, 1])], append)
    assert_same(index, expected)
    assert index.lengths.tolist() == [0, 0, 3, 0]
    nothing = ints([])
    append(index, nothing, nothing, nothing.view(0, 4), nothing)
    append(index, ints([2]), ints([0]), nothing.view(1, 0), ints([0]))
    assert_same(index, expected)
    assert run_propose(index, [], operations[1]) == []


@BOTH
def test_tokens_past_the_end_are_dropped(operations: tuple[Append, Propose]) -> None:
    append, propose = operations
    index = make_index((1, 1), False)
    run_append(index, [(1, 0, [1, 2] * 11), (2, 0, [7, 7])], append)
    run_append(index, [(1, 22, [1, 2, 3, 4])], append)
    run_append(index, [(1, 26, [5, 6])], append)
    assert index.lengths.tolist() == [0, MAX_LEN, 2, 0]
    assert index.tokens[1].tolist() == [1, 2] * 12 and index.tokens[2, :3].tolist() == [7, 7, -7]
    assert run_propose(index, [1], propose) == [[1, 2, 1, 2, 1]]


@BOTH
def test_calls_past_the_last_stamp_are_stored_with_it(operations: tuple[Append, Propose]) -> None:
    append, propose = operations
    index = make_index((1, 1), False)
    for calls in (index.last_stamp, index.last_stamp + 1, 2**62):
        index.entries.zero_()
        index.clock[0] = calls
        index.reset(ints([3]))
        run_append(index, [(3, 0, [1, 2, 1])], append)
        assert index.clock.tolist() == [calls + 1, 0]
        assert run_propose(index, [3], propose, 2) == [[2, 1]]
        assert int(index.entries.min()) == 0 and int(index.entries.max()) > 2**61


@BOTH
def test_an_empty_entry_names_no_place(operations: tuple[Append, Propose]) -> None:
    """Read as one it names position 0 of place 0, and here the token before that would fit."""
    append, propose = operations
    tokens = torch.full((PLACES + 1, MAX_LEN), 5, dtype=torch.int32, device=DEVICE)
    index = replace(make_index((1, 1), True), tokens=tokens[1:])
    run_append(index, [(0, 0, [5])], append)
    assert run_propose(index, [0], propose) == [[]]


def test_the_table_is_of_a_size_between_its_limits() -> None:
    def size(num_rows: int, max_len: int, min_n: int, max_n: int, pool: bool) -> int:
        return len(NgramIndex.allocate(num_rows, max_len, min_n, max_n, pool, DEVICE).entries)

    assert size(1, 1, 1, 1, False) == 2**10
    assert size(8, 4096, 3, 3, False) == 2**17
    assert size(8, 4096, 1, 4, True) == 2**19
    assert size(4096, 4096, 1, 4, True) == 2**24


@pytest.mark.parametrize("pool", [False, True])
def test_different_n_grams_and_places_meet_as_seldom_as_chance_lets_them(pool: bool) -> None:
    """Small ids, neighbouring places: what a weak hash would crowd into a part of the table."""
    index = make_index((1, 4), pool, entries=2**16, max_len=2049)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, 6, (2049,), generator=generator).tolist()
    run_append(index, [(place, 0, text) for place in range(PLACES)], append_reference)
    grams = {tuple(text[i - n : i]) for n in range(1, 5) for i in range(n, 2049)}
    keys = (PLACES + pool) * len(grams)
    assert keys > 4000
    expected = 2**16 * (1 - (1 - 2**-16) ** keys)
    assert abs(int((index.entries != 0).sum()) - expected) < 4 * (keys**2 / 2**17) ** 0.5


# --- real sizes -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [False, True])
def test_real_sizes_in_a_graph(pool: bool) -> None:
    """Prompts, then replayed decode steps whose rows grow by 0 to 5 tokens each."""
    rows, max_len, width, k = 256, 16_384, 5, 4
    ours, theirs = (
        NgramIndex.allocate(rows, max_len, 1, 4, pool, device) for device in (DEVICE, "cpu")
    )
    generator = torch.Generator().manual_seed(1)
    places = torch.randperm(rows, generator=generator)
    starts = torch.zeros(rows, dtype=torch.int64)
    prompts = torch.randint(0, 30, (rows, 8192), generator=generator)
    counts = torch.randint(0, 8193, (rows,), generator=generator)
    theirs.append(places, starts, prompts, counts)
    ours.append(places.to(DEVICE), starts.to(DEVICE), prompts.to(DEVICE), counts.to(DEVICE))

    inputs = [places.to(DEVICE), starts.to(DEVICE), prompts[:, :width].contiguous().to(DEVICE)]
    inputs.append(torch.zeros_like(inputs[0]))
    ours.append(*inputs)  # compiles
    ours.propose(inputs[0], k)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.append(*inputs)
        captured = ours.propose(inputs[0], k)
    ours.clock[0] = theirs.clock[0].item()
    for _ in range(20):
        starts = theirs.lengths[places].long()
        token_ids = torch.randint(0, 30, (rows, width), generator=generator)
        counts = torch.randint(0, width + 1, (rows,), generator=generator)
        for there, here in zip(inputs, (places, starts, token_ids, counts), strict=True):
            there.copy_(here)
        graph.replay()
        theirs.append(places, starts, token_ids, counts)
        for mine, reference in zip(captured, theirs.propose(places, k), strict=True):
            assert torch.equal(mine.cpu(), reference)
    for name in ("tokens", "lengths", "entries", "clock"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name


@pytest.mark.gpu
def test_more_than_two_to_the_31_tokens() -> None:
    index = NgramIndex.allocate(2100, 2**20, 2, 3, True, DEVICE)
    index.lengths[2099] = 2**20 - 8
    text = ints([5, 6, 7, 5, 6, 7, 5, 6]).unsqueeze(0)
    index.append(ints([2099]), ints([2**20 - 8]), text, ints([8]))
    drafts, num_drafts = index.propose(ints([2099, 2]), 3)
    assert drafts.tolist() == [[7, 5, 6], [0, 0, 0]] and num_drafts.tolist() == [3, 0]
