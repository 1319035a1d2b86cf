"""`launcher=local`: the workers of a job as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchgen.config import JobConfig, LocalLauncherConfig, NoLauncherConfig
from batchgen.config.load import job_file_text
from batchgen.errors import ConfigError
from batchgen.launchers.launched import Launched, LaunchedFolder
from batchgen.launchers.shown import Shown
from batchgen.signals import StopSignals
from batchgen.workers.heartbeat import LAUNCHER

_LOOK_SECONDS = 0.2
_BEAT_SECONDS = 2.0  # a heartbeat on this machine costs next to nothing
_LAST_LINES = 15
_CLEAN = (0, 3)
_DEVICES = "CUDA_VISIBLE_DEVICES"
Command = Callable[[Path, int], Sequence[str]]
"""The command line of a worker, from the job's file and the worker's place."""


@dataclass
class _Child:
    """A worker's place, in which one process after the other may run.

    Attributes:
        output: the files that get what it prints to stdout and stderr.
        code: of the last process; None while it runs.
    """

    place: int
    output: tuple[Path, Path]
    process: subprocess.Popen[bytes] = field(init=False)
    starts: int = 0
    code: int | None = None

    @property
    def name(self) -> str:
        return f"worker {self.place}"

    def printed(self, stream: int) -> str:
        path = self.output[stream]
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def launch(config: JobConfig) -> Launched:
    """Run a job in several processes of this machine, to its end.

    Raises:
        ConfigError: it cannot be said how many, or the job cannot have several workers.
    """
    assert isinstance(config.launcher, LocalLauncherConfig)
    if config.dataset.path == "-":
        raise ConfigError(
            "launcher=local: several workers cannot read rows from standard input: write them to a "
            "file and give it as dataset.path"
        )
    devices = [] if config.engine.device == "cpu" else visible_devices()
    ranks = config.engine.tensor_parallel
    count = config.launcher.workers or len(devices) // ranks
    if devices and len(devices) < ranks:
        raise ConfigError(
            f"engine.tensor_parallel={ranks} needs as many GPUs for each worker, and there are "
            f"{len(devices)}"
        )
    if not count:
        raise ConfigError(
            "launcher.workers has no value, and there is no GPU: say how many workers share the "
            "CPU, as in launcher.workers=2"
        )
    return LocalLauncher(config, count, devices, _command).run()


def visible_devices() -> list[str]:
    """The GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(_DEVICES)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    # In a process of its own: the launcher itself needs neither torch nor a context on a GPU.
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return [str(i) for i in range(int(done.stdout or 0))]


def _command(job: Path, place: int) -> Sequence[str]:
    return [sys.executable, "-m", "batchgen", str(job), f"workers.name={place}"]


