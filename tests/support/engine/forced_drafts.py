"""A strategy whose drafts hold as often as a test wants."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.strategies.ar_spec.step_inputs import Drafts
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy


class ForcedStrategy(ARSpecStrategy):
    """Drafts of which a chosen number holds: it knows what rows say, and errs from there on."""

    def __init__(self, answers: dict[str, list[int]], k: int, seed: int) -> None:
        super().__init__(num_spec_tokens=k, adaptive=False)
        self._answers, self._rng, self.held = answers, random.Random(seed), [0] * (k + 1)
        self._widths = random.Random(seed + 1)
        self._engine: LLMEngine | None = None

    def step_width(self, num_rows: int) -> int:
        """Now and then a step goes without drafts, or with fewer."""
        return self._widths.choice([1, 2, 1 + self.num_spec_tokens, 1 + self.num_spec_tokens])

    def propose(self, batch: DecodeBatch) -> None:
        if batch.width == 1:
            super().propose(batch)
            return
        assert self._engine is not None
        k = batch.width - 1
        state, running = self.step_inputs, self._engine.scheduler.running
        drafts = np.zeros((batch.num_rows, k), np.int64)
        for row, slot in enumerate(batch.batch_slots.tolist()):
            seq = running[slot]
            position = int(state.newest.positions[row])
            whole = seq.token_ids[: seq.num_prompt_tokens] + self._answers[seq.request_id]
            right = self._rng.randint(0, k)
            ahead = whole[position + 1 : position + 1 + k]
            ahead += [1] * (k - len(ahead))
            drafts[row] = [t if j < right else (t + 1) % 128 for j, t in enumerate(ahead)]
        counts = torch.full((len(drafts),), k, dtype=torch.int32)
        state.set_drafts(Drafts(torch.as_tensor(drafts), counts))

    def observe(self, step: Any, current: Any) -> None:
        super().observe(step, current)
        if step.token_ids.shape[1] > 1:
            for count in step.num_tokens[current].tolist():
                self.held[count - 1] += 1

    @property
    def models(self) -> Any:
        (name, role), *_ = super().models.items()
        widths = sorted({*role.widths, 2, 1 + self.num_spec_tokens})
        return {name: replace(role, widths=tuple(widths))}
