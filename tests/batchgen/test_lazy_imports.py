"""What the command loads before it knows that there is a job to run: seconds of every start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.hub_server import TOKEN, hub_server

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "datasets", "pyarrow"}

RUN_MAIN = """
import sys
from batchgen.__main__ import main
sys.argv = ["batchgen", *{arguments!r}]
try:
    main()
except SystemExit as exit:
    print("CODE", exit.code)
"""


def _loaded(program: str, cwd: Path) -> tuple[set[str], str]:
    """Which HEAVY packages a Python program has loaded at its end, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program + "\nprint('LOADED', *sys.modules)"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed, _, modules = done.stdout.rpartition("LOADED")
    return HEAVY & set(modules.split()), printed + done.stderr


def test_the_command_is_imported_without_heavy_packages(tmp_path: Path) -> None:
    loaded, _ = _loaded("import sys, batchgen.__main__", tmp_path)
    assert not loaded


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("arguments", "code", "says", "light"),
    [
        (["--help"], None, "sampling", True),
        (["--cfg", "job"], None, "max_new_tokens", False),
        (["sampling.temperature=-1"], 2, "sampling.temperature must be", False),
        (["model=hf"], 2, "model.path has no value", False),
        (["no_such_group=x"], 2, "no_such_group", False),
        (["sampling.temprature=1"], 2, "did you mean sampling.temperature?", True),
        (["--version"], 0, "transformers", True),
        (["--help", "sampling"], 0, "max_new_tokens", False),
        (["--help", "post", "rows"], 0, "ParseScore", False),
        (["--completion", "bash"], 0, "sampling.temperature=", False),
        (["init", "job.yaml"], 0, "job.yaml is written", False),
        (["--multirun", "sampling.temperature=-1,-2"], 2, "sampling.temperature must be", False),
        (["constraint=regex", "'constraint.pattern=\"(\"'"], 2, "constraint", False),
    ],
)
def test_help_and_mistakes_of_the_configuration_load_no_heavy_package(
    arguments: list[str], code: int | None, says: str, light: bool, tmp_path: Path
) -> None:
    """What is light, because it needs no job, does not wait for Hydra either."""
    program = RUN_MAIN.format(arguments=arguments)
    if light:
        program += "\nassert 'hydra' not in sys.modules"
    loaded, printed = _loaded(program, tmp_path)
    assert says in printed
    assert code is None or f"CODE {code}" in printed
    assert not loaded


def test_what_python_imports_is_light_until_it_is_used(tmp_path: Path) -> None:
    program = """
import sys, batchgen
batchgen.SamplingParams(max_tokens=5, constraint={"regex": "a+"})
try:
    batchgen.run_job({"sampling.temprature": 1})
except ValueError as error:
    print(error)
"""
    loaded, printed = _loaded(program, tmp_path)
    assert "temperature" in printed
    assert not loaded


@pytest.mark.thorough
def test_a_mistake_in_the_model_is_found_before_the_libraries_of_the_data_load(
    tmp_path: Path,
) -> None:
    arguments = ["model=hf", "model.path=./missing"]
    loaded, printed = _loaded(RUN_MAIN.format(arguments=arguments), tmp_path)
    assert "model ./missing does not exist" in printed and "CODE 2" in printed
    assert not loaded & {"datasets", "pyarrow"}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "job"],
        ["select", "job", "--where", "mark == 1 and text|length > 1", "--out", "set"],
        ["export", "job", "--to", "sft", "--where", "mark == 1", "--out", "sft.parquet"],
        ["export", "job", "--to", "dpo", "--by", "mark", "--out", "dpo"],
        ["export", "job", "--to", "openai", "--out", "lines.jsonl"],
    ],
    ids=lambda arguments: " ".join(arguments[:4]),
)
def test_verbs_on_finished_rows_load_no_library_of_models_or_data_sets(
    arguments: list[str], tmp_path: Path
) -> None:
    finished_job(tmp_path / "job", [row(0), row(1, text="no")], graded=True)
    loaded, printed = _loaded(RUN_MAIN.format(arguments=arguments), tmp_path)
    assert "CODE 0" in printed
    assert loaded == {"pyarrow"}


@pytest.mark.thorough
def test_a_push_loads_no_library_of_models_or_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_job(tmp_path / "job", [row(0)])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        loaded, printed = _loaded(RUN_MAIN.format(arguments=["push", "job", "me/set"]), tmp_path)
    assert "CODE 0" in printed and "data/part-00000.parquet" in hub.repos["me/set"].files
    assert loaded == {"pyarrow"}
