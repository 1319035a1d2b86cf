"""`launcher=slurm`: the workers of a job as the tasks of a Slurm job array, by submitit.

Slurm starts again what it has preempted; nothing here does. With `launcher.cluster=local` the tasks
run on this machine, and all else is the same.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.launcher_config import (
    Launched,
    Launcher,
    at_least,
    check_workers,
    workers_text,
)
from batchgen.jobs.launchers.launched import COMPLETE, LaunchedFolder, make_logs, remove_logs
from batchgen.jobs.launchers.local import BEAT_SECONDS
from batchgen.jobs.launchers.process import Command, output_files, worker_arguments, worker_job
from batchgen.jobs.launchers.supervisor import Supervisor
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    import submitit

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmLauncher(Launcher):
    """Tasks of a Slurm job array."""

    name = "slurm"
    package = "submitit"
    running_keys = ("setup", "parameters")

    workers: int
    cluster: Literal["slurm", "local", "debug"] = "slurm"
    wait: bool = True
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    minutes: int = 240
    gpus_per_worker: int | None = None
    cpus_per_worker: int = 4
    mem: str | None = None
    constraint: str | None = None
    setup: tuple[str, ...] = ()
    stop_seconds: int = 90
    requeues: int = 100
    parameters: Mapping[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_workers(self.workers, most=100_000)
        at_least(1, minutes=self.minutes)
        at_least(0, gpus_per_worker=self.gpus_per_worker)
        at_least(1, cpus_per_worker=self.cpus_per_worker, stop_seconds=self.stop_seconds)
        at_least(0, requeues=self.requeues)
        if self.stop_seconds >= 60 * self.minutes:
            raise ConfigError(
                f"launcher.stop_seconds={self.stop_seconds} must be less than launcher.minutes="
                f"{self.minutes}: else a worker would be told to stop before it begins"
            )
        if self.cluster == "debug" and not self.wait:
            raise ConfigError(
                "launcher.wait must be true with launcher.cluster=debug, which runs the workers "
                "inside the command"
            )

    def described(self) -> str:
        asked = {
            **{"partition": self.partition, "account": self.account, "qos": self.qos},
            **{"constraint": self.constraint, "mem": self.mem, **self.parameters},
        }
        given = [f"{name}={value}" for name, value in asked.items() if value is not None]
        where = "slurm" if self.cluster == "slurm" else f"slurm on {self.cluster}"
        about = [workers_text(self.workers), f"{self.minutes} minutes at a time", *given]
        return f"{where}: {', '.join(about)}"

    def launch(self, config: JobConfig, command: Command = worker_arguments) -> Launched:
        """Submit the workers that `command` names, and wait for the end unless told not to."""
        from batchgen.jobs.launchers.slurm_task import Queue, SlurmTask, TaskProcess, submit

        self._check_cluster(config)
        out = Path(config.output.dir)
        logs = make_logs(out, "slurm")
        file = logs / "job.yaml"
        beat = config.workers.heartbeat if self.cluster == "slurm" else BEAT_SECONDS
        file.write_text(worker_job(config, beat), encoding="utf-8")
        outputs = [output_files(logs, number) for number in range(self.workers)]
        environment = {"OMP_NUM_THREADS": str(self.cpus_per_worker)}
        tasks = [
            SlurmTask(command(file, number), output, environment, self.cluster != "debug")
            for number, output in enumerate(outputs)
        ]
        jobs = submit(self._executor(config, logs), tasks, logs)
        name = self._submitted([job.job_id for job in jobs])
        if not self.wait:
            stops = f", scancel {name.rpartition(' ')[2]} stops it"
            message = (
                f"{name} has {self.workers} workers; `batchgen status {out}` says how far they are"
                f"{stops if self.cluster == 'slurm' else ''}. What they print goes to {out}/logs"
            )
            return Launched(0, None, message)
        queue = Queue(jobs[0].watcher if self.cluster == "slurm" else None)
        result = Supervisor(
            LaunchedFolder(out),
            outputs,
            lambda place: TaskProcess(jobs[place.number], place, queue),
            restarts=0,
            title=f"{name}: {workers_text(self.workers)} in the queue",
            patience=_PATIENCE_SECONDS,
        ).run()
        if result.exit_code in COMPLETE:
            remove_logs(logs)
        return result

    def _check_cluster(self, config: JobConfig) -> None:
        if self.cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
            raise ConfigError(
                "launcher=slurm: there is no sbatch here, so this is no machine of a Slurm "
                "cluster: type the command on a login node, or try it with launcher.cluster=local"
            )
        if self.cluster == "local" and self._gpus(config):
            raise ConfigError(
                "launcher.cluster=local is for CPUs: set engine.device=cpu, or use launcher=local, "
                "which gives each worker a GPU of this machine"
            )

    def _gpus(self, config: JobConfig) -> int:
        if self.gpus_per_worker is not None:
            return self.gpus_per_worker
        return int(config.engine.device != "cpu") * config.engine.tensor_parallel

    def _executor(self, config: JobConfig, logs: Path) -> submitit.AutoExecutor:
        """What submits the tasks, with the options that they need."""
        import submitit

        logging.getLogger("submitit").setLevel(logging.ERROR)
        cluster = self.cluster
        limits = {f"{cluster}_max_num_timeout": self.requeues} if cluster != "debug" else {}
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster, **limits)
        named = {
            **{"partition": self.partition, "account": self.account},
            **{"qos": self.qos, "constraint": self.constraint},
        }
        given = self.parameters.items()
        more = {key.replace("-", "_"): value for key, value in given if value is not False}
        memory = {} if self.mem is None else {"mem": self.mem}
        setup = {f"{cluster}_setup": list(self.setup)} if cluster != "debug" else {}
        executor.update_parameters(
            name="batchgen",
            nodes=1,
            tasks_per_node=1,
            timeout_min=self.minutes,
            cpus_per_task=self.cpus_per_worker,
            gpus_per_node=self._gpus(config),
            slurm_signal_delay_s=self.stop_seconds,
            slurm_array_parallelism=self.workers,
            slurm_additional_parameters={"requeue": True, **memory, **more},
            # Since Slurm 22.05 a step does not take these over from its job.
            slurm_srun_args=["--cpus-per-task", str(self.cpus_per_worker)],
            **{f"slurm_{key}": value for key, value in named.items() if value is not None},
            **(setup if self.setup else {}),
        )
        return executor

    def _submitted(self, ids: list[str]) -> str:
        """What was submitted, for people."""
        if self.cluster == "slurm":
            return f"Slurm job {ids[0].partition('_')[0]}"
        return f"submitit jobs {', '.join(ids)}"
