"""Tests in forks run once each, report what they found, and end the run if their process dies."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from tests.support.forks import with_room

MODULES = {
    "one": (
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(90))\n"
        "def test_n(n):\n    assert n != 7\n"
    ),
    "two": (
        "import os, warnings\n"
        "from pathlib import Path\n"
        "def test_prints(tmp_path):\n    print('said', Path('ran').write_text(tmp_path.name))\n"
        "def test_warns():\n    warnings.warn('be careful')\n"
        "def test_fails():\n    print('seen'); assert False\n"
    ),
    "three": "import os\ndef test_dies(): os._exit(9)\n",
}


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    for name, source in MODULES.items():
        (folder / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.forks", "--forks", "2"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", folder, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_each_test_runs_once_and_reports(tmp_path: Path) -> None:
    code, said = run(tmp_path, "test_one.py", "test_two.py")
    assert code == 1
    assert "2 failed, 91 passed, 1 warning" in said
    assert "test_one.py::test_n[7]" in said and "be careful" in said and "seen" in said
    assert "said" not in said and (tmp_path / "ran").read_text() == "test_prints0"


def test_a_test_that_ends_its_process_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, "test_three.py")
    assert code != 0 and "test_three.py::test_dies ended its process with 9" in said


def test_the_first_failure_ends_the_run_on_request(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-x", "test_one.py")
    assert code != 0 and "1 failed" in said


def page_faults(depth: int) -> int:
    """Those of a loop of 1,000 calls, itself in as many calls as the depth."""
    if depth:
        return page_faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(1000):
        _nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _nothing() -> None:
    pass


def test_calls_get_no_memory_anew_at_any_depth() -> None:
    faults: list[int] = []
    with_room(lambda: faults.extend(map(page_faults, range(200))))
    assert max(faults) < 500
