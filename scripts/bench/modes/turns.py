"""Engines that take turns on one GPU, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[3]
"""The root of this tree."""


@dataclass(frozen=True)
class Spec:
    """An engine, and how it runs the workloads.

    Attributes:
        layers: how many of the model's layers; 0 is all.
        config: settings of `EngineConfig`.
        bench: options of `Bench`.
        rehearse: whether each workload runs once before any is timed, in place of `Bench.warm_up`.
        rates: those of this GPU, for floors; None on a CPU.
    """

    model: str
    workloads: tuple[str, ...]
    layers: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.6
    rehearse: bool = False
    rates: tuple[float, float] | None = None


class Process:
    """An engine in a process of its own, with the sources of this tree or of another one."""

    def __init__(self, spec: Spec, tree: Path = HERE) -> None:
        self._name = f"{spec.model} of {tree}"
        paths = [str(tree), str(tree / "scripts/bench"), os.environ.get("PYTHONPATH", "")]
        script = str(Path(__file__).with_name("served.py"))
        self._process = subprocess.Popen(
            # -P: modules come from PYTHONPATH alone, not from this script's folder.
            [sys.executable, "-P", script, json.dumps(asdict(spec))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> str:
        """Wait until the engine is ready, and return how it divides the memory."""
        return str(self._answer()["memory"])

    def run(self, workload: str) -> dict[str, Any]:
        """Run a workload in the process, and return its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._name} has ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def in_turn(processes: Sequence[Process], workload: str, rounds: int) -> list[list[dict[str, Any]]]:
    """Run a workload in each process, one after another, `rounds` times. Returns the figures of
    each process."""
    runs = [[process.run(workload) for process in processes] for _ in range(rounds)]
    return [list(figures) for figures in zip(*runs, strict=True)]


def compared(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Compare the seconds of A's and of B's runs."""
    middle = median(first)
    return {
        "A": [round(each, 3) for each in first],
        "B": [round(each, 3) for each in second],
        "difference": median(second) / middle - 1,
        "spread": (max(first) - min(first)) / middle,
    }
