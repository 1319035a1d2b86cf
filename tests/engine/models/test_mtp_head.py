"""The heads for multi-token prediction of Qwen3.5, Qwen3-Next, DeepSeek-V3, GLM-4.7-Flash and
GLM-4.5 against those of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.loading.loader import load_model
from batchgen.engine.memory.model_use import ModelUse
from tests.support.engine.qwen_mtp import TheirHead

CPU = torch.device("cpu")
NONE = np.empty(0, np.int64)
KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite", "glm4_moe")


class OurHead:
    """The head of a checkpoint, which reads one row."""

    def __init__(self, folder: Path) -> None:
        head = load_model(folder, device=CPU, heads=("mtp",)).heads["mtp"]
        head.pack()
        self.runner = ModelRunner(head, ModelUse(head, (1,)).caches(CacheSizes(9, 16, 1)))

    def states(self, ids: Sequence[int], hidden: Tensor, start: int = 0) -> Tensor:
        """[n, hidden_size], as `TheirHead.states`, for positions from `start` on."""
        end = start + len(ids)
        inputs = ModelInputs(
            torch.tensor(ids),
            torch.arange(start, end),
            torch.arange(1, 9).unsqueeze(0),
            np.array([len(ids)]),
            np.array([end]),
            hidden=hidden,
        )
        found = self.runner.prefill(PrefillInputs(inputs, NONE, all_hidden=True)).hidden
        assert found is not None
        return found


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("kind", "split"),
    [*((kind, False) for kind in KINDS), ("qwen3_5_moe", True), ("deepseek_v3", True)],
)
def test_the_head_is_that_of_transformers(kind: str, split: bool, tmp_path: Path) -> None:
    theirs = TheirHead(kind)
    ours = OurHead(theirs.save(tmp_path, split_experts=split))
    ids = [(7 * i * i + 3 * i) % 128 for i in range(70)]
    hidden = theirs.hidden(ids)
    wanted = theirs.states(ids[1:], hidden[:-1])
    found = ours.states(ids[1:40], hidden[:39])
    found = torch.cat((found, ours.states(ids[40:], hidden[39:-1], start=39)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    logits = ours.runner.compute_logits(found)
    torch.testing.assert_close(logits, theirs.logits(wanted), rtol=1e-4, atol=1e-4)
    # It goes on from its own states behind the last token.
    tokens, states = [*ids[1:]], [*hidden[:-1]]
    for _ in range(4):
        tokens.append(int(theirs.logits(wanted[-1]).argmax()))
        states.append(wanted[-1])
        wanted = theirs.states(tokens, torch.stack(states))
        found = ours.states(tokens[-1:], found[-1:], start=len(tokens) - 1)
        torch.testing.assert_close(found, wanted[-1:], rtol=1e-4, atol=1e-4)


def test_the_head_counts_its_own_weights(tmp_path: Path) -> None:
    """Not the target's, which it shares; and of its experts those that a token goes through."""
    model = load_model(TheirHead("qwen3_5_moe").save(tmp_path), device=CPU, heads=("mtp",))
    head, expert, size = model.heads["mtp"], 3 * 64 * 32, 64
    attention = size * (2 * 64 + 32 + 32) + 64 * size + 2 * 16
    shared = 3 * size * 48 + size
    assert head.num_parameters == (
        attention + 8 * expert + shared + 8 * size + 2 * size * size + 5 * size
    )
    assert head.parameters_per_token == head.num_parameters - 6 * expert
    alone = load_model(tmp_path, device=CPU)
    assert alone.num_parameters == model.num_parameters and not alone.heads


def test_a_head_that_nobody_wants_is_not_loaded(tmp_path: Path) -> None:
    folder = TheirHead("deepseek_v3").save(tmp_path)
    model = load_model(folder, device=CPU)
    assert model.skipped_parts == ("the head for multi-token prediction",)
    assert model.config.heads == ("mtp",) and not model.heads


def test_a_head_of_several_layers_is_refused(tmp_path: Path) -> None:
    theirs = TheirHead("qwen3_5")
    theirs.model.config.mtp_num_hidden_layers = 2
    theirs.save(tmp_path)
    with pytest.raises(ValueError, match="has 2 layers, and only one is supported"):
        load_model(tmp_path, device=CPU, heads=("mtp",))
