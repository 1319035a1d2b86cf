"""Sweeps: which jobs they have, where these go, and how they end."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from batchgen.cli.hydra_app import run_hydra
from batchgen.cli.options import parse_options
from batchgen.cli.sweep import swept_values, worst
from batchgen.config.groups.job_config import JobConfig
from batchgen.util.errors import ConfigError


class Jobs:
    """Stands in for jobs: notes their configurations and ends with the given codes in turn."""

    def __init__(self, codes: Sequence[int] = ()) -> None:
        self.configs: list[JobConfig] = []
        self._codes = iter(codes)

    def __call__(self, config: JobConfig, *_: object) -> Any:
        self.configs.append(config)
        code = next(self._codes, 0)
        return SimpleNamespace(exit_code=code, message="", stopped_by=15 if code > 128 else None)

    @property
    def folders(self) -> list[str]:
        return [config.output.dir for config in self.configs]


def sweep(*arguments: str, codes: Sequence[int] = ()) -> tuple[int, Jobs]:
    jobs = Jobs(codes)
    with patch("batchgen.cli.hydra_app.run_configured", jobs):
        return run_hydra(parse_options(["--multirun", *arguments])), jobs


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("sampling.seed=0,1", ["sampling.seed=0", "sampling.seed=1"]),
        ("sampling.seed=range(1,3)", ["sampling.seed=1", "sampling.seed=2"]),
        ("sampling.seed=choice(3,4)", ["sampling.seed=3", "sampling.seed=4"]),
        ("sampling=glob(*)", ["sampling=greedy", "sampling=model", "sampling=sample"]),
        ("sampling.stop=[a],[b]", ["sampling.stop=[a]", "sampling.stop=[b]"]),
        (r'prompt.user="a\nb","c, d"', [r'prompt.user="a\nb"', 'prompt.user="c, d"']),
        ('prompt.user="a, b"', None),
        ("prompt.user={{ a }}, then {{ b }}", None),
        ("sampling.stop=[a,b]", None),
        ("sampling.seed=1", None),
    ],
)
def test_swept_values(argument: str, values: list[str] | None) -> None:
    assert swept_values(argument) == values


@pytest.mark.thorough
def test_folders_below_output_dir() -> None:
    _, jobs = sweep("sampling.seed=1,2", "sampling=greedy,sample", "output.dir=o", "sampling.n=2")
    assert jobs.folders == [
        "o/sampling.seed=1,sampling=greedy",
        "o/sampling.seed=1,sampling=sample",
        "o/sampling.seed=2,sampling=greedy",
        "o/sampling.seed=2,sampling=sample",
    ]
    assert [config.sampling.temperature for config in jobs.configs] == [0.0, 0.7, 0.0, 0.7]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("output", "folders"),
    [
        ("output.dir=o/${sampling.seed}", ["o/1", "o/2"]),
        ("output.dir=o/${hydra:job.num}", ["o/0", "o/1"]),
        ("output.dir=a,b", ["a", "b", "a", "b"]),
    ],
)
def test_folders_as_the_user_says(output: str, folders: list[str]) -> None:
    assert sweep("sampling.seed=1,2", output)[1].folders == folders


@pytest.mark.thorough
def test_the_same_sweep_goes_on_and_another_has_its_own_folder(tmp_path: Path) -> None:
    first = sweep("sampling.seed=1,2")[1].folders
    assert sweep("sampling.seed=1,2")[1].folders == first
    other = sweep("sampling.seed=1,3")[1].folders
    assert Path(first[0]).parts[:2] == ("outputs", "multirun")
    assert [Path(folder).name for folder in first] == ["sampling.seed=1", "sampling.seed=2"]
    assert Path(other[0]).parent != Path(first[0]).parent


@pytest.mark.thorough
def test_names_are_safe_and_all_differ() -> None:
    _, jobs = sweep('prompt.user="a/b {{ q }}","a?b {{ q }}"', "output.dir=o")
    names = [Path(folder).name for folder in jobs.folders]
    assert names[0] == "prompt.user=-a-b-q" and names[1].startswith("prompt.user=-a-b-q-")
    _, jobs = sweep(f"prompt.user={'x' * 300},{'x' * 299}", "output.dir=o")
    names = [Path(folder).name for folder in jobs.folders]
    assert len(set(names)) == 2 and max(map(len, names)) < 120


@pytest.mark.thorough
def test_a_failure_does_not_end_a_sweep_and_a_signal_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, jobs = sweep("sampling.seed=1,2,3", "output.dir=o", codes=[1, 3, 0])
    assert (code, len(jobs.configs)) == (1, 3)
    code, jobs = sweep("sampling.seed=1,2,3", "output.dir=o", codes=[0, 130])
    assert (code, len(jobs.configs)) == (130, 2)
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["sampling.seed=3", "not", "run"]


@pytest.mark.thorough
def test_a_refused_job_does_not_end_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, jobs = sweep("sampling.temperature=-1,1")
    assert (code, len(jobs.configs)) == (2, 1)
    assert "batchgen: sampling.temperature must be" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^model=hff: model has no choice hff"):
        sweep("sampling.seed=5,6", "model=hff")
    assert len(list((tmp_path / "outputs/multirun").iterdir())) == 1


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 3], 3), ([3, 2], 2), ([2, 1, 3], 1), ([1, 143], 143)]
)
def test_the_gravest_code(codes: list[int], code: int) -> None:
    assert worst(codes) == code


@pytest.mark.thorough
def test_workers_make_no_other_job() -> None:
    _, jobs = sweep("sampling.seed=0,3", "+worker=range(0,2)", "output.dir=o")
    assert jobs.folders == ["o/sampling.seed=0"] * 2 + ["o/sampling.seed=3"] * 2
    _, jobs = sweep("+worker=a,b", "output.dir=o")
    assert jobs.folders == ["o"] * 2
