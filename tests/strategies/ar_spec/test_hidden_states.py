"""A proposer that drafts from the model's hidden states, as heads for multi-token prediction do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.scheduled_batch import PrefillBatch
from batchgen.strategies.ar_spec.proposers import Proposer
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

CPU = torch.device("cpu")


class HeadProposer:
    """Sees whether the hidden states are those of the right tokens; carries the last one of each
    row's chunk to its next chunk, and drafts the token that each newest one was drawn from.
    """

    widths: tuple[int, ...] = ()
    needs_hidden = True

    def __init__(self, model: CausalLM, whole: Callable[[list[int]], Tensor]) -> None:
        self._model = model
        self._whole = whole
        self._carried: dict[str, Tensor] = {}
        self.checked = 0

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        assert hidden is not None and len(hidden) == len(inputs.input_ids)
        chunks = hidden.split(batch.lengths)
        for seq, start, chunk in zip(batch.seqs, batch.starts, chunks, strict=True):
            end = start + len(chunk)
            wanted = self._whole(seq.token_ids[:end])
            self._check(chunk, wanted[start:])
            if start and seq.request_id in self._carried:
                before = self._carried[seq.request_id]
                self._check(before, wanted[start - 1])
            self._carried[seq.request_id] = chunk[-1]

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        rows, store = state.rows, state.store
        assert rows.hidden.shape == (len(rows.entries), self._model.config.hidden_size)
        for slot, hidden in zip(rows.entries.tolist(), rows.hidden, strict=True):
            ids = store.tokens[slot, : int(store.lengths[slot])].tolist()
            self._check(hidden, self._whole(ids[:-1])[-1])
        tokens = self._model.compute_logits(rows.hidden).argmax(-1)
        counts = torch.full_like(tokens, k, dtype=torch.int32)
        return Drafts(tokens.unsqueeze(1).expand(-1, k).contiguous(), counts)

    def _check(self, hidden: Tensor, logits: Tensor) -> None:
        found = self._model.compute_logits(hidden.view(-1, hidden.shape[-1]))
        torch.testing.assert_close(found, logits.view_as(found), rtol=1e-4, atol=1e-4)
        self.checked += 1

    def skipped(self, state: SpecStepInputs) -> None:
        raise AssertionError("every step has drafts")


class HeadStrategy(ARSpecStrategy):
    def __init__(self, proposer: Proposer, k: int) -> None:
        super().__init__(num_spec_tokens=k, adaptive=False)
        self._own = proposer

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        super().attach(runners)
        self._proposer = self._own


@pytest.mark.parametrize("k", [1, 3])
def test_hidden_states_belong_to_their_tokens(
    tiny_model: Callable[..., Path], run_paged: Callable[..., Tensor], k: int
) -> None:
    model = load_model(tiny_model("qwen3"), device=CPU)
    whole = load_model(tiny_model("qwen3"), device=CPU)
    proposer = HeadProposer(model, lambda ids: run_paged(whole, ids, [len(ids)]))
    config = EngineConfig(
        max_num_seqs=4,
        max_batched_tokens=16,
        kv_cache_gib=0.001,
        block_size=4,
        max_model_len=80,
        overlap=True,
    )
    engine = LLMEngine(model, None, (), HeadStrategy(proposer, k), config)
    for i in range(6):
        prompt = [3 + (i * 7 + j) % 11 for j in range(5 + 6 * i)]
        params = SamplingParams(temperature=0.5 * (i % 2), max_new_tokens=12 + i, seed=i)
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished():
        engine.step()
    assert proposer.checked > 50
    assert engine.stats.counts["num_draft_tokens"] > 0
