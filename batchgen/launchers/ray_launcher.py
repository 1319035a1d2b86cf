"""`launcher=ray`: the workers of a job on the nodes of a Ray cluster.

Each worker is a child process of an actor, so that it has exit codes, signals and crashes of its
own. The actors stand in the bundles of one placement group. A bundle lies on one node, so a worker
has its GPUs together; when its node dies, Ray looks for another place for it, and a new actor waits
there until one is found. What the workers do is agreed in the job's folder, and not by Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchgen.config.job_config import JobConfig
from batchgen.config.launcher_config import RayLauncherConfig
from batchgen.launchers.launched import COMPLETE, Launched, LaunchedFolder
from batchgen.launchers.local import BEAT_SECONDS
from batchgen.launchers.logs import make_logs, remove_logs
from batchgen.launchers.process import Command, output_files, worker_arguments, worker_job
from batchgen.launchers.ray_actor import ActorJob, ActorProcess
from batchgen.launchers.ray_cluster import Heart, Need, cluster, count_workers, nodes_and_need
from batchgen.launchers.supervisor import Place, Supervisor

_PATIENCE_SECONDS = 60.0


def launch(config: JobConfig, command: Command = worker_arguments) -> Launched:
    """Run a job on a Ray cluster, to its end.

    Args:
        command: what the workers run.

    Raises:
        ConfigError: there is no such cluster, it is too small, or its nodes do not see the job.
    """
    launcher = config.launcher
    assert isinstance(launcher, RayLauncherConfig)
    with cluster(launcher):
        nodes, need = nodes_and_need(config)
        count = count_workers(config, nodes, need)
        logs = make_logs(Path(config.output.dir), "ray")
        beat = BEAT_SECONDS if len(nodes) == 1 else config.workers.heartbeat
        text = worker_job(config, beat)
        file = logs / "job.yaml"
        file.write_text(text, encoding="utf-8")
        folder = None if "working_dir" in launcher.runtime_env else os.getcwd()
        heart = Heart()
        with _places(launcher, count, need, heart) as options:

            def start(place: Place) -> ActorProcess:
                arguments = command(file, place.number)
                job = ActorJob(file, text, folder, arguments, place.output)
                return ActorProcess(job, options(place.number), heart, is_first=not place.starts)

            supervisor = Supervisor(
                LaunchedFolder(Path(config.output.dir)),
                [output_files(logs, number) for number in range(count)],
                start,
                restarts=launcher.restarts,
                title=f"{count} workers start on {len(nodes)} node{'s' * (len(nodes) != 1)} of Ray",
                patience=_PATIENCE_SECONDS,
            )
            result = supervisor.run()
    if result.exit_code in COMPLETE:
        remove_logs(logs)
    return result


@contextmanager
def _places(
    launcher: RayLauncherConfig, count: int, need: Need, heart: Heart
) -> Iterator[Callable[[int], dict[str, Any]]]:
    """The options that put the actor of each worker into its place.

    The places are kept until the end.
    """
    amounts = {"num_cpus": need.get("CPU", 0), "num_gpus": need.get("GPU", 0)}
    if not need:  # there are no bundles of nothing
        yield lambda number: {**amounts, "scheduling_strategy": "SPREAD"}
        return
    group = placement_group([dict(need)] * count, strategy=launcher.placement.upper())

    def options(number: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return {**amounts, "scheduling_strategy": strategy}

    try:
        yield options
    finally:
        if not heart.is_gone():
            remove_placement_group(group)
