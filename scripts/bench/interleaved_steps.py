"""Times the steps of a pipeline beside each other in one engine, and one after the other."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from batchgen.compose.trust import TYPED
from batchgen.pipelines.pipeline import compose_pipeline
from batchgen.pipelines.pipeline_file import read_pipeline
from batchgen.pipelines.run_pipeline import run_pipeline
from batchgen.sharing.shared_engine import SharedEngine

_PARTS = 10


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the mode."""
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64, help="rows in flight at most")
    parser.add_argument("--rows-per-shard", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)


def run_pipelines(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run three steps with the small model in both ways, in turns."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.write_text(
            "\n".join(json.dumps({"q": f"What is {i} + {i % 97}?"}) for i in range(args.rows))
        )
        for number in range(args.rounds):
            for together in (True, False):
                out = Path(folder, f"{number}-{together}")
                found.append(_run(args, rows, out, together=together))
    return found


def _run(args: argparse.Namespace, rows: Path, out: Path, *, together: bool) -> dict[str, Any]:
    """One run: its seconds from the first step of the engine to the end of the last job, and how
    many rows were in flight in each tenth of that time."""
    wait = {} if together else {"after": "complete"}
    steps: dict[str, Any] = {
        "draft": {"prompt.user": "{{ q }}"},
        "judge": {
            "from": "draft", "dataset.text_as": "reply", "prompt.user": "{{ reply }}", **wait
        },
        "last": {
            "from": "judge", "dataset.text_as": "verdict", "prompt.user": "{{ verdict }}", **wait
        },
    }  # fmt: skip
    values = {
        "experiment": "nano_sdar",
        "dataset": {"choice": "files", "path": str(rows)},
        "sampling": {"choice": "sample", "max_new_tokens": 80},
        "engine": {"device": "cpu", "max_num_seqs": args.batch, "kv_cache_gib": 0.1},
        "post": [],
        "output": {
            "dir": str(out), "rows_per_shard": args.rows_per_shard, "report": False, "columns": []
        },
        "steps": steps,
    }  # fmt: skip
    step, seen, cpu = SharedEngine.step, list[tuple[float, int]](), list[float]()

    def watched(engine: SharedEngine) -> None:
        seen.append((time.perf_counter(), min(engine.in_flight, args.batch)))
        cpu.append(time.process_time())
        step(engine)

    with patch.object(SharedEngine, "step", watched):
        result = run_pipeline(compose_pipeline(read_pipeline(values, {}, []), TYPED))
    ended = time.perf_counter()
    assert result.exit_code == 0, result.message
    times, running = np.array([at for at, _ in seen]), np.array([rows for _, rows in seen])
    spans = np.diff(times, append=ended)
    tenth = np.minimum((times - times[0]) / (ended - times[0]) * _PARTS, _PARTS - 1).astype(int)
    in_flight = [
        float(np.average(running[tenth == part], weights=spans[tenth == part]))
        if (tenth == part).any()
        else 0.0
        for part in range(_PARTS)
    ]
    seconds, processor = float(ended - times[0]), time.process_time() - cpu[0]
    way = "together" if together else "in turn"
    print(
        f"{way:8} {seconds:6.1f} s, {processor:.1f} s CPU, {len(seen):,} steps, rows in flight "
        f"{np.average(running, weights=spans):.1f}: {' '.join(f'{n:.0f}' for n in in_flight)}"
    )
    figures = {"seconds": seconds, "cpu": processor, "steps": len(seen)}
    return {"way": way, **figures, "in_flight": in_flight}
