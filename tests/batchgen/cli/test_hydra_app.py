"""The command as a Hydra application: its launchers, its folders, and how jobs end there."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

import batchgen.cli.hydra_app as hydra_app
from batchgen.__main__ import run_command
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.jobs.run.run_job import execute_job
from batchgen.util.errors import JobError
from tests.support.jobs.fake_job import FakeJob


class Jobs:
    """Stands in for jobs: notes their configurations; the seed of a job is its exit code."""

    def __init__(self) -> None:
        self.configs: list[JobConfig] = []

    def __call__(self, config: JobConfig, *_: object) -> Any:
        self.configs.append(config)
        code = config.sampling.seed
        if code == 1:
            raise JobError("the job failed")
        folder = Path(config.output.dir)
        folder.mkdir(parents=True, exist_ok=True)
        last = {"status": "complete", "rows": 2, "rows_resumed": 0, "error_rows": 0}
        metrics = {"status": "complete", "tokens_per_s": 5.0, "attempts": [last]}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        return SimpleNamespace(
            exit_code=code, message=f"wrote {folder}", stopped_by=15 if code > 128 else None
        )

    @property
    def folders(self) -> list[str]:
        return [config.output.dir for config in self.configs]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.chdir(tmp_path)
    found = Jobs()
    monkeypatch.setattr(hydra_app, "run_configured", found)
    yield found
    GlobalHydra.instance().clear()


@pytest.mark.thorough
def test_the_basic_launcher_by_its_name(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    text = r"prompt.user={{ q }} (a, b=c)\n'x'?"
    arguments = ["-m", "hydra/launcher=basic", "sampling.seed=0,3", text, "output.dir=o"]
    assert run_command(arguments) == 3
    assert jobs.folders == ["o/sampling.seed=0", "o/sampling.seed=3"]
    assert {config.prompt.user for config in jobs.configs} == {"{{ q }} (a, b=c)\n'x'?"}  # type: ignore[union-attr]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "── job 1 of 2: sampling.seed=0",
        "wrote o/sampling.seed=0",
        "── job 2 of 2: sampling.seed=3",
    ]
    assert lines[-1].split() == ["sampling.seed=3", "3", "2", "0", "5", "o/sampling.seed=3"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "folders"),
    [
        (["hydra.sweep.dir=s", "hydra.sweep.subdir=${hydra.job.num}"], ["s/0", "s/1"]),
        (["hydra.sweep.subdir=j${hydra.job.num}", "output.dir=o"], ["o/j0", "o/j1"]),
        (["hydra.sweep.dir=s", "output.dir=o/${hydra.job.num}"], ["o/0", "o/1"]),
    ],
)
def test_folders_of_a_sweep(jobs: Jobs, arguments: list[str], folders: list[str]) -> None:
    assert run_command(["hydra.mode=MULTIRUN", "sampling.seed=0,3", *arguments]) == 3
    assert jobs.folders == folders


@pytest.mark.thorough
def test_the_folder_of_a_sweep_is_found_again(jobs: Jobs, tmp_path: Path) -> None:
    run_command(["-m", "sampling.seed=0,3", "hydra.launcher.x=1"])
    assert jobs.folders == []  # refused: nothing is left behind
    assert list(tmp_path.iterdir()) == []
    run_command(["-m", "sampling.seed=0,1", "hydra/launcher=basic"])
    run_command(["-m", "sampling.seed=0,1", "hydra/launcher=basic"])
    assert len(set(jobs.folders)) == 2
    assert Path(jobs.folders[0]).parts[:2] == ("outputs", "multirun")


@pytest.mark.thorough
def test_hydra_run_dir(jobs: Jobs) -> None:
    assert run_command(["hydra.run.dir=r", "sampling.seed=0"]) == 0
    assert run_command(["hydra.run.dir=r", "sampling.seed=3", "output.dir=o"]) == 3
    assert jobs.folders == ["r", "o"]


@pytest.mark.thorough
def test_a_sweeper_of_the_user_with_values_of_its_own(jobs: Jobs) -> None:
    file = Path("own/hydra/sweeper/mine.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("defaults: [basic]\nparams: {++sampling.seed: '0,3'}\n")
    arguments = ["-m", "hydra/sweeper=mine", "--config-dir=own", "--trust=own", "output.dir=o"]
    assert run_command(arguments) == 3
    assert jobs.folders == ["o/sampling.seed=0", "o/sampling.seed=3"]


@pytest.mark.thorough
def test_a_failure_does_not_end_a_sweep_and_a_signal_does(jobs: Jobs) -> None:
    arguments = ["-m", "hydra/launcher=basic", "sampling.seed=1,143,0", "output.dir=o"]
    assert run_command(arguments) == 143
    assert [config.sampling.seed for config in jobs.configs] == [1, 143]


@pytest.mark.thorough
def test_jobs_in_other_processes(
    jobs: Jobs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-m", "hydra/launcher=forking", "output.dir=o"]
    assert run_command([*arguments, "sampling.seed=0,4"]) == 4
    assert sorted(path.name for path in (tmp_path / "o").glob("sampling*")) == [
        "sampling.seed=0",
        "sampling.seed=4",
    ]
    assert jobs.configs == []  # they ran elsewhere
    captured = capfd.readouterr()
    assert "a job in another process ended with exit code 4" in captured.err
    assert "Traceback" not in captured.err
    assert run_command([*arguments, "sampling.seed=0", "sampling.temperature=0.2,0.3"]) == 0
    captured = capfd.readouterr()
    assert captured.err == "" and "tokens/s" not in captured.out


@pytest.mark.quick(1)
@pytest.mark.parametrize("key", ["+worker", "worker", "workers.name"])
def test_workers_of_one_job_have_one_folder(jobs: Jobs, key: str) -> None:
    arguments = ["-m", "hydra/launcher=basic", f"{key}=range(0,2)", "output.dir=o"]
    assert run_command(arguments) == 0
    assert [Path(folder) for folder in jobs.folders] == [Path("o")] * 2
    assert [config.workers.name for config in jobs.configs] == [0, 1]


class FakeJobs(Jobs):
    """Runs fake jobs in place of real ones, each as a worker of its folder."""

    def __call__(self, config: JobConfig, *_: object) -> Any:
        job = FakeJob(config.output.dir, rows=60, rows_per_shard=4, step_s=0.01, report=False)
        given = job.config()
        sampling = replace(given.sampling, seed=config.sampling.seed)
        workers = WorkersConfig(heartbeat=0.05, name=config.workers.name)
        return execute_job(replace(given, sampling=sampling, workers=workers), job.parts())


@pytest.mark.thorough
def test_workers_of_a_sweep_make_the_data_of_single_ones(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds, two workers for each, two processes at a time."""
    monkeypatch.setattr(hydra_app, "run_configured", FakeJobs())
    seeds = ["-m", "sampling.seed=0,1"]
    assert run_command([*seeds, "hydra/launcher=basic", "output.dir=one"]) == 3
    workers = ["hydra/launcher=forking", "+worker=range(0,2)"]
    assert run_command([*seeds, *workers, "output.dir=many"]) == 3
    data = {
        folder: {path.name: path.read_bytes() for path in (tmp_path / folder / "data").iterdir()}
        for seed in range(2)
        for folder in (f"one/sampling.seed={seed}", f"many/sampling.seed={seed}")
    }
    for seed in range(2):
        assert len(data[f"one/sampling.seed={seed}"]) == 15
        assert data[f"many/sampling.seed={seed}"] == data[f"one/sampling.seed={seed}"]
    assert len({files["part-00000.parquet"] for files in data.values()}) == 2


@pytest.mark.thorough
def test_workers_of_the_jobs_of_a_sweep(jobs: Jobs) -> None:
    arguments = ["-m", "hydra/launcher=basic", "sampling.seed=0,3", "+worker=0,1", "output.dir=o"]
    assert run_command(arguments) == 3
    seeds = ["o/sampling.seed=0", "o/sampling.seed=3"]
    assert sorted(jobs.folders) == sorted(2 * seeds)
