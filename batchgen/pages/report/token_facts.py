"""Counts over columns with a value per token: the tokens of each step, accepted drafts, and how
often experts were used.

A step is one forward that generated tokens of a row, or one denoise step of block diffusion.
"""

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
"""After this many values, later rows are not read, so that reports of large jobs take seconds."""
_STEPS_PER_ROW = 1 << 32
"""More than the number of steps of any row."""


@dataclass
class TokenFacts:
    """Counts over the first rows of a job.

    Attributes:
        rows: the number of rows that were counted.
        all_rows: whether these are all rows of the job.
        per_step: how many steps generated each number of tokens.
        accepted: how many steps accepted each number of draft tokens.
        experts: [L, E], how often a token was routed to each expert of each layer; None without the
            column `routed_experts`.
        layers: [L], the numbers of the layers that have experts.
    """

    rows: int = 0
    all_rows: bool = True
    per_step: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    experts: Ints | None = None
    layers: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens of a step."""
        steps = self.per_step.total()
        return sum(tokens * count for tokens, count in self.per_step.items()) / max(steps, 1)


def token_facts(data: JobData) -> TokenFacts:
    """Count over the columns `step_map`, `draft_accepted` and `routed_experts`. A job may lack each
    of them."""
    facts = TokenFacts()
    names = () if data.schema is None else data.schema.names
    columns = [name for name in ("step_map", "draft_accepted", "routed_experts") if name in names]
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
    """Add the counts of a batch to `facts`; return how many values were read."""
    read = 0
    if "step_map" in batch.schema.names:
        steps = batch["step_map"]
        # A key for each token: tokens of one step of one row have the same key.
        keys = np.asarray(pc.list_parent_indices(steps), np.int64) * _STEPS_PER_ROW
        keys += np.asarray(pc.list_flatten(steps), np.int64)
        read += len(keys)
        _, indices, counts = np.unique(keys, return_inverse=True, return_counts=True)
        _count(facts.per_step, counts)
        if "draft_accepted" in batch.schema.names:
            is_accepted = np.asarray(pc.list_flatten(batch["draft_accepted"]))
            per_step = np.bincount(indices, weights=is_accepted, minlength=len(counts))
            _count(facts.accepted, per_step.astype(np.int64))
    if "routed_experts" in batch.schema.names:
        read += _add_experts(facts, batch["routed_experts"])
    return read


def _count(counter: Counter[int], values: npt.NDArray[Any]) -> None:
    """Add to `counter` how often each of the values occurs."""
    numbers, counts = np.unique(values, return_counts=True)
    counter.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def _add_experts(facts: TokenFacts, column: pa.ListArray) -> int:
    """Add the uses of experts to `facts`; return how many values were read.

    Args:
        column: for each row a list over tokens of lists over layers of the ids of the token's
            experts.
    """
    tokens = pc.list_flatten(column)
    num_layers, experts_per_token = tokens.type.list_size, tokens.type.value_type.list_size
    ids = np.asarray(tokens.flatten().flatten())
    ids = ids.reshape(len(tokens), num_layers, experts_per_token)
    if not len(ids):
        return 0
    # The column does not say how many experts there are: the largest id so far does.
    num_experts = 0 if facts.experts is None else facts.experts.shape[1]
    width = max(int(ids.max()) + 1, num_experts)
    counts = np.stack(
        [np.bincount(ids[:, layer].ravel(), minlength=width) for layer in range(num_layers)]
    )
    if facts.experts is not None:
        counts[:, :num_experts] += facts.experts
    facts.experts = counts
    facts.layers = facts.layers or list(range(num_layers))
    return ids.size
