"""Reports a job's progress and scores to experiment trackers, without waiting for them.

The job calls `Trackers.tell` each time it writes metrics.json. The trackers are the modules
`to_json`, `to_trackio` and `to_wandb`, each with a function `begin` that returns a `Tracker`.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple, Protocol

_MOST_WAITING = 16
"""The maximum number of reports that wait for a tracker."""
_END_SECONDS = 10.0
"""The most seconds that the end of a job waits for all trackers."""
SENT = (
    *("rows", "error_rows", "prompt_tokens", "generated_tokens"),
    *("in_flight", "tokens_per_s", "wall_s", "score_so_far"),
)
"""The values of metrics.json that trackers get, besides those of scores."""


class Run(NamedTuple):
    """A job as a tracker knows it.

    Attributes:
        project: the project that the run belongs to.
        name: the name for people.
        id: stays the same when the job is resumed.
    """

    project: str
    name: str
    id: str


class Tracker(Protocol):
    """The interface of a tracker. All calls come from one thread."""

    def log(self, values: Mapping[str, float]) -> None:
        """Record values by their names."""

    def close(self) -> None:
        """End the run."""


class LibraryRun:
    """A tracker that passes values on to a run of a library, which has the methods `log` and
    `finish`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values))

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


def tracked_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The part of metrics.json that trackers get: `SENT`, and the values of scores."""
    values: dict[str, float] = {name: metrics[name] for name in SENT if name in metrics}
    scores = {"": metrics.get("score") or {}, **metrics.get("adapter_scores", {})}
    for adapter, score in scores.items():
        for name, metric in score.items():
            if isinstance(metric, Mapping) and metric.get("value") is not None:
                key = "score" if name == "avg" else name
                values[f"{adapter}/{key}" if adapter else key] = float(metric["value"])
    return values


def run_of(project: str, folder: str, metrics: Mapping[str, Any]) -> Run:
    """The run of the job in a folder. The first attempt in `metrics` decides its id."""
    first = metrics["attempts"][0]
    began = f"{folder} {first['started']} {first.get('host')}"
    digest = blake2b(began.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    name = folder.rstrip("/").rpartition("/")[2] or "job"
    return Run(project, f"{name}-{digest}", digest)


class _TrackerThread:
    """A tracker in a thread. Values that it cannot take in time are left out; an error ends the
    tracker with a warning, and not the job."""

    def __init__(self, name: str, begin: Callable[[Run], Tracker]) -> None:
        self._name, self._begin = name, begin
        self._reports: queue.Queue[tuple[Run, dict[str, float]] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def tell(self, run: Run, values: dict[str, float]) -> None:
        self._put((run, values))

    def end(self) -> None:
        self._put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn("it does not answer; values that it has not received are left out")

    def _put(self, report: tuple[Run, dict[str, float]] | None) -> None:
        while self._thread.is_alive():
            try:
                return self._reports.put_nowait(report)
            except queue.Full:  # drop the oldest values
                try:
                    self._reports.get_nowait()
                except queue.Empty:
                    continue

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            while (report := self._reports.get()) is not None:
                run, values = report
                tracker = tracker or self._begin(run)
                tracker.log(values)
            if tracker is not None:
                tracker.close()
        except Exception as error:  # an error of a library must not end the job
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, why: str) -> None:
        text = (
            f"progress.report_to={self._name} has failed, and the job continues without it: {why}"
        )
        print(f"batchgen: warning: {text}", file=sys.stderr)


class Trackers:
    """The trackers of a job, each in a thread."""

    def __init__(self, names: Sequence[str], project: str, folder: str) -> None:
        """Begin the trackers with these names."""
        self._project, self._folder = project, folder
        self._run: Run | None = None
        # The threads load the libraries, which may take seconds or hang.
        self._threads = [_TrackerThread(name, _beginner(name)) for name in names]

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Report values of `metrics`, the content of metrics.json."""
        if self._threads:
            self._run = self._run or run_of(self._project, self._folder, metrics)
            values = tracked_values(metrics)
            for tracker in self._threads:
                tracker.tell(self._run, values)

    def close(self) -> None:
        """End all trackers, and wait for them for at most `_END_SECONDS`."""
        for tracker in self._threads:
            tracker.end()
        for tracker in self._threads:
            tracker.join(_END_SECONDS / len(self._threads))


def _beginner(name: str) -> Callable[[Run], Tracker]:
    """The function `begin` of the module `to_NAME`, which is imported when it is called."""

    def begin(run: Run) -> Tracker:
        tracker: Tracker = import_module(f"batchgen.jobs.trackers.to_{name}").begin(run)
        return tracker

    return begin
