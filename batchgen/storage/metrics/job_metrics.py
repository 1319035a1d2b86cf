"""The file metrics.json of a job: what each of its attempts did, and the figures of the whole job.

Each worker keeps a `Metrics` and saves it every few seconds; reports and `batchgen status` read the
file.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchgen.storage.costs.chain_costs import JobCost, all_steps, as_values
from batchgen.storage.metrics.peers import Peers, added, reported_attempt, seconds
from batchgen.storage.metrics.tally import Tally
from batchgen.storage.metrics.timeline import Timeline, metrics_text
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.metrics_file import read_metrics
from batchgen.storage.stores.whole_file import write_atomic

SAVE_SECONDS = 10.0  # between two times that a running job saves the file
_REPORT_SECONDS = 1.0  # between two reports to the other workers
Status = Literal["running", "complete", "stopped", "failed", "killed"]


@dataclass
class Attempt:
    """One run of the command, by one worker.

    Attributes:
        rows_resumed: output rows that earlier attempts had written.
        rows_copied: the number of its rows that were copied from older jobs; their tokens are not
            counted.
        rows_begun: the number of its rows that earlier attempts had begun and this attempt
            continued.
        tokens_begun: the tokens of `rows_begun` that earlier attempts had generated.
        rows_recorded: unfinished output rows whose tokens so far are recorded, so that a later
            attempt can continue them.
        rows_total: output rows of the whole job; None if that is not known.
        status: how it ended. If it was killed, the file still says `running`, and the next attempt
            changes that to `killed`.
        started: the local time of its start.
        rows: output rows that it has computed or copied, error rows included.
        error_rows: the number of these rows that have an error.
        prompt_tokens, generated_tokens: tokens of its rows.
        wall_s: seconds since the attempt began, including the time to load the weights.
        generate_s: seconds since the engine began.
        peak_rss_mib: the most memory of the process, in MiB.
        memory: how the engine divides the device's memory, in bytes; empty without an engine.
        engine: the counts of the engine.
        start_s: seconds until the engine began, mostly the loading of the weights.
        batch_dependence: why, on this CPU, a token's bits depend on the rest of the batch; None if
            they do not, and on a GPU.
        contract: what decided the bits of its rows besides models, data and configuration, by name,
            such as the type of GPU; empty without an engine.
        device_s: seconds of device time that the engine's steps took.
        worker: the number of the worker.
        session: a text that is the same for workers that ran at the same time.
        images: the images of its rows' prompts, once for each sample.
        image_tokens: the tokens of these images, which count as prompt tokens.
        host, pid: the machine and the process id.
        devices: the number of devices that share its model.
    """

    rows_resumed: int
    rows_total: int | None = None
    status: Status = "running"
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    host: str = field(default_factory=socket.gethostname)
    rows: int = 0
    error_rows: int = 0
    rows_copied: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    wall_s: float = 0.0
    generate_s: float = 0.0
    peak_rss_mib: float = 0.0
    memory: Mapping[str, int | None] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    start_s: float = 0.0
    batch_dependence: str | None = None
    contract: Mapping[str, str] = field(default_factory=dict)
    device_s: float = 0.0
    worker: int = 0
    session: str = ""
    images: int = 0
    image_tokens: int = 0
    pid: int = field(default_factory=os.getpid)
    devices: int = 1
    rows_begun: int = 0
    tokens_begun: int = 0
    rows_recorded: int = 0


class Metrics:
    """The content of metrics.json.

    It is saved while the job runs, so that it also has the figures of an attempt that was killed.
    Workers report their figures to each other in heartbeats, and the first worker writes the file.

    Attributes:
        attempt: the running attempt.
        tally: counts of all finished rows, those of earlier attempts included.
        others: the figures that the other workers had reported at the last `look` or `save`.
        in_flight: the number of rows in the engine that are running, not waiting.
        was_complete: whether an earlier attempt completed the job.
        score: the score of the job's marks; None without marks.
        score_so_far: returns the mean of the marks that this worker knows so far, while the job has
            no score; None without marks.
        adapter_scores: the scores of the rows of each adapter, by its name.
        funnel: the number of answers of other jobs that were left after each filter, if the job
            reads any.
        budget: returns the used part of the job's budget; None without a budget.
        timeline: the progress over time; with several workers only that of this one.
        read_jobs: the costs of the jobs whose rows are read.
        sampling: values of the group `sampling`, with the model's recommendation for each.
        tell: called with the content of the file whenever this worker has written it.
    """

    def __init__(
        self,
        path: Path,
        rows_resumed: int,
        tally: Tally,
        team: Peers | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Read the figures of earlier attempts. Raises JobError if their file is damaged."""
        self._path = path
        self._storage = FolderStorage(path.parent) if storage is None else storage
        self._team = team
        self._started = time.monotonic()
        self._saved = self._reported = 0.0
        self._text = ""
        self.attempt = Attempt(rows_resumed)
        if team is not None:
            self.attempt.worker, self.attempt.session = team.number, team.session
        self.others: Sequence[Mapping[str, Any]] = ()
        self.tally = tally
        self.in_flight = 0
        self._earlier: list[dict[str, Any]] = []
        self.was_complete = False
        self.score: Mapping[str, Any] | None = None
        self.score_so_far: Callable[[], float | None] = lambda: None
        self.adapter_scores: Mapping[str, Any] = {}
        self.funnel: Sequence[tuple[str, int]] = ()
        self.budget: Callable[[], Mapping[str, Any]] | None = None
        self.timeline = Timeline(rows=rows_resumed)
        self.read_jobs: Sequence[JobCost] = ()
        self.sampling: Mapping[str, Mapping[str, float | None]] = {}
        self.tell: Callable[[Mapping[str, Any]], None] = lambda content: None
        if (earlier := read_metrics(self._storage)) is not None:
            self.timeline = Timeline(earlier.get("timeline", ()), rows_resumed)
            self._earlier = earlier.get("attempts", [])
            self.was_complete = earlier["status"] == "complete"
        for earlier in self._earlier:
            if earlier["status"] == "running":
                earlier["status"] = "killed"

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second that this attempt has generated while its engine ran."""
        computed = self.attempt.generated_tokens - self.attempt.tokens_begun
        return computed / max(self.attempt.generate_s, 1e-9)

    @property
    def rows_copied(self) -> int:
        """The number of rows that all attempts have copied from older jobs."""
        return sum(attempt.get("rows_copied", 0) for attempt in self._attempts())

    @property
    def age(self) -> float:
        """The seconds since this attempt began."""
        return time.monotonic() - self._started

    def due(self) -> bool:
        """Whether SAVE_SECONDS have passed since the file was saved."""
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def report_due(self) -> bool:
        """Whether it is time to call `report` again."""
        return time.monotonic() - self._reported >= _REPORT_SECONDS

    def begin(self) -> None:
        """Note that the engine begins now."""
        self.attempt.start_s = round(self.age, 3)

    def report(self) -> None:
        """Give this worker's figures to the other workers, in its next heartbeat."""
        self._reported = time.monotonic()
        self.attempt.wall_s = round(self._reported - self._started, 3)
        if self._team is not None:
            totals = asdict(self.tally.totals)
            facts = {"attempt": asdict(self.attempt), "totals": totals, "in_flight": self.in_flight}
            self._team.tell(facts)

    def look(self) -> None:
        """Read what the other workers have reported."""
        if self._team is not None:
            self.others = self._team.others()

    def save(self, status: Status) -> None:
        """Write the file."""
        self._saved = time.monotonic()
        self.attempt.status = status
        self.attempt.peak_rss_mib = peak_rss_mib()
        self.report()
        all_totals = [asdict(self.tally.totals)]
        if self._team is not None:
            if status != "complete" and not self._team.is_first():
                return
            self.look()
            if status != "complete":  # a complete job has counted all rows in the shards
                all_totals += [beat["totals"] for beat in self.others if "totals" in beat]
                if any(not beat["dead"] for beat in self.others):
                    status = "running"
        attempts = self._attempts()
        summary: dict[str, Any] = {"status": status, **added(all_totals)}
        if status == "running":
            summary["in_flight"] = self.in_flight + sum(
                beat.get("in_flight", 0) for beat in self.others if not beat["dead"]
            )
        for key in ("wall_s", "generate_s"):
            summary[key] = seconds(attempts, key)
        summary["device_s"] = _device_s(attempts)
        if self.read_jobs:
            summary["read_jobs"] = as_values(self.read_jobs)
        tokens = sum(attempt["generated_tokens"] for attempt in attempts)
        if begun := sum(attempt.get("rows_begun", 0) for attempt in attempts):
            summary["rows_begun"] = begun
            summary["tokens_begun"] = sum(attempt.get("tokens_begun", 0) for attempt in attempts)
        if self.rows_copied:
            summary["rows_copied"] = self.rows_copied
        summary["tokens_per_s"] = round(tokens / max(summary["generate_s"], 1e-3), 1)
        if self.budget is not None:
            summary["budget"] = self.budget()
        if self.score is not None:
            summary["score"] = self.score
        elif not self.adapter_scores and (so_far := self.score_so_far()) is not None:
            summary["score_so_far"] = so_far
        if self.adapter_scores:
            summary["adapter_scores"] = self.adapter_scores
        if self.funnel:
            summary["funnel"] = self.funnel
        if self.sampling:
            summary["sampling"] = self.sampling
        summary["attempts"] = attempts
        summary["timeline"] = self.timeline.points
        self._text = metrics_text(summary)
        self._storage.write(self._path, self._text)
        self.tell(summary)

    def session(self) -> list[Mapping[str, Any]]:
        """The attempts of the workers that ran at the same time, with this one as the last."""
        last = asdict(self.attempt)
        others = [one for one in self._attempts() if one != last]
        return [*(one for one in others if one.get("session") == last["session"] != ""), last]

    def costs(self, job: str) -> list[JobCost]:
        """The costs of the jobs whose rows are read, and of this job under the name `job`."""
        cost = {"device_s": _device_s(self._attempts()), "rows": self.tally.totals.rows}
        return all_steps({**cost, "read_jobs": as_values(self.read_jobs)}, job)

    def keep(self) -> None:
        """Write the file again at the end, unless it says that the job is complete.

        The first worker may have overwritten it with figures from before the job was complete. A
        file of a complete job has more figures than this worker can collect by then, because the
        files that the workers exchange are deleted.
        """
        if (read_metrics(self._storage) or {}).get("status") != "complete":
            write_atomic(self._path, self._text)
            self._storage.upload(self._path)

    def _attempts(self) -> list[dict[str, Any]]:
        """All attempts in their order, those of the other workers included."""
        present = [asdict(self.attempt)]
        is_complete = self.attempt.status == "complete"
        reported = (reported_attempt(beat, is_complete) for beat in self.others)
        present += [attempt for attempt in reported if attempt is not None]
        present.sort(key=lambda attempt: int(attempt["worker"]))
        # An earlier worker of the same session may have written the file with attempts of others.
        known = {(attempt["session"], attempt["worker"], attempt["started"]) for attempt in present}
        earlier = (
            a
            for a in self._earlier
            if (a.get("session"), a.get("worker"), a["started"]) not in known
        )
        return [*earlier, *present]


def peak_rss_mib() -> float:
    """The peak memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def _device_s(attempts: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of device time of all attempts; attempts of older versions recorded none."""
    return round(sum(float(attempt.get("device_s", 0.0)) for attempt in attempts), 6)
