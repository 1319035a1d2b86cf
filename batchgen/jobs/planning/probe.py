"""Runs some rows of a job, to see how long answers are and how fast the device is."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.requests import sample_params
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.forecast.calibration import Calibration, RunCounts
from batchgen.jobs.forecast.planned_work import job_device
from batchgen.jobs.forecast.scan import ReadRow
from batchgen.kernels.compile_ahead import have_compiled
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.engine.llm_engine import LLMEngine
from batchgen.jobs.resolve.opened_job import OpenedJob
from batchgen.util.request_id import RequestId

_WARM_UP_TOKENS = 3
_FULL_TOKENS = 16
"""Tokens of each answer while the speed of a full engine is measured."""


def probe(
    config: JobConfig,
    opened: OpenedJob,
    sample: list[ReadRow],
    number: int,
    samples: int,
    most_rows: int,
) -> Calibration:
    """Run `number` rows of the sample, spread over it, with `samples` of each, as the job would.

    They tell how long answers get. Where the job has more rows at once than these, the speed is
    that of a second run: copies of them fill the engine for a few steps. A step of 64 rows takes
    far less than 16 times as long as one of 4, and how much less no model knows well. `most_rows`
    is the number of the job's answers. ConfigError if the engine cannot be built, or no row can
    run.
    """
    places = np.linspace(0, len(sample) - 1, min(number, len(sample))).round().astype(int)
    chosen = [sample[place] for place in sorted(set(places.tolist()))]
    # A start that compiles kernels says nothing of the job's, which finds them compiled.
    tells_start = job_device(config) == "cpu" or have_compiled()
    started = time.perf_counter()
    engine = dataclasses.replace(opened, config=config).load()
    start_s = time.perf_counter() - started if tells_start else None
    with closing(engine):
        run = _Run(engine, opened.prompt)
        run.answers(chosen[:1], samples, _WARM_UP_TOKENS)
        answers, counts = run.counted(chosen, samples)
        if not answers:
            raise ConfigError(f"plan.probe={number}: none of the rows can run: leave it out")
        full, together = None, min(engine.max_num_seqs, most_rows)
        if together > len(answers):
            copies = -(-together // len(chosen))
            run.answers(chosen, copies, _WARM_UP_TOKENS)
            full = run.counted(chosen, copies, _FULL_TOKENS)[1]
    prompts = np.array([len(read.ids) for read in chosen], np.int64)
    source = f"a probe of {len(chosen):,} row{'s' * (len(chosen) != 1)}"
    return Calibration(source, prompts, np.array(answers, np.int64), counts, start_s, full)


class _Run:
    """Runs rows in the engine of a job, with the images of their prompts."""

    def __init__(self, engine: LLMEngine, prompt: Prompt) -> None:
        self._engine, self._prompt = engine, prompt

    def counted(
        self, rows: list[ReadRow], samples: int, most: int | None = None
    ) -> tuple[list[int], RunCounts]:
        """Run rows to their ends; returns the tokens of the answers and what the engine counted."""
        before = dataclasses.replace(self._engine.stats)
        started = time.perf_counter()
        answers = self.answers(rows, samples, most)
        seconds, stats = time.perf_counter() - started, self._engine.stats
        return answers, RunCounts(
            seconds,
            len(answers),
            stats.generated_tokens - before.generated_tokens,
            stats.prefill_steps - before.prefill_steps,
            stats.prefill_tokens - before.prefill_tokens,
            stats.decode_steps - before.decode_steps,
            stats.decode_rows - before.decode_rows,
        )

    def answers(self, rows: list[ReadRow], samples: int, most: int | None = None) -> list[int]:
        """Run rows to their ends, or to `most` tokens; returns the tokens of the answers."""
        engine = self._engine
        for read in rows:
            longest = min(read.params.max_new_tokens, most or read.params.max_new_tokens)
            images = [each.image for each in self._prompt.asked(read.row)[1]]
            for sample in range(samples):
                params = sample_params(
                    read.params,
                    read.row.id,
                    sample,
                    max_new_tokens=longest,
                    min_new_tokens=min(read.params.min_new_tokens, longest),
                )
                try:
                    request_id = RequestId("", read.row.index, sample)
                    engine.add_request(request_id, read.ids, params, images=images)
                except RequestError:  # the plan says it of the rows that were looked at
                    continue
        answers = []
        while engine.has_unfinished():
            finished = engine.step()
            answers += [len(output.token_ids) for output in finished if output.error is None]
        return answers
