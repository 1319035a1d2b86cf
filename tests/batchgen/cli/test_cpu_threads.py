"""Threads of a CPU: how they wait for each other, and how many there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchgen.cli.cpu_threads import share_cores
from batchgen.inputs.model import open_model

ROOT = Path(__file__).parents[3]


def test_threads_spin_shortly_and_then_sleep() -> None:
    environment = {"HOME": "/"}
    share_cores(environment)
    assert environment == {"HOME": "/", "GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_threads_wait_as_the_user_says(name: str) -> None:
    environment = {name: "7"}
    share_cores(environment)
    assert environment == {name: "7"}


def test_the_command_says_so_before_torch_loads() -> None:
    program = "import sys, batchgen.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("cores", "variables", "expected"),
    [(2, {}, 2), (9, {}, 3), (2, {"OMP_NUM_THREADS": "3"}, 3)],
)
def test_no_more_threads_than_the_container_has_cores(
    cores: int, variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_model, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        open_model.limit_threads()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
