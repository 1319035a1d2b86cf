"""A worker in an actor of Ray: `WorkerActor` on the worker's node, and `ActorProcess` in the
launcher."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from batchgen.jobs.launchers.process import End, Output, WorkerProcess
from batchgen.jobs.launchers.ray_cluster import Heart
from batchgen.util.errors import ConfigError

_LOOK_SECONDS = 0.1
_STOPPED = End(143, "was stopped")  # 128 + SIGTERM, as a shell counts


@dataclass(frozen=True)
class ActorJob:
    """What an actor needs to run a worker.

    Attributes:
        file: the job file, in a folder that all nodes see.
        text: the text of the job file.
        folder: the folder in which the worker starts; None is the one that Ray has prepared.
        arguments: those of the Python interpreter.
        output: the files of stdout and stderr.
        seen_within: seconds after which a node must see the file; network file systems may be late.
    """

    file: Path
    text: str
    folder: str | None
    arguments: Sequence[str]
    output: Output
    seen_within: float = 15.0


class WorkerActor:
    """Runs a worker as a child process of an actor. Two calls at a time: one of `run`, and one of
    `stop`."""

    def __init__(self, job: ActorJob) -> None:
        self._job = job
        self._process: WorkerProcess | None = None
        self._is_stopped = False

    def check(self) -> str | None:
        """Why a worker cannot run on this node; None if it can."""
        where = f"the node {os.uname().nodename}"
        if self._job.folder is not None:
            try:
                os.chdir(self._job.folder)
            except OSError as error:
                return (
                    f"{where} cannot enter {self._job.folder} ({error.strerror}), where the "
                    "command was typed: type it in a folder that all nodes have, or let Ray copy "
                    "this one with launcher.runtime_env={working_dir: .}"
                )
        until = time.monotonic() + self._job.seen_within
        while not self._sees_job():
            if time.monotonic() > until:
                return (
                    f"{where} does not see {self._job.file.parent}, which this launcher has made "
                    "in output.dir: all nodes need the same output.dir, on a file system that they "
                    "share, such as NFS"
                )
            time.sleep(_LOOK_SECONDS)
        return None

    def _sees_job(self) -> bool:
        """Whether this node can read the job file."""
        try:
            return self._job.file.read_text(encoding="utf-8") == self._job.text
        except OSError:
            return False

    def run(self) -> End:
        """Run the worker to its end."""
        if self._is_stopped:
            return _STOPPED
        self._process = WorkerProcess(self._job.arguments, self._job.output, {})
        if self._is_stopped:
            self._process.stop()
        return self._process.wait()

    def stop(self) -> None:
        """Stop the worker in order, by SIGTERM, because Ray blocks SIGINT in its processes."""
        self._is_stopped = True
        if self._process is not None:
            self._process.stop()


class ActorProcess:
    """A worker that runs in an actor, as the launcher sees it (`StartedWorker`)."""

    def __init__(
        self, job: ActorJob, options: Mapping[str, Any], heart: Heart, is_first: bool
    ) -> None:
        """Start the actor. `is_first` says that no worker has run with this index before.

        A node that cannot run the first worker is a user's mistake; a later one counts as a lost
        worker.
        """
        self._is_first = is_first
        self._heart = heart
        self._actor: Any = ray.remote(WorkerActor).options(max_concurrency=2, **options).remote(job)
        self._check: Any = self._actor.check.remote()
        self._run: Any = None
        self._end: End | None = None

    def has_begun(self) -> bool:
        return self._run is not None or self._end is not None

    def poll(self) -> End | None:
        if self._end is None and self._heart.is_gone():
            self._end = End(1, "was lost with the head of the cluster")
        elif self._end is None:
            try:
                self._end = self._look()
            except ray.exceptions.RayActorError as error:
                self._end = End(None, _loss(str(error)))
            except ray.exceptions.RayError as error:
                self._end = End(1, f"failed in Ray: {error}")
            if self._end is not None:
                ray.kill(self._actor)  # gives its GPU back
        return self._end

    def stop(self, number: int) -> None:
        if self._run is None:
            self._end = _STOPPED
            ray.kill(self._actor)
        else:
            self._actor.stop.remote()

    def _look(self) -> End | None:
        """How the worker ended; None if it still runs. Starts the worker when its node has passed
        the check."""
        if self._run is None:
            if not _is_there(self._check):
                return None
            problem = ray.get(self._check)
            if problem is not None and self._is_first:
                raise ConfigError(f"launcher=ray: {problem}")
            if problem is not None:
                return End(2, f"was not started: {problem}")
            self._run = self._actor.run.remote()
        return ray.get(self._run) if _is_there(self._run) else None


def _is_there(result: Any) -> bool:
    """Whether a remote call has ended."""
    return bool(ray.wait([result], timeout=0)[0])


def _loss(error: str) -> str:
    """What happened to an actor, read from Ray's error."""
    if "node has died" in error or "node died" in error:
        return "was lost with its node"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return f"was lost: {lines[-1] if lines else 'Ray does not say why'}"
