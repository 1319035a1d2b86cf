"""Times the steps of `rows` over rows of 1 kB, and a job of what they leave."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from measuring import anonymous_mib
from synthetic_job import InstantEngine, instant_job

from batchgen.jobs.run_job import run_job
from batchgen.row_index.chain import ChainPass
from batchgen.row_index.indexed_source import IndexedSource

_WORDS = 150
_VOCABULARY = 20_000
DEDUPING: list[dict[str, Any]] = [
    {"Dedupe": {"by": "document"}},
    {"Dedupe": {"by": "document", "near": 0.8}},
]


class StepClock:
    """A step on its way through the rows, with the seconds of the processor that it takes, and what
    is said of the memory that it holds."""

    def __init__(self, running: Any) -> None:
        self._running, self.seconds = running, 0.0
        texts = getattr(running, "_texts", None)
        self.held: Callable[[], int] | None = None if texts is None else lambda: texts.num_bytes

    @property
    def full(self) -> bool:
        return bool(self._running.full)

    def take(self, row: Any) -> Any:
        began = time.thread_time()
        try:
            return self._running.take(row)
        finally:
            self.seconds += time.thread_time() - began

    def close(self) -> None:
        self._running.close()


def time_steps(running: ChainPass) -> list[StepClock]:
    """Put a clock around each step."""
    clocks = [StepClock(step) for step in running._passes]
    running._passes = clocks
    return clocks


def write_rows(path: Path, rows: int) -> None:
    """Write rows with a number and a document of 1 kB; a tenth are copies of others, and a tenth
    nearly so."""
    draw = random.Random(0)
    vocabulary = [
        f"{draw.randrange(10**5, 10**6)}"[: draw.randrange(3, 7)] for _ in range(_VOCABULARY)
    ]
    texts: list[list[str]] = []
    with path.open("w") as file:
        for number in range(rows):
            words = draw.choices(vocabulary, k=_WORDS)
            if texts and number % 10 == 1:
                words = draw.choice(texts)
            elif texts and number % 10 == 2:
                words = [*draw.choice(texts)]
                words[draw.randrange(_WORDS)] = "another"
            elif len(texts) < 1000:
                texts.append(words)
            text = " ".join(words)
            file.write(json.dumps({"number": number, "document": f"{text:1000}"[:1000]}) + "\n")


def add_steps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--without-dedupe", action="store_true", help="leave out both kinds of it")


def run_steps(options: argparse.Namespace) -> list[Any]:
    """Time the steps of `rows` over rows of 1 kB, and a job of what they leave.

    A tenth of the rows fails the filter, a tenth are copies of others and a tenth nearly so. Times
    are of the processor, which neighbours disturb less: of each step for one of its rows, of the
    pass with reading and the index for a row of the data set, and of the job, whose engine costs
    nothing. Memory is without the pages of mapped files.
    """
    with tempfile.TemporaryDirectory(prefix="bench_job_layer") as temporary:
        path = Path(temporary, "rows.jsonl")
        write_rows(path, options.rows)
        engine = InstantEngine(32, every=100)
        values = {
            "dataset": {"choice": "files", "path": str(path), "id_column": "number"},
            "prompt": {"choice": "text", "text": "{{ document }}"},
            "rows": [
                {"Filter": {"where": "number % 10 != 3 and document|length > 100"}},
                *([] if options.without_dedupe else DEDUPING),
                {"Keep": {"share": 0.9}},
            ],
        }
        config, parts = instant_job(Path(temporary), engine, values)
        source = parts.source
        assert isinstance(source, IndexedSource)
        clocks, took, facts = list[StepClock](), list[float](), None
        start, open_index = source.chain.start, source.open_index

        def timed_start(tokenizer: Any = None) -> Any:
            running = start(tokenizer)
            clocks.extend(time_steps(running))
            return running

        def timed_open(*given: Any, **more: Any) -> None:
            nonlocal facts
            began = time.process_time()
            open_index(*given, **more)
            took.extend([time.process_time() - began, anonymous_mib()])
            facts = source.facts

        before, began = anonymous_mib(), time.process_time()
        with (
            patch.object(source.chain, "start", timed_start),
            patch.object(source, "open_index", timed_open),
        ):
            result = run_job(config, parts)
        seconds = time.process_time() - began - took[0]
        assert result.exit_code == 0 and facts is not None, result.message
        found = {"rows": options.rows, "pass_us": took[0] / options.rows * 1e6}
        found |= {
            "before_mib": before,
            "pass_mib": took[1],
            "peak_mib": max(mib for _, mib in engine.memory_used),
        }
        found["job_us"] = seconds / facts.rows * 1e6
        print(facts.funnel)
        for clock, step in zip(clocks, facts.steps, strict=True):
            found[step.name] = clock.seconds / step.rows_in * 1e6
            held = "" if clock.held is None else f", {clock.held() / step.rows_out:.0f} bytes a row"
            print(f"{step.name}: {found[step.name]:.1f} us a row{held}")
        print("pass: {pass_us:.0f} us a row of the data set; job: {job_us:.0f} us".format(**found))
        print(
            "MiB: {before_mib:.0f}, {pass_mib:.0f} behind the pass, {peak_mib:.0f}".format(**found)
        )
    return [found]
