"""Random routing in benchmarks."""

from __future__ import annotations

import torch
from expert_counts import Chance

CPU = torch.device("cpu")


def test_logits_differ_between_layers_and_forwards() -> None:
    chance = Chance(3, 4)
    drawn = [chance.logits(layer, 5, CPU) for _ in range(3) for layer in range(3)]
    assert all(logits.shape == (5, 4) for logits in drawn)
    assert len({tuple(logits.flatten().tolist()) for logits in drawn}) == 9


def test_layers_with_fewer_tokens_or_of_a_head_that_runs_again_have_others() -> None:
    chance = Chance(3, 4)
    calls = [(0, 5), (1, 5), (2, 2), (2, 2), (2, 5000), (0, 5)]
    drawn = [chance.logits(layer, tokens, CPU) for layer, tokens in calls]
    assert [len(logits) for logits in drawn] == [tokens for _, tokens in calls]
    assert not torch.equal(drawn[2], drawn[3]) and not torch.equal(drawn[0], drawn[5])
