"""The Ray launcher on a cluster of two nodes, one of which may die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("ray")

import ray

from batchgen.config.groups.job_config import EngineGroup, JobConfig
from batchgen.config.groups.launcher_config import Launched
from batchgen.jobs.launchers.process import End
from batchgen.jobs.launchers.ray_actor import ActorJob, ActorProcess, WorkerActor
from batchgen.jobs.launchers.ray_cluster import Heart, count_workers
from batchgen.jobs.launchers.ray_cluster import cluster as connected
from batchgen.jobs.launchers.ray_launcher import RayLauncher
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.launched_job import beats, data, when_rows_are_done, worker_of


def _config(out: Path, device: Literal["auto", "cpu"] = "cpu") -> JobConfig:
    return replace(FakeJob(str(out)).config(), engine=EngineGroup(device=device))


def _count(
    config: JobConfig, nodes: list[dict[str, Any]], has_gpus: bool = True, **keys: Any
) -> int:
    launcher = RayLauncher(**keys)
    return count_workers(launcher.workers, nodes, launcher.worker_need(config, has_gpus))


def _nodes(*resources: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {"NodeManagerHostname": f"n{i}", "Resources": dict(found)}
        for i, found in enumerate(resources)
    ]


TWO_NODES = _nodes({"GPU": 4, "CPU": 16}, {"GPU": 3, "CPU": 2}, {"CPU": 64})


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({}, 6),
        ({"cpus_per_worker": 0.5}, 7),
        ({"gpus_per_worker": 2, "cpus_per_worker": 2}, 3),
        ({"gpus_per_worker": 0.5, "cpus_per_worker": 0}, 14),
        ({"gpus_per_worker": 0, "workers": 82}, 82),
    ],
)
def test_there_are_as_many_workers_as_fit_on_the_nodes(
    keys: dict[str, Any], count: int, tmp_path: Path
) -> None:
    """The GPUs of a worker are on one node, and a worker needs its cores there, too."""
    assert _count(_config(tmp_path, "auto"), TWO_NODES, **keys) == count


def test_a_cluster_that_is_too_small(tmp_path: Path) -> None:
    config = _config(tmp_path, "auto")
    says = (
        r"2 workers with 4 GPUs and 1 CPU core each do not fit .* room for 1: n0 has 4 GPUs and 16 "
        r"CPU cores; n1 has 3 GPUs and 2 CPU cores; n2 has no GPU and 64 CPU cores\. Lower"
    )
    with pytest.raises(ConfigError, match=says):
        _count(config, TWO_NODES, gpus_per_worker=4, workers=2)
    with pytest.raises(ConfigError, match=r"a worker with 8 GPUs .* does not fit"):
        _count(config, TWO_NODES, gpus_per_worker=8)
    need = RayLauncher().worker_need
    assert need(config, False) == need(_config(tmp_path), True) == {"CPU": 1}
    with pytest.raises(ConfigError, match=r"launcher\.workers has no value"):
        _count(config, _nodes({"CPU": 4}), has_gpus=False)
    bad: dict[str, Any] = {"workers": 0, "gpus_per_worker": 1.5, "cpus_per_worker": -1}
    bad |= {"restarts": -1}
    for key, value in bad.items():
        with pytest.raises(ConfigError, match=rf"launcher\.{key}"):
            RayLauncher(**{key: value})


def test_a_node_that_does_not_see_the_job(tmp_path: Path) -> None:
    file, output = tmp_path / "logs" / "job.yaml", (tmp_path / "0.out", tmp_path / "0.err")
    job = ActorJob(file, "text", os.getcwd(), ["-c", ""], output, seen_within=0.2)
    says = f"does not see {tmp_path}/logs, which this launcher has made in output.dir"
    assert says in (WorkerActor(job).check() or "")
    file.parent.mkdir()
    file.write_text("of another launch")
    assert says in (WorkerActor(job).check() or "")
    file.write_text("text")
    assert WorkerActor(job).check() is None
    nowhere = replace(job, folder=str(tmp_path / "nowhere"))
    assert "cannot enter" in (WorkerActor(nowhere).check() or "")


def test_an_actor_runs_a_worker_and_stops_it(tmp_path: Path) -> None:
    file, output = tmp_path / "job.yaml", (tmp_path / "0.out", tmp_path / "0.err")
    job = ActorJob(file, "", None, ["-S", "-c", "print('said'); raise SystemExit(3)"], output)
    assert WorkerActor(job).run().code == 3 and output[0].read_text() == "said\n"
    actor = WorkerActor(replace(job, arguments=["-S", "-c", "import time; time.sleep(60)"]))
    actor.stop()  # before it runs
    assert actor.run().code == 143


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster whose first node has 1 core and whose second node has 2."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=2)
    found.wait_for_nodes()
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.mark.slow
class TestTwoNodes:
    def _launch(self, two_nodes: Any, out: Path, program: str, **keys: Any) -> Launched:
        """Run `program` with `place` and `note(text)` in place of workers.

        Args:
            two_nodes: the cluster; None for one of its own.
        """
        begin = (
            f"import os, signal, sys, time; place = int(sys.argv[1]); log = {str(out) + '.log'!r}\n"
            "def note(text): open(log, 'a').write(text + '\\n')\n"
        )
        launcher = RayLauncher(address=two_nodes and two_nodes.address, **keys)

        def command(job: Path, place: int) -> list[str]:
            assert "launcher:\n  _target_: null" in job.read_text()
            return ["-S", "-c", begin + program, str(place)]

        return launcher.launch(_config(out), command)

    def _log(self, out: Path) -> list[str]:
        path = Path(f"{out}.log")
        return sorted(path.read_text().split()) if path.exists() else []

    def test_one_summary_and_what_the_workers_get(
        self, two_nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        program = (
            "note(f\"{os.environ['A']}:{os.environ['RAY_RAYLET_PID']}:{os.getcwd()}\")\n"
            "print(['the whole summary', 'The job is complete; …'][place]); sys.exit(3)"
        )
        env = {"env_vars": {"A": "b"}}
        result = self._launch(two_nodes, out, program, workers=2, runtime_env=env)
        assert (result.exit_code, result.message) == (3, "the whole summary")
        said = [line.split(":") for line in self._log(out)]
        assert {(a, folder) for a, _, folder in said} == {("b", os.getcwd())}
        assert len({node for _, node, _ in said}) == 2, "they are spread over the nodes"
        assert "2 workers start on 2 nodes of Ray" in capsys.readouterr().err
        assert not (out / "logs").exists() and not ray.is_initialized()

    def test_a_killed_worker_is_started_again_so_often(
        self, two_nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        program = (
            "note(str(place))\nif place: os.kill(os.getpid(), signal.SIGKILL)\n"
            "while open(log).read().count('1') < 3: time.sleep(0.05)\n"
        )
        assert self._launch(two_nodes, out, program, workers=2, restarts=2).exit_code == 0
        assert self._log(out) == ["0", "1", "1", "1"]
        errors = capsys.readouterr().err
        assert errors.count("worker 1 was killed (signal 9) and is started again") == 2

    def test_ctrl_c_stops_all(self, two_nodes: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        program = (
            "def stop(number, frame): note(f'{place}:{number}'); sys.exit(143)\n"
            "signal.signal(signal.SIGTERM, stop); note(f'{place}:up')\n"
            "while place or open(log).read().count('up') < 2: time.sleep(0.05)\n"
            "os.kill(int(open(log + '.pid').read()), signal.SIGINT)\ntime.sleep(60)\n"
        )
        Path(f"{out}.log.pid").write_text(str(os.getpid()))
        result = self._launch(two_nodes, out, program, workers=2)
        assert (result.exit_code, result.stopped_by) == (130, signal.SIGINT)
        assert self._log(out) == ["0:15", "0:up", "1:15", "1:up"]

    def test_what_is_refused(self, two_nodes: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with pytest.raises(ConfigError, match=r"4 workers with 1 CPU core each .* room for 3"):
            self._launch(two_nodes, out, "", workers=4)
        assert not out.exists()
        with pytest.raises(ConfigError, match=r"no cluster at launcher\.address=localhost:1: "):
            RayLauncher(address="localhost:1", workers=1).launch(_config(out))

    def test_a_node_without_the_files_is_a_mistake_first_and_a_loss_later(
        self, two_nodes: Any, tmp_path: Path
    ) -> None:
        output = tmp_path / "0.out", tmp_path / "0.err"
        missing = tmp_path / "job.yaml"
        job = ActorJob(missing, "", None, ["-c", ""], output, seen_within=0.1)

        def end(is_first: bool) -> End:
            process = ActorProcess(job, {"num_cpus": 1}, Heart(), is_first)
            while (found := process.poll()) is None:
                pass
            return found

        with connected(two_nodes.address, {}):
            with pytest.raises(ConfigError, match=r"launcher=ray: the node .* does not see"):
                end(is_first=True)
            found = end(is_first=False)
        assert found.code == 2 and "was not started: the node" in found.how

    def test_the_data_are_those_of_one_worker_though_a_node_dies(
        self, two_nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The worker of that node waits for another one in vain, which keeps nobody waiting."""
        whole, out = tmp_path / "whole", tmp_path / "out"
        FakeJob(str(whole), rows=120, rows_per_shard=8).run()
        job = FakeJob(str(out), rows=120, rows_per_shard=8, step_s=0.2)
        launcher = RayLauncher(address=two_nodes.address, workers=2)
        (node,) = two_nodes.worker_nodes

        def kill() -> None:
            pids = [beat["pid"] for beat in beats(out)]
            _kill_node(two_nodes, node, [pid for pid in pids if _raylet_of(pid) == _raylet(node)])

        killed = when_rows_are_done(out, 20, 2, kill)
        result = launcher.launch(job.config(), worker_of(job))
        assert not killed.is_alive()
        assert result.exit_code == 3 and "answers        " in result.message
        assert data(out) == data(whole)
        assert "was lost with its node and is started again" in capsys.readouterr().err

    def test_the_worker_of_a_node_that_dies_is_started_on_another(
        self, two_nodes: Any, tmp_path: Path
    ) -> None:
        """A worker has two cores here, and so has each node but the first."""
        nodes = {_raylet(node): node for node in (two_nodes.add_node(num_cpus=2) for _ in "ab")}
        out = tmp_path / "out"
        program = (
            "note(f\"{os.getpid()}:{os.environ['RAY_RAYLET_PID']}\")\n"
            "while open(log).read().count(':') < 2: time.sleep(0.05)\n"
        )

        def kill() -> None:
            while not self._log(out):
                time.sleep(0.05)
            pid, raylet = map(int, self._log(out)[0].split(":"))
            _kill_node(two_nodes, nodes[raylet], [pid])

        threading.Thread(target=kill, daemon=True).start()
        result = self._launch(two_nodes, out, program, workers=1, cpus_per_worker=2)
        assert result.exit_code == 0
        assert {line.partition(":")[2] for line in self._log(out)} == set(map(str, nodes))

    def test_the_head_of_the_cluster_dies(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """That ends the command, whose calls to Ray would wait; here in a cluster of its own.

        It is the last test: Ray starts no actors in a process that has seen this.
        """
        out = tmp_path / "out"

        def kill() -> None:
            while not self._log(out):
                time.sleep(0.05)
            (head,) = ray._private.worker._global_node.all_processes["gcs_server"]
            os.kill(head.process.pid, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        result = self._launch(None, out, "note('up'); time.sleep(60)", workers=1)
        assert result.exit_code == 1 and "No worker could complete" in result.message
        errors = capsys.readouterr().err
        assert "── worker 0 was lost with the head of the cluster" in errors
        assert self._log(out) == ["up"] and not ray.is_initialized()


def _kill_node(cluster: Any, node: Any, workers: Sequence[int]) -> None:
    """Kill a node with the workers on it."""
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def _raylet(node: Any) -> int:
    """The process that is a node."""
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def _raylet_of(pid: int) -> int:
    """The process of the node on which a worker runs."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = dict(variable.partition(b"=")[::2] for variable in variables)
    return int(found[b"RAY_RAYLET_PID"])
