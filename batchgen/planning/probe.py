"""Runs some rows of a job, to see how long answers are and how fast the device is."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from batchgen.config import JobConfig
from batchgen.engine.outputs import RequestError
from batchgen.errors import ConfigError
from batchgen.fingerprint import derive_seed
from batchgen.planning.scan import ReadRow
from batchgen.planning.seen import RunCounts, Seen

if TYPE_CHECKING:
    from batchgen.build import OpenedJob
    from batchgen.engine.llm_engine import LLMEngine

_WARM_UP_TOKENS = 3


def probe(config: JobConfig, opened: OpenedJob, sample: list[ReadRow], number: int) -> Seen:
    """Run some rows with all their samples, as the job would.

    Args:
        config: the job's configuration.
        opened: what it runs on; its weights are loaded.
        sample: rows with their prompts, of which so many are run that are spread over all.
        number: how many rows.

    Raises:
        ConfigError: the engine cannot be built, or none of the rows can run.
    """
    places = np.linspace(0, len(sample) - 1, min(number, len(sample))).round().astype(int)
    chosen = [sample[place] for place in sorted(set(places.tolist()))]
    started = time.perf_counter()
    engine = opened.build_engine(config)
    start_s = time.perf_counter() - started
    with closing(engine):
        _run(config, opened, engine, chosen[:1], _WARM_UP_TOKENS)
        before = dataclasses.replace(engine.stats)
        started = time.perf_counter()
        answers = _run(config, opened, engine, chosen, config.sampling.max_new_tokens)
        seconds = time.perf_counter() - started
        stats = engine.stats
    if not answers:
        raise ConfigError(f"plan.probe={number}: none of the rows can run: leave it out")
    counts = RunCounts(
        seconds,
        len(answers),
        stats.generated_tokens - before.generated_tokens,
        stats.prefill_steps - before.prefill_steps,
        stats.prefill_tokens - before.prefill_tokens,
        stats.decode_steps - before.decode_steps,
        stats.decode_rows - before.decode_rows,
    )
    prompts = np.array([len(read.ids) for read in chosen], np.int64)
    source = f"a probe of {len(chosen):,} row{'s' * (len(chosen) != 1)}"
    return Seen(source, prompts, np.array(answers, np.int64), counts, start_s)


def _run(
    config: JobConfig, opened: OpenedJob, engine: LLMEngine, rows: list[ReadRow], longest: int
) -> list[int]:
    """Run rows to their ends; returns the tokens of the answers."""
    from batchgen.constraint.row_constraints import RowConstraints

    constraints = RowConstraints(config.constraint, opened.source.features)
    least = min(config.sampling.min_new_tokens, longest)
    for read in rows:
        for sample in range(config.sampling.n):
            params = dataclasses.replace(
                config.params,
                seed=derive_seed(config.sampling.seed, read.row.id, sample),
                constraint=constraints.of(read.row),
                max_new_tokens=longest,
                min_new_tokens=least,
            )
            try:
                engine.add_request(f"{read.row.index}.{sample}", read.ids, params)
            except RequestError:  # the plan says it of the rows that were looked at
                continue
    answers = []
    while engine.has_unfinished():
        finished = engine.step()
        answers += [len(output.token_ids) for output in finished if output.error is None]
    return answers
