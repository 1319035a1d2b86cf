"""Sums up columns with a value per token: tokens per step, accepted drafts, the load of experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pages.report.report_data import Ints
from batchgen.pages.report.report_rows import JobData
from batchgen.pages.tokens.token_row import moe_layers

MOST_VALUES = 8_000_000
"""Values that are read of these columns; the rows behind are not looked at."""
_LARGEST_STEP = 1 << 32


@dataclass
class TokenFacts:
    """What was counted in the first rows of a job."""

    rows: int = 0
    all_rows: bool = True
    per_step: Counter[int] = field(default_factory=Counter)  # steps by their number of tokens
    accepted: Counter[int] = field(default_factory=Counter)  # steps by the drafts that held
    experts: Ints | None = None  # [layers, experts], how often a token went through an expert
    layers: list[int] = field(default_factory=list)  # their numbers

    @property
    def tokens_per_step(self) -> float:
        steps = self.per_step.total()
        return sum(tokens * count for tokens, count in self.per_step.items()) / max(steps, 1)


def token_facts(data: JobData) -> TokenFacts:
    """Add up the columns `step_map`, `draft_accepted` and `routed_experts` that there are."""
    facts = TokenFacts()
    names = () if data.schema is None else data.schema.names
    columns = [n for n in ("step_map", "draft_accepted", "routed_experts") if n in names]
    if not columns:
        return facts
    if "routed_experts" in columns:
        facts.layers = moe_layers(data.schema)
    read = 0
    for table in data.tables(columns):
        if read > MOST_VALUES:
            facts.all_rows = False
            break
        facts.rows += table.num_rows
        for batch in table.to_batches():
            read += _add(facts, batch)
    return facts


def _add(facts: TokenFacts, batch: pa.RecordBatch) -> int:
    """Count a batch; returns how many values it has."""
    read = 0
    if "step_map" in batch.schema.names:
        steps = batch["step_map"]
        # A number for each token that is the same for the tokens of one step of one row.
        keys = np.asarray(pc.list_parent_indices(steps), np.int64) * _LARGEST_STEP
        keys += np.asarray(pc.list_flatten(steps), np.int64)
        read += len(keys)
        _, indices, counts = np.unique(keys, return_inverse=True, return_counts=True)
        _count(facts.per_step, counts)
        if "draft_accepted" in batch.schema.names:
            held = np.asarray(pc.list_flatten(batch["draft_accepted"]))
            _count(facts.accepted, np.bincount(indices, held, len(counts)).astype(np.int64))
    if "routed_experts" in batch.schema.names:
        read += _add_experts(facts, batch["routed_experts"])
    return read


def _count(counter: Counter[int], values: npt.NDArray[Any]) -> None:
    numbers, counts = np.unique(values, return_counts=True)
    counter.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def _add_experts(facts: TokenFacts, column: pa.ListArray) -> int:
    tokens = pc.list_flatten(column)  # [N] lists of [layers] lists of [experts per token]
    layers, each = tokens.type.list_size, tokens.type.value_type.list_size
    ids = np.asarray(tokens.flatten().flatten()).reshape(len(tokens), layers, each)
    if not len(ids):
        return 0
    size = max(int(ids.max()) + 1, 0 if facts.experts is None else facts.experts.shape[1])
    counts = np.stack([np.bincount(ids[:, i].ravel(), minlength=size) for i in range(layers)])
    if facts.experts is not None:
        counts[:, : facts.experts.shape[1]] += facts.experts
    facts.experts = counts
    facts.layers = facts.layers or list(range(layers))
    return ids.size
