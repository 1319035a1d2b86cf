"""A pipeline whose workers are killed, for `python -m tests.support.kills.check_kills`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from batchgen.config.compose.trust import TYPED
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.jobs.run.shared_engine import EnginePort
from batchgen.pipelines.run import make_sets
from batchgen.pipelines.run.pipeline import compose_pipeline
from batchgen.pipelines.run.pipeline_file import read_pipeline
from batchgen.pipelines.run.run_pipeline import PipelineResult, run_pipeline
from batchgen.storage.folder.export_record import ExportRecord, content_digest
from batchgen.storage.stores.whole_file import publish_file
from tests.support.kills.killing import (
    BEAT,
    PER_SHARD,
    STALE,
    Check,
    Finished,
    Fork,
    Peers,
    digests,
    write_questions,
)

_ENGINE_ROWS = 8
"""Rows in flight of the engine."""
_EXPORT_SECONDS = 0.3
"""How long a worker stands still before and after an export gets its name, to be killed there."""


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
            "export": [
                {"from": "draft", "to": "sft", "out": "drafts"},
                {"from": "judge", "columns": ["row_id", "reply", "text"], "out": "judge.csv"},
                {"from": "last", "to": "sft", "where": "text is not none"},
            ],
        }  # fmt: skip

    def run(self) -> PipelineResult:
        """Be a worker until the pipeline is complete."""
        receive = EnginePort.receive

        def received(port: EnginePort, output: RequestOutput) -> None:
            with self.log.open("a") as file:
                file.write(f"{port.name} {output.request_id}\n")
            receive(port, output)

        def published(new: Path, path: Path) -> None:
            time.sleep(_EXPORT_SECONDS)
            publish_file(new, path)
            time.sleep(_EXPORT_SECONDS)

        with (
            patch.object(EnginePort, "receive", received),
            patch.object(make_sets, "publish_file", published),
        ):
            given = read_pipeline(self.values(), {}, self.arguments)
            return run_pipeline(compose_pipeline(given, TYPED))


def _safe(of: PipelineJob) -> set[object]:
    folders = [path.parent for path in of.out.glob("*/manifest.json")]
    return {(at.name, each) for at in folders for each in Finished(at)()}


def _files(of: PipelineJob) -> dict[str, dict[str, str]]:
    folders = [path.parent for path in of.out.glob("*/manifest.json")]
    return {at.name: digests(at, "data", "grades") for at in folders}


def _exports(of: PipelineJob) -> dict[str, object]:
    """What the exports hold, and of what the record says that they are made. The card of a folder
    of rows names the folder, so that only its shards are compared."""
    folder = of.out / "export"
    made = ExportRecord.read(folder).exports
    for name, one in made.items():
        assert content_digest(folder / name) == one.digests[0], f"{name} is not as recorded"
    there = {path.name for path in folder.iterdir()}
    assert there == {*made, "exports.json"}, f"the exports are {there}"
    return {
        name: (content_digest(path / "data" if path.is_dir() else path), made[name].request)
        for name in made
        if (path := folder / name)
    }


def _current(of: PipelineJob) -> object:
    """What pipeline.json says of the current steps."""
    record = json.loads((of.out / "pipeline.json").read_text())
    return {
        name: (s["current"], s["versions"][s["current"]]) for name, s in record["steps"].items()
    }


def check_pipeline(check: Check) -> None:
    """Kill and pause the workers of a pipeline, in as many histories as are asked for."""
    args = check.args
    data = write_questions(args.work / "rows.jsonl", args.rows)
    whole, job = (
        PipelineJob(args.work / name, data, args.work / f"{name}.requests")
        for name in ("whole", "out")
    )
    seconds = check.undisturbed(Fork(whole.run, args.work / "log"), partial(_safe, whole))
    for number in range(args.histories):
        one = dataclasses.replace(check, rng=random.Random(args.seed + number))
        shutil.rmtree(job.out, ignore_errors=True)
        job.log.unlink(missing_ok=True)
        print(f"history {number + 1} of {args.histories}", flush=True)
        _check_history(one, whole, job, seconds)


def _check_history(
    check: Check, whole: PipelineJob, job: PipelineJob, seconds: tuple[float, float]
) -> None:
    args, rng, log = check.args, check.rng, check.args.work / "log"
    changed = dataclasses.replace(job, log=args.work / "changed", arguments=tuple(args.change))
    started = itertools.count()

    def start() -> Fork:
        # Workers of the second third of all run the changed pipeline, in the same folder.
        third = 3 * next(started) // (args.kills + args.workers)
        return Fork((changed if args.change and third == 1 else job).run, log)

    team = Peers(start, args.workers, rng)
    check.disturb(team, seconds, partial(_safe, job), enough=args.histories == 1)
    if args.change:  # whichever of the two was the last one, this is the current one again
        assert Fork(job.run, log).wait() in (0, 3)
    expected = _files(whole)
    found = {name: of_step for name, of_step in _files(job).items() if name in expected}
    assert found == expected, "the files differ"
    assert _exports(job) == _exports(whole), "the exports differ"
    assert _current(job) == _current(whole), "pipeline.json differs"
    assert (
        args.change
        or (job.out / "pipeline.json").read_bytes() == (whole.out / "pipeline.json").read_bytes()
    )
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
        f"the files of {len(found)} steps, {len(_exports(job))} exports and pipeline.json equal "
        f"those of an undisturbed run, byte for byte; {len(asked[1]):,} requests, {twice} of them "
        "finished twice",
        flush=True,
    )
