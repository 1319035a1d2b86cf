"""Finds the first operation of the engine in which a row's result depends on the other rows of its
batch.

`batchgen audit --operations` calls `compare_operations`, which computes rows together and one by
one. A `Tape` notes a digest of each operation's result for each token, at the slot of the KV cache
that holds the token. The digests of both runs are then compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.operation_digests import Tape
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.pipelines.proof.audit.audited_job import AuditedRow
from batchgen.pipelines.proof.audit.rows_again import compute_again, rows_at
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError


class _Sample(NamedTuple):
    """The digests of a sample.

    Attributes:
        tokens: the token ids of prompt and answer.
        prompt: the number of prompt tokens.
        digests: [operations, tokens] digests of its KV slots.
    """

    tokens: Sequence[int]
    prompt: int
    digests: Tensor


Samples = Mapping[tuple[int, int], _Sample]
"""(index of the row among those that were computed together, sample number) → the sample."""


def compare_operations(
    config: JobConfig, parts: ResolvedJob, numbers: Sequence[int], storage: Storage | None
) -> list[AuditedRow]:
    """Compute input rows in one batch, and then each row alone with its samples, and compare the
    result of each operation for each token.

    The first operation that differs, in the order of the layers, is the cause, because all its
    inputs were equal. CUDA graphs are off.

    Raises:
        ConfigError: the weights are divided between ranks.
    """
    if config.engine.tensor_parallel > 1:
        raise ConfigError(
            "audit --operations works with one engine on one device: set engine.tensor_parallel=1"
        )
    config = replace(config, engine=replace(config.engine, cuda_graph=False))
    assert isinstance(parts, OpenedJob)
    watch = _Watch(replace(parts, config=config))
    batched, rows = watch.run(config, numbers, storage), []
    for index, row in enumerate(rows_at(parts.source, numbers)):
        alone = watch.run(config, [row.index], storage)
        together = {sample: batched[index, sample] for _, sample in alone}
        rows.append(AuditedRow(row.id, len(alone), watch.difference(together, alone)))
    return rows


class _Watch:
    """The weights of a job, and a recorder of the operations of the engines that use them."""

    def __init__(self, parts: OpenedJob) -> None:
        self._parts, self._recipe = parts, parts.recipe(parts.config)
        self._weights = self._recipe.load()
        self._others = self._recipe.load_others(self._weights)
        self._tape = Tape(0, self._weights.device)
        self._samples: dict[tuple[int, int], _Sample] = {}

    def run(self, config: JobConfig, numbers: Sequence[int], storage: Storage | None) -> Samples:
        """Compute rows in one batch, and return their samples."""
        self._samples = {}
        parts = replace(self._parts, port=self._engine)
        with (
            tempfile.TemporaryDirectory(prefix="batchgen-operations-") as out,
            self._tape.watching(self._weights),
        ):
            compute_again(config, parts, numbers, Path(out), storage)
        return self._samples

    def _engine(self) -> LLMEngine:
        tape, compiler = self._tape, self._parts.compiler
        tape.resize(2 * self._recipe.config.block_size)  # of the forwards that measure memory
        recipe = replace(self._recipe, strategy=deepcopy(self._recipe.strategy))  # it has states
        engine = recipe.engine(self._weights, self._others, compiler)
        size, blocks = engine.config.block_size, engine.scheduler.block_manager
        tape.resize(engine.memory.num_blocks * size)
        free = blocks.free

        # The digests of a sample are read when its blocks are freed, which is at its end.
        def read_and_free(seq: Row) -> None:
            starts = torch.tensor(seq.block_table, device=tape.plane.device)[:, None] * size
            slots = (starts + torch.arange(size, device=starts.device)).flatten()
            digests = tape.plane[:, slots[: len(seq.token_ids)]].cpu()
            key = seq.request_id.row, seq.request_id.sample
            self._samples[key] = _Sample([*seq.token_ids], seq.num_prompt_tokens, digests)
            free(seq)

        blocks.free = read_and_free  # type: ignore[method-assign]
        return engine

    def difference(self, together: Mapping[int, _Sample], alone: Samples) -> str | None:
        """Describe the first operation in which a sample of a row differs; None if none does.

        Args:
            together: sample number → the sample, computed in one batch with other rows.
            alone: the samples of the row, computed without other rows.
        """
        for (_, sample), (tokens, prompt, digests) in sorted(alone.items()):
            others, _, operations = together[sample]
            pairs = enumerate(zip(tokens, others, strict=False))
            shortest = min(len(tokens), len(others))
            equal = next((index for index, (one, other) in pairs if one != other), shortest)
            # After the first token that differs, all digests differ.
            known = min(equal, digests.shape[1], operations.shape[1])
            differing = self._tape.first_difference(operations[:, :known], digests[:, :known])
            if differing is not None:
                name, token = differing
                where = f"token {token} of the prompt"
                if token >= prompt:
                    where = f"token {token - prompt} after the prompt"
                return f"sample {sample}: {name} at {where}"
            if tokens != others:
                index = equal - prompt
                return f"sample {sample}: last layer, head or sampler at token {index}"
        return None
