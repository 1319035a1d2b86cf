"""Code that a configuration names runs on the user's word alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose_groups
from batchgen.config.compose.load_config import load_config
from batchgen.config.compose.trust import Trust, foreign_code
from batchgen.config.groups.config_keys import EXPERIMENT, GROUPS, choice_values, choices
from batchgen.config.groups.named_code import named_code
from batchgen.util.errors import ConfigError
from tests.support.cases import some_slow
from tests.support.jobs.finished_job import finished_job, row

FUNCTION = {"_target_": "strangers_code.mark"}
"""What it runs, if it is imported at all, writes a file beside it."""
STEPS = [
    {"_target_": "batchgen.grading.extract.Extract", "methods": ["whole"]},
    {"_target_": "batchgen.grading.grade.Grade", "method": "function", "function": FUNCTION},
]
TYPED_STEPS = (
    "post=[{_target_: batchgen.grading.extract.Extract, methods: [whole]},"
    " {_target_: batchgen.grading.grade.Grade, method: function,"
    " function: {_target_: strangers_code.mark}}]"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a stranger's module, as `python -m batchgen` has it."""
    (tmp_path / "strangers_code.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_name('ran').touch()\n"
        "def mark(**given):\n"
        "    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "strangers_code", raising=False)
    return tmp_path


def job_file(here: Path, **values: Any) -> Path:
    path = here / "their" / "job.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"model": "nano_hybrid", "dataset": "demo", **values}))
    return path


NAMING: dict[str, dict[str, Any]] = {
    "a strategy": {"strategy": {"_target_": "strangers_code.Strategy"}},
    "a row step": {"rows": [{"_target_": "strangers_code:Step"}]},
    "a post step": {"post": [{"_target_": "strangers_code.Step"}]},
    "a function": {"post": STEPS},
    "an interpreter": {"post": [{"RunTests": {"python": "./strangers_code"}}]},
    "a reference": {"model": {"choice": "nano_hybrid", "name": "strangers_code.Step"},
                    "post": [{"_target_": "${model.name}"}]},
    "what batchgen imports": {"rows": [{"_target_": "strangers_code.os.system"}]},
    "a runtime": {"launcher": {"choice": "ray", "runtime_env": {"pip": ["strangers_code"]}}},
    "a launcher": {"launcher": {"_target_": "strangers_code.Step"}},
    "keys of a launcher": {"launcher": {"_target_": "batchgen.launchers.ray_launcher.RayLauncher",
                                        "address": "ray://strangers_code:1"}},
    "a cluster": {"launcher": {"choice": "ray", "address": "ray://strangers_code:1"}},
}  # fmt: skip


FORMS = ("job", "dry run", "plan", "sweep", "hydra")
ALL = [(form, name) for form in FORMS for name in NAMING]
FEW = [pair for pair in ALL if pair[0] == "job" or pair[1] in ("a reference", "a launcher")]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("form", "name"), some_slow(ALL, quick=FEW))
def test_of_a_job_file_it_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], form: str, name: str
) -> None:
    path = str(job_file(here, **NAMING[name]))
    arguments = {
        "job": [path],
        "dry run": [path, "--dry-run"],
        "plan": ["plan", path],
        "sweep": [path, "-m", "sampling.seed=1,2", f"output.dir={here / 'out'}"],
        "hydra": [path, "hydra.job.name=x", f"output.dir={here / 'out'}"],
    }[form]
    assert run_command(arguments) == 2
    said = capsys.readouterr().err
    assert "not batchgen's own" in said and f"--trust {path}" in said
    assert "strangers_code" in said or "touch ran" in said
    assert not (here / "ran").exists()
    assert not (here / "out").exists() or form == "sweep"  # which has a table of its jobs
    assert not list(here.glob("out/**/data"))


def graded(here: Path, **config: Any) -> Path:
    return finished_job(here / "out", [row(0), row(1)], config={"post": STEPS, **config})


def test_grade_asks_for_what_the_folder_names(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = graded(here)
    assert run_command(["grade", str(out)]) == 2
    said = capsys.readouterr().err
    assert "post[1].Grade.function._target_ strangers_code.mark" in said
    assert f"--trust {out / 'config.yaml'}" in said
    assert not (here / "ran").exists() and not (out / "grades").exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "word",
    [
        ["--trust", "out"],
        ["--trust", "out/config.yaml"],
        ["--trust", "."],
        [TYPED_STEPS],
        ["--trust=out"],
    ],
)
def test_grade_runs_it_on_the_users_word(here: Path, word: list[str]) -> None:
    graded(here)
    assert run_command(["grade", "out", *word]) == 0
    assert (here / "ran").exists()


