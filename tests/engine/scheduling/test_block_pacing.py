"""Rows that are read and yielded in whole blocks of positions: whatever the sizes, every schedule
makes progress, or the sizes are refused when the scheduler is built.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.interface.outputs import HostOutput
from batchgen.engine.models.model_config import Diffusion, FamilyConfig, ModelConfig
from batchgen.engine.rows.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.block_manager import BlockManager
from batchgen.engine.scheduling.prefill_policy import BatchLimits
from batchgen.engine.scheduling.scheduler import Scheduler
from batchgen.strategies.dllm.strategy import DLLMStrategy


def pacing(length: int) -> DLLMStrategy:
    import torch

    strategy = DLLMStrategy(length)
    strategy.block_length(
        ModelConfig(
            architecture="Toy",
            hidden_size=1,
            num_layers=1,
            vocab_size=10,
            max_position_embeddings=1000,
            tie_word_embeddings=False,
            dtype=torch.float32,
            family=FamilyConfig(),
            diffusion=Diffusion(mask_token_id=9, block_length=None),
        )
    )
    return strategy


def row(name: int, prompt: int, new_tokens: int) -> Sequence:
    params = RequestParams(max_new_tokens=new_tokens)
    return Sequence(str(name), [name % 9] * prompt, params, StopRule({}, (), 0, new_tokens), ())


def check_prefill(batch: PrefillBatch, length: int) -> None:
    assert batch.seqs and len(set(map(id, batch.seqs))) == len(batch.seqs), "a row comes twice"
    for i, (seq, start, chunk) in enumerate(
        zip(batch.seqs, batch.starts, batch.lengths, strict=True)
    ):
        assert start % length == chunk % length == 0
        assert chunk > 0 or i in batch.completing, "a row that is cut to nothing"
        assert (i in batch.completing) == (start + chunk == seq.num_prefill_tokens)


def read(strategy: DLLMStrategy, batch: DecodeBatch, rows: list[Sequence], rng: random.Random,
         length: int) -> HostOutput:  # fmt: skip
    """What a step came to: a row's block is complete, or nothing is."""
    counts = [rng.choice([0, length - seq.num_tokens % length]) for seq in rows]
    tokens = np.full((len(rows), length), 3, np.int64)
    return HostOutput(np.array(counts, np.int32), tokens, np.zeros(len(rows), np.bool_), {})


@given(
    length=st.sampled_from([2, 3, 4, 8, 32]),
    budget=st.integers(1, 70),
    block_size=st.sampled_from([1, 4, 16]),
    blocks=st.integers(2, 40),
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    max_num_seqs=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_schedule_makes_progress_or_is_refused(
    length: int,
    budget: int,
    block_size: int,
    blocks: int,
    prompts: list[int],
    max_num_seqs: int,
    seed: int,
) -> None:
    strategy, rng = pacing(length), random.Random(seed)
    manager = BlockManager(PageNeeds(PageLayout(blocks), block_size), block_size % length == 0)
    limits = BatchLimits(max_num_seqs, budget, 0, 8, 0)
    if budget < length:
        with pytest.raises(ValueError, match=f"max_batched_tokens is {budget}, but .* {length}"):
            Scheduler(manager, limits, strategy)
        return
    scheduler = Scheduler(manager, limits, strategy)
    waiting = 0
    for i, prompt in enumerate(prompts):
        seq = row(i, prompt, rng.randint(1, 40))
        if int(strategy.most_cache_tokens(np.array([seq.max_tokens]))[0]) <= manager.capacity:
            scheduler.add(seq)
            waiting += 1
    launched: deque[tuple[DecodeBatch, list[Sequence]]] = deque()
    for _ in range(4000):
        if not waiting:
            break
        batch = scheduler.schedule()
        if isinstance(batch, PrefillBatch):
            check_prefill(batch, length)
        elif batch is not None:
            assert isinstance(batch, DecodeBatch) and batch.width == length
            rows = [scheduler.running[slot] for slot in batch.batch_slots.tolist()]
            launched.append((batch, rows))
        assert batch is not None or launched, "nothing runs, and nothing ever will"
        if launched and (batch is None or rng.random() < 0.7):
            oldest, rows = launched.popleft()
            step = read(strategy, oldest, rows, rng, length)
            waiting -= len(scheduler.update(oldest, step))
        manager.check_integrity(scheduler.running.rows)
    assert not waiting, "rows never end"