class LocalLauncher:
    """Starts the workers, starts those again that were killed, and stops all of them.

    Each worker is a process group of its own, so that Ctrl-C reaches it through this process only.
    If this process is killed, the workers notice and stop.
    """

    def __init__(
        self, config: JobConfig, count: int, devices: Sequence[str], command: Command
    ) -> None:
        """
        Args:
            count: how many workers.
            devices: the GPUs, of which the workers take `engine.tensor_parallel` each in turns;
                empty on a CPU.
        """
        assert isinstance(config.launcher, LocalLauncherConfig)
        self._config = config
        self._count = count
        self._devices = devices
        self._command = command
        self._restarts = config.launcher.restarts
        self._folder = LaunchedFolder(Path(config.output.dir))

    def run(self) -> Launched:
        """Run the job to its end, or until a signal."""
        with tempfile.TemporaryDirectory(prefix="batchgen-") as name, StopSignals() as signals:
            signals.deferred = True
            self._job = Path(name) / "job.yaml"
            self._job.write_text(job_file_text(self._for_workers()), encoding="utf-8")
            children = [
                _Child(place, (Path(name) / f"{place}.out", Path(name) / f"{place}.err"))
                for place in range(self._count)
            ]
            with Shown(self._folder, self._count) as shown:
                try:
                    for child in children:
                        self._start(child)
                    self._watch(children, signals, shown)
                finally:
                    self._stop(children, signal.SIGTERM)
                    self._folder.release()
            return self._result(children, signals.received)

    def _for_workers(self) -> JobConfig:
        """The job as each worker runs it."""
        workers = self._config.workers
        beat = min(workers.heartbeat, _BEAT_SECONDS)
        return replace(
            self._config,
            launcher=NoLauncherConfig(),
            workers=replace(workers, heartbeat=beat),
        )

    def _start(self, child: _Child) -> None:
        environment = {**os.environ, LAUNCHER: str(os.getpid())}
        if self._devices:
            environment[_DEVICES] = ",".join(self._devices_of(child.place))
        else:
            cores = len(os.sched_getaffinity(0))
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self._count)))
        child.starts += 1
        child.code = None
        with child.output[0].open("wb") as out, child.output[1].open("ab") as err:
            child.process = subprocess.Popen(
                self._command(self._job, child.place),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    def _devices_of(self, place: int) -> Sequence[str]:
        """The GPUs of a worker, one for each of its ranks."""
        ranks = self._config.engine.tensor_parallel
        first = place % (len(self._devices) // ranks) * ranks
        return self._devices[first : first + ranks]

    def _watch(self, children: list[_Child], signals: StopSignals, shown: Shown) -> None:
        """Wait for the end of all workers."""
        while any(child.code is None for child in children):
            if signals.received is not None:
                self._stop(children, signals.received)
                return
            self._folder.hold()
            for child in children:
                if child.code is None and (code := child.process.poll()) is not None:
                    child.code = code
                    if code not in _CLEAN:
                        self._ended_badly(child, children, shown)
            shown.show()
            time.sleep(_LOOK_SECONDS)

    def _ended_badly(self, child: _Child, children: list[_Child], shown: Shown) -> None:
        """Start a worker again, if that may help, and say what has happened."""
        assert child.code is not None
        killed = child.code < 0
        how = f"was killed (signal {-child.code})" if killed else f"failed (exit {child.code})"
        over = any(other.code in _CLEAN for other in children)
        # A worker that failed before its first row would fail again.
        helps = killed or (child.code == 1 and self._had_rows(child))
        again = helps and not over and child.starts <= self._restarts
        again = again and not (self._folder.has_quarantined() and not killed)
        if again or killed:
            shown.print(f"{child.name} {how}{' and is started again' if again else ''}")
        if again:
            self._start(child)

    def _had_rows(self, child: _Child) -> bool:
        """Whether the process of a place had finished rows."""
        pid = child.process.pid
        beats = [beat for beat in self._folder.beats() if beat["pid"] == pid]
        return any(beat["attempt"]["rows"] > 0 for beat in beats if "attempt" in beat)

    def _stop(self, children: list[_Child], number: int) -> None:
        """Stop the workers that run, and wait for them: each finishes its step first."""
        running = [child for child in children if child.starts and child.code is None]
        for child in running:
            child.process.send_signal(number)
        for child in running:
            child.code = child.process.wait()

    def _result(self, children: list[_Child], stopped_by: int | None) -> Launched:
        codes = [child.code for child in children]
        best = next((child for code in _CLEAN for child in children if child.code == code), None)
        if best is not None:
            finishers = [c for c in children if c.code == best.code]
            # The worker that completed the job has the whole summary.
            texts = sorted((c.printed(0) for c in finishers), key=_is_of_bystander)
            assert best.code is not None
            return Launched(best.code, None, texts[0].rstrip("\n"))
        if stopped_by is not None:
            rows, _ = self._folder.rows()
            message = (
                f"Stopped all workers with {rows:,} rows done. The output so far is in "
                f"{self._folder.path}; run the same command to go on from there."
            )
            return Launched(128 + stopped_by, stopped_by, message)
        for child in children:
            lines = child.printed(1).splitlines()[-_LAST_LINES:]
            print(f"── {child.name}, exit code {child.code}:", *lines, sep="\n", file=sys.stderr)
        code = 2 if set(codes) == {2} else 1
        return Launched(code, None, "No worker could complete the job; see above.")


def _is_of_bystander(text: str) -> bool:
    return text.startswith("The job is complete;")
