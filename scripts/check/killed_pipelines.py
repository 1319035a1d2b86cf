"""A pipeline whose workers are killed, for check_kills.py."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from killing import BEAT, PER_SHARD, STALE, Check, Finished, Fork, Peers, digests, write_questions

from batchgen.compose.trust import TYPED
from batchgen.engine.base.outputs import RequestOutput
from batchgen.pipelines.pipeline import compose_pipeline
from batchgen.pipelines.pipeline_file import read_pipeline
from batchgen.pipelines.run_pipeline import PipelineResult, run_pipeline
from batchgen.sharing.shared_engine import EnginePort

_ENGINE_ROWS = 8
"""Rows in flight of the engine."""


@dataclass(frozen=True)
class PipelineJob:
    """A pipeline of three steps with the small model, as one worker runs it, with further
    arguments. `log` is a file that gets a line for every request that an engine has finished."""

    out: Path
    rows: Path
    log: Path
    arguments: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """What its file would hold."""
        draft = {"sampling.n": 2, "post": [{"_target_": "batchgen.grading.extract.Extract",
                 "methods": ["last_number"]}]}  # fmt: skip
        where = {"where": "answer is none or sample_index == 1", "text_as": "reply"}
        judge = {"from": "draft", "dataset": where, "prompt.user": "{{ reply }} {{ q }}"}
        some = [{"Filter": {"where": "verdict|length % 5 != 0"}}, {"Dedupe": {"by": "verdict"}}]
        last = {"from": "judge", "dataset.text_as": "verdict", "rows": some,
                "prompt.user": "{{ verdict }}"}  # fmt: skip
        return {
            "experiment": "nano_sdar",
            "dataset": {"choice": "files", "path": str(self.rows)},
            "prompt.user": "{{ q }}",
            "sampling": {"choice": "sample", "max_new_tokens": 8},
            "engine": {"device": "cpu", "max_num_seqs": _ENGINE_ROWS, "kv_cache_gib": 0.02},
            "post": [],
            "output": {
                "dir": str(self.out), "rows_per_shard": PER_SHARD, "report": False, "columns": []
            },
            "workers": {"heartbeat": BEAT, "stale_after": STALE},
            "steps": {"draft": draft, "judge": judge, "last": last},
        }  # fmt: skip

    def run(self) -> PipelineResult:
        """Be a worker until the pipeline is complete."""
        receive = EnginePort.receive

        def received(port: EnginePort, output: RequestOutput) -> None:
            with self.log.open("a") as file:
                file.write(f"{port.name} {output.request_id}\n")
            receive(port, output)

        with patch.object(EnginePort, "receive", received):
            given = read_pipeline(self.values(), {}, self.arguments)
            return run_pipeline(compose_pipeline(given, TYPED))


def check_pipeline(check: Check) -> None:
    """Kill and pause the workers of a pipeline."""
    args, rng = check.args, check.rng
    data = write_questions(args.work / "rows.jsonl", args.rows)
    whole, job = (
        PipelineJob(args.work / name, data, args.work / f"{name}.requests")
        for name in ("whole", "out")
    )

    def safe(of: PipelineJob) -> set[object]:
        folders = [path.parent for path in of.out.glob("*/manifest.json")]
        return {(at.name, each) for at in folders for each in Finished(at)()}

    def files(of: PipelineJob) -> dict[str, dict[str, str]]:
        folders = [path.parent for path in of.out.glob("*/manifest.json")]
        return {at.name: digests(at, "data", "grades") for at in folders}

    log = args.work / "log"
    seconds = check.undisturbed(Fork(whole.run, log), partial(safe, whole))
    changed = dataclasses.replace(job, log=args.work / "changed", arguments=tuple(args.change))
    started = itertools.count()

    def start() -> Fork:
        # Workers of the second third of all run the changed pipeline, in the same folder.
        third = 3 * next(started) // (args.kills + args.workers)
        return Fork((changed if args.change and third == 1 else job).run, log)

    team = Peers(start, args.workers, rng)
    check.disturb(team, seconds, partial(safe, job))
    expected = files(whole)
    found = {name: of_step for name, of_step in files(job).items() if name in expected}
    assert found == expected, "the files differ"
    assert len(found) == 3 and all(found.values())
    asked = [Counter(of.log.read_text().splitlines()) for of in (whole, job)]
    assert set(asked[0].values()) == {1} and asked[1].keys() <= asked[0].keys()
    # Rows of a changed step may be there already as those of the other version.
    assert args.change or asked[1].keys() == asked[0].keys()
    twice = asked[1].total() - len(asked[1])
    # A kill loses what its last step finished; at the end of a step workers begin rows of others.
    most = args.kills * _ENGINE_ROWS + (args.workers - 1) * len(found) * 2 * _ENGINE_ROWS
    assert twice <= most, f"{twice} requests were finished twice, and {most} could have been"
    print(
        f"the files of {len(found)} steps equal those of an undisturbed run, byte for byte; "
        f"{len(asked[1]):,} requests, {twice} of them finished twice"
    )
