"""What somebody finds who installs batchgen: its names, its types, its dependencies."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import batchgen
from batchgen.util.versions import versions
from tests.support.imports import syntax_tree

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = ("images", "evals", "s3", "ray", "lm-eval", "inspect", "trackio", "wandb")
"""The extras that users install; the others are for work on batchgen."""
OTHER_NAMES = {
    "hydra": "hydra-core", "markdown_it": "markdown-it-py", "PIL": "Pillow", "yaml": "PyYAML"
}  # fmt: skip
"""Distributions by their modules, where the names differ."""
PUBLIC = """
    ARSpecStrategy ARStrategy AnswerRow BadRow CanvasStrategy Column CompleteJob ConfigError
    Constraint DLLMStrategy Dropped GradeFailure JobError JobFolderReader LLM Output PostStep
    RowStep SamplingParams Score StepRow TableStep __version__ follows_instruction
    run_job same_math
"""


def _requirements(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def _pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def _imported() -> set[str]:
    """Modules from outside that the four layers import anywhere, also inside functions."""
    found = set()
    for folder in ("batchgen", "strategies", "engine", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(syntax_tree(path)):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"batchgen", "_typeshed"}


def test_public_names() -> None:
    assert sorted(batchgen.__all__) == sorted(PUBLIC.split())
    for name in batchgen.__all__:
        assert getattr(batchgen, name) is not None
        assert name in dir(batchgen)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = batchgen.Llm


def test_one_version() -> None:
    assert versions().splitlines()[0] == f"batchgen {batchgen.__version__}"
    assert PROJECT["dynamic"] == ["version"]
    assert f"## {batchgen.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {batchgen.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_import_is_declared_and_every_dependency_imported() -> None:
    used = {canonicalize_name(OTHER_NAMES.get(name, name)) for name in _imported()}
    declared = {canonicalize_name(one.name) for one in _requirements(*OPTIONAL)}
    assert used == declared


def test_constraints_have_the_oldest_versions_and_tested_ones() -> None:
    oldest, tested = _pins("constraints-oldest.txt"), _pins("constraints.txt")
    requirements = _requirements(*OPTIONAL)
    assert set(oldest) == {canonicalize_name(one.name) for one in requirements}
    for one in requirements:
        name = canonicalize_name(one.name)
        bounds = [part.version for part in one.specifier if part.operator == ">="]
        assert [oldest[name]] == bounds, f"{name}: pyproject.toml has {bounds}"
        if name in tested:
            assert one.specifier.contains(tested[name]), f"{name}=={tested[name]}"


def test_types_are_shipped() -> None:
    assert (ROOT / "batchgen" / "py.typed").is_file()
    assert "py.typed" in (ROOT / "pyproject.toml").read_text()


USERS_SCRIPT = """
from batchgen import LLM, JobFolderReader, SamplingParams, run_job
llm = LLM("package://batchgen/data/nano_sdar")
outputs = llm.generate("1 + 1 =", SamplingParams(max_tokens=4, logprobs=1))
reveal_type(outputs)
reveal_type(outputs[0].text)
reveal_type(llm.generate(["1 + 1 ="]))
reveal_type(run_job({"output.dir": "out"}).exit_code)
reveal_type(JobFolderReader)
"""
REVEALED = (
    '"list[batchgen.api.python.output.Output]"',
    '"str"',
    '"list[list[batchgen.api.python.output.Output]]"',
    '"int"',
    "batchgen.storage.folder.read_job.JobFolderReader",
)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("build") is None, reason="the wheel is made by the package build"
)
def test_the_wheel_runs_and_has_types_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    script = tmp_path / "script.py"
    script.write_text(USERS_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(site), "MYPYPATH": ""}
    job = "+experiment=nano_sdar", "dataset.limit=4", "engine.device=cpu", "output.dir=out"
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "batchgen", *job],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    typed = subprocess.run(
        [*mypy, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    for text in REVEALED:
        assert text in typed.stdout
    assert typed.returncode == 0, typed.stdout