def test_scores_and_comparisons_ask_nothing(here: Path) -> None:
    graded(here)
    assert run_command(["grade", "out", "--trust", "out"]) == 0
    (here / "ran").unlink()
    for verb in (["score", "out"], ["compare", "out", "out"], ["report", "out"]):
        assert run_command(verb) == 0, verb
    assert not (here / "ran").exists()


def test_another_folder_is_nobodys_word(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graded(here)
    (here / "outer").mkdir()
    for given in ("outer", "out/data", "out.yaml"):
        assert run_command(["grade", "out", "--trust", given]) == 2
        assert (
            f"--trust {given}: no configuration is read from there, only from out"
            in capsys.readouterr().err
        )
    assert run_command(["--trust", "out", "--dry-run", "model=nano_hybrid"]) == 2
    assert "the command line alone" in capsys.readouterr().err


def test_files_of_choices_are_asked_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = here / "mine" / "experiment" / "theirs.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\npost: [{_target_: strangers_code.Step}]\n")
    arguments = ["--config-dir", "mine", "+experiment=theirs", "model=nano_hybrid", "dataset=demo"]
    assert run_command([*arguments, "--dry-run"]) == 2
    assert "post[0]._target_ strangers_code.Step" in capsys.readouterr().err
    assert not (here / "ran").exists()
    assert run_command([*arguments, "--dry-run", "--trust", "mine"]) == 2
    assert "does not exist" in capsys.readouterr().err and (here / "ran").exists()


@pytest.mark.parametrize("text", ["hydra: {callbacks: {x: {_target_: strangers_code.Step}}}\n", ""])
def test_hydra_gets_no_files_of_strangers(
    here: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    mine = here / "mine" / "experiment" / "theirs.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\n" + text)
    arguments = ["--config-dir", "mine", "+experiment=theirs", "hydra.job.name=x"]
    assert run_command(arguments) == 2
    assert "Hydra itself runs code" in capsys.readouterr().err
    assert run_command(["--experimental-rerun", "mine/config.pickle"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not (here / "ran").exists()


def test_what_is_typed_is_the_users_word(here: Path) -> None:
    file = job_file(here, post=STEPS)
    both = Trust.of([file], [], [TYPED_STEPS])
    groups = compose_groups({"post": STEPS}, [TYPED_STEPS]).groups
    assert load_config(groups, both).post[1].options["function"] == FUNCTION
    with pytest.raises(ConfigError, match="strangers_code"):
        load_config(groups, Trust.of([file], [], ["strategy._target_=another.Strategy"]))
    own = ["post=[{RunTests: {python: /my/python}}]"]
    load_config(compose_groups({}, own).groups, Trust.of([file], [], own))
    ray = ["launcher=ray", "launcher.address=ray://here:1"]
    load_config(compose_groups({}, ray).groups, Trust.of([file], [], ray))
    with pytest.raises(ConfigError, match="ray://here:1"):
        load_config(compose_groups({}, ray).groups, Trust.of([file], [], ray[:1]))


def test_what_comes_with_batchgen_is_its_own() -> None:
    for group in (*GROUPS, EXPERIMENT):
        for choice in choices(group):
            values = choice_values(group, choice)
            assert not [*foreign_code(values if group == EXPERIMENT else {group: values})], choice


@pytest.mark.parametrize(
    "path",
    [
        "batchgen.config.groups.named_code.os.system",
        "batchgen.evals.graders.grading_pool:subprocess.Popen",
        "batchgen.config.groups.named_code.sys",
    ],
)
def test_what_batchgen_imports_is_not_its_own(path: str) -> None:
    with pytest.raises(ConfigError, match="is not batchgen's own"):
        named_code(path, "here")


@pytest.mark.parametrize("path", ["batchgen.no.such", "batchgen..x", "batchgen.\0", "batchgen.1"])
def test_what_is_not_there_is_said_in_a_line(path: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        named_code(path, "here")


def _module(here: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "batchgen", *arguments]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_the_working_directory_has_no_modules_of_ours(here: Path) -> None:
    """What `python -m batchgen` and the processes that grade import is not in the directory."""
    for name in ("yaml", "omegaconf", "hydra_plugins/theirs", "pyarrow", "multiprocessing"):
        path = here / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('a stranger was imported')")
    graded(here)
    for arguments in (["--cfg", "job"], ["grade", "out", "--trust", "out"], ["score", "out"]):
        done = _module(here, arguments)
        assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_step_of_the_working_directory_is_found(here: Path) -> None:
    graded(here)
    assert _module(here, ["grade", "out"]).returncode == 2
    assert not (here / "ran").exists()
    assert _module(here, ["grade", "out", "--trust", "out"]).returncode == 0
    assert (here / "ran").exists()
