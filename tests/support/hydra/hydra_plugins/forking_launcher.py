"""A launcher of Hydra that runs each job in a process of its own: `hydra/launcher=forking`.

Hydra takes plug-ins from packages of the name `hydra_plugins` only.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class ForkingLauncher(Launcher):
    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(2, get_context("fork")) as processes:
            started = [
                processes.submit(_run, self._job(overrides, number), self._context, self._task)
                for number, overrides in enumerate(job_overrides, initial_job_idx)
            ]
            return [one.result() for one in started]

    def _job(self, overrides: Sequence[str], number: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return config


def _run(config: DictConfig, context: HydraContext, task: TaskFunction) -> JobReturn:
    return run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", context)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="forking",
    node=OmegaConf.create({"_target_": "hydra_plugins.forking_launcher.ForkingLauncher"}),
    provider="tests",
)
