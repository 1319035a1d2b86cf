"""The block manager: its counts of KV blocks add up after any operation; prefixes are shared."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.block_manager import BlockManager


def make_sequence(token_ids: list[int]) -> Sequence:
    return Sequence("r", list(token_ids), RequestParams(), StopRule({}, (), 0, 1000), ())


class BlockManagerMachine(RuleBasedStateMachine):
    """Admit, grow, publish and free in any order; a model of content per block is the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(PageNeeds(PageLayout(9), 2), prefix_caching=True)
        self.rows: list[Sequence] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block → all tokens up to its end

    def record(self, seq: Sequence) -> None:
        for i, block in enumerate(seq.block_table):
            end = (i + 1) * 2
            if end <= seq.num_tokens:
                self.content[block] = tuple(seq.token_ids[:end])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), headroom=st.integers(0, 2))
    def admit(self, tokens: list[int], headroom: int) -> None:
        seq = make_sequence(tokens)
        free = self.manager.pool.num_free
        if not self.manager.admit(seq, headroom):
            assert not seq.block_table and self.manager.pool.num_free == free
            return
        assert self.manager.pool.num_free >= headroom
        cached = seq.num_computed_tokens
        assert cached < seq.num_tokens and cached % 2 == 0
        for i in range(cached // 2):
            assert self.content[seq.block_table[i]] == tuple(tokens[: (i + 1) * 2])
        self.record(seq)
        self.manager.publish(seq, seq.num_tokens)
        self.rows.append(seq)

    @precondition(lambda self: self.rows)
    @rule(index=st.integers(0, 100), token=st.integers(0, 1))
    def grow(self, index: int, token: int) -> None:
        seq = self.rows[index % len(self.rows)]
        if self.manager.reserve(seq, seq.num_tokens + 1):
            seq.token_ids.append(token)
            self.record(seq)
            self.manager.publish(seq, seq.num_tokens)

    @precondition(lambda self: self.rows)
    @rule(index=st.integers(0, 100))
    def free(self, index: int) -> None:
        self.manager.free(self.rows.pop(index % len(self.rows)))

    @invariant()
    def books_balance(self) -> None:
        self.manager.check_integrity(self.rows)


BlockManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_block_manager = BlockManagerMachine.TestCase


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 8))
def test_the_last_token_is_never_cached(tokens: list[int], block_size: int) -> None:
    manager = BlockManager(PageNeeds(PageLayout(100), block_size), prefix_caching=True)
    first, second = make_sequence(tokens), make_sequence(tokens)
    assert manager.admit(first, 0)
    manager.publish(first, len(tokens))
    assert manager.admit(second, 0)
    assert second.num_computed_tokens == (len(tokens) - 1) // block_size * block_size


def test_a_freed_prefix_survives_until_its_blocks_are_needed() -> None:
    manager = BlockManager(PageNeeds(PageLayout(5), 2), prefix_caching=True)
    old = make_sequence([1, 2, 3, 4, 5])
    assert manager.admit(old, 0)
    manager.publish(old, 5)
    manager.free(old)
    again = make_sequence([1, 2, 3, 4, 5])
    assert manager.admit(again, 0) and again.num_computed_tokens == 4
    manager.free(again)
    other = make_sequence([9] * 8)
    assert manager.admit(other, 0) and other.num_computed_tokens == 0
    manager.free(other)
    assert manager.find_prefix(make_sequence([1, 2, 3, 4, 5])).blocks == []


def test_without_prefix_caching_nothing_is_shared() -> None:
    manager = BlockManager(PageNeeds(PageLayout(9), 2), prefix_caching=False)
    rows = [make_sequence([1, 2, 3, 4, 5]) for _ in range(2)]
    for seq in rows:
        assert manager.admit(seq, 0)
        manager.publish(seq, 5)
    assert not set(rows[0].block_table) & set(rows[1].block_table)
    manager.check_integrity(rows)


def test_a_different_beginning_shares_no_later_block() -> None:
    manager = BlockManager(PageNeeds(PageLayout(20), 2), prefix_caching=True)
    rows = [make_sequence([first, 2, 3, 4, 5]) for first in (0, 1)]
    for seq in rows:
        assert manager.admit(seq, 0)
        manager.publish(seq, 5)
    assert not set(rows[0].block_table) & set(rows[1].block_table)


def test_a_model_that_looks_ahead_shares_blocks_with_the_token_behind_them() -> None:
    manager = BlockManager(PageNeeds(PageLayout(100), 4), prefix_caching=True, tokens_ahead=1)
    donor = make_sequence([*range(8), 8])
    assert manager.admit(donor, 0)
    manager.publish(donor, 9)
    found = []
    for ids in ([*range(8), 8, 9], [*range(8), 9, 9], [*range(4), 5, 5], [*range(8)]):
        seq = make_sequence(ids)
        assert manager.admit(seq, 0)
        found.append(seq.num_computed_tokens)
    assert found == [8, 4, 0, 4]
    # What the last token of a block depends on is not known yet.
    prompt = make_sequence([*range(20, 28)])
    assert manager.admit(prompt, 0)
    manager.publish(prompt, 8)
    assert prompt.num_published_blocks == 1
    prompt.token_ids.append(3)
    manager.publish(prompt, 8)
    assert prompt.num_published_blocks == 2
    # A row that goes on has the last token before that computed, however it was preempted.
    manager.free(prompt)
    prompt.num_prefill_tokens, prompt.prefill_yields = 8, False
    assert manager.admit(prompt, 0) and prompt.num_computed_tokens == 4
