"""`launcher=slurm`: the workers of a job as the tasks of a Slurm job array, by submitit.

Slurm starts again what it has preempted; nothing here does. With `launcher.cluster=local` the tasks
run on this machine, and all else is the same.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError

from batchgen.config.job_config import JobConfig
from batchgen.config.launcher_config import SlurmLauncherConfig
from batchgen.launchers.launched import COMPLETE, Launched, LaunchedFolder
from batchgen.launchers.local import BEAT_SECONDS
from batchgen.launchers.logs import make_logs, remove_logs
from batchgen.launchers.process import (
    Command,
    End,
    output_files,
    worker_arguments,
    worker_job,
)
from batchgen.launchers.slurm_task import SlurmTask
from batchgen.launchers.supervisor import Place, Supervisor
from batchgen.util.errors import ConfigError

_ASK_SECONDS = 30.0
"""How often Slurm is asked how the tasks are; their results are seen as files, at once."""
_PATIENCE_SECONDS = 60.0
_CANCELLED = End(143, "was cancelled")


def launch(config: JobConfig, command: Command = worker_arguments) -> Launched:
    """Submit the workers of a job, and wait for its end unless `launcher.wait` is false.

    Args:
        command: what the workers run.

    Raises:
        ConfigError: there is no Slurm here, or it refuses the job array.
    """
    launcher = config.launcher
    assert isinstance(launcher, SlurmLauncherConfig)
    _check_cluster(config, launcher)
    logs = make_logs(Path(config.output.dir), "slurm")
    is_here = launcher.cluster != "slurm"
    file = logs / "job.yaml"
    beat = BEAT_SECONDS if is_here else config.workers.heartbeat
    file.write_text(worker_job(config, beat), encoding="utf-8")
    outputs = [output_files(logs, number) for number in range(launcher.workers)]
    tasks = [
        SlurmTask(
            command(file, number),
            output,
            {"OMP_NUM_THREADS": str(launcher.cpus_per_worker)},
            own_group=launcher.cluster != "debug",
        )
        for number, output in enumerate(outputs)
    ]
    jobs = _submit(_executor(config, launcher, logs), tasks, logs)
    name = _name(launcher, jobs)
    if not launcher.wait:
        return Launched(0, None, _submitted(launcher, name, Path(config.output.dir)))
    queue = _Queue(launcher, jobs)
    supervisor = Supervisor(
        LaunchedFolder(Path(config.output.dir)),
        outputs,
        lambda place: TaskProcess(jobs[place.number], place, queue),
        restarts=0,
        title=f"{name}: {launcher.workers} worker{'s' * (launcher.workers != 1)} in the queue",
        patience=_PATIENCE_SECONDS,
    )
    result = supervisor.run()
    if result.exit_code in COMPLETE:
        remove_logs(logs)
    return result


def _check_cluster(config: JobConfig, launcher: SlurmLauncherConfig) -> None:
    if launcher.cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
        raise ConfigError(
            "launcher=slurm: there is no sbatch here, so this is no machine of a Slurm cluster: "
            "type the command on a login node, or try it with launcher.cluster=local"
        )
    if launcher.cluster == "local" and _gpus(config, launcher):
        raise ConfigError(
            "launcher.cluster=local is for CPUs: set engine.device=cpu, or use launcher=local, "
            "which gives each worker a GPU of this machine"
        )


def _gpus(config: JobConfig, launcher: SlurmLauncherConfig) -> int:
    given = launcher.gpus_per_worker
    if given is not None:
        return given
    return int(config.engine.device != "cpu") * config.engine.tensor_parallel


def _executor(
    config: JobConfig, launcher: SlurmLauncherConfig, logs: Path
) -> submitit.AutoExecutor:
    """What submits the tasks, with the options that they need.

    Raises:
        ConfigError: submitit refuses an option.
    """
    logging.getLogger("submitit").setLevel(logging.ERROR)
    cluster = launcher.cluster
    limits = {f"{cluster}_max_num_timeout": launcher.requeues} if cluster != "debug" else {}
    executor = submitit.AutoExecutor(folder=logs, cluster=cluster, **limits)
    named = {
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
    }
    given = launcher.parameters.items()
    more = {key.replace("-", "_"): value for key, value in given if value is not False}
    memory = {} if launcher.mem is None else {"mem": launcher.mem}
    setup = {f"{cluster}_setup": list(launcher.setup)} if cluster != "debug" else {}
    executor.update_parameters(
        name="batchgen",
        nodes=1,
        tasks_per_node=1,
        timeout_min=launcher.minutes,
        cpus_per_task=launcher.cpus_per_worker,
        gpus_per_node=_gpus(config, launcher),
        slurm_signal_delay_s=launcher.stop_seconds,
        slurm_array_parallelism=launcher.workers,
        slurm_additional_parameters={"requeue": True, **memory, **more},
        # Since Slurm 22.05 a step does not take these over from its job.
        slurm_srun_args=["--cpus-per-task", str(launcher.cpus_per_worker)],
        **{f"slurm_{key}": value for key, value in named.items() if value is not None},
        **(setup if launcher.setup else {}),
    )
    return executor


def _submit(
    executor: submitit.AutoExecutor, tasks: Sequence[SlurmTask], logs: Path
) -> list[submitit.Job[End]]:
    """Submit the tasks as one array.

    Raises:
        ConfigError: Slurm refuses it.
    """
    try:
        jobs: list[submitit.Job[End]] = executor.submit_array(tasks)
    except (FailedJobError, FailedSubmissionError) as error:
        remove_logs(logs)
        raise ConfigError(f"launcher=slurm: sbatch refuses the workers: {error}") from None
    return jobs


def _name(launcher: SlurmLauncherConfig, jobs: Sequence[submitit.Job[End]]) -> str:
    """What is submitted, for people."""
    if launcher.cluster == "slurm":
        return f"Slurm job {jobs[0].job_id.partition('_')[0]}"
    return f"submitit jobs {', '.join(job.job_id for job in jobs)}"


def _submitted(launcher: SlurmLauncherConfig, name: str, out: Path) -> str:
    stops = f", scancel {name.rpartition(' ')[2]} stops it" if launcher.cluster == "slurm" else ""
    return (
        f"{name} has {launcher.workers} workers; `batchgen status {out}` says how far they are"
        f"{stops}. What they print goes to {out}/logs"
    )


class _Queue:
    """What Slurm says of the tasks, which it is asked now and then for all of them at once."""

    def __init__(self, launcher: SlurmLauncherConfig, jobs: Sequence[submitit.Job[End]]) -> None:
        self._watcher = jobs[0].watcher if launcher.cluster == "slurm" else None
        self._asked = time.monotonic()

    def ask(self, seconds: float) -> None:
        """Ask, if the last answer is older than that."""
        if self._watcher is not None and time.monotonic() - self._asked > seconds:
            self._watcher.update()
            self._asked = time.monotonic()


class TaskProcess:
    """A task of the array, as the launcher sees it."""

    def __init__(self, job: submitit.Job[End], place: Place, queue: _Queue) -> None:
        self._job = job
        self._log = place.output[1]
        self._queue = queue
        self._is_cancelled = False

    def has_begun(self) -> bool:
        return self._log.exists()

    def poll(self) -> End | None:
        self._queue.ask(_ASK_SECONDS / 10 if self._is_cancelled else _ASK_SECONDS)
        if not self._job.done():
            return None
        if self._is_cancelled:
            return _CANCELLED
        try:
            end: End = self._job.result()
        except FailedJobError as error:
            return End(1, f"failed: {str(error).strip()}")
        except UncompletedJobError:
            return End(None, f"has left no result (state {self._job.state})")
        return end

    def stop(self, number: int) -> None:
        self._is_cancelled = True
        self._job.cancel(check=False)
