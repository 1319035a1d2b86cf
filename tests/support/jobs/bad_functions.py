"""Functions that worker processes call in the tests of the pool."""

import os
import signal
import time
from typing import Any

from batchgen.evals.graders.step import GradeFailure


def double(item: Any) -> Any:
    """Twice the item, or what the item asks for."""
    if item == "hang":
        time.sleep(10**6)
    if item == "hang in C":
        return pow(7, 10**9)
    if item == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "exit":
        os._exit(3)
    if item == "memory":
        return len(bytearray(8 << 30))
    if item == "raise":
        raise KeyError("x")
    if item == "typed":
        raise GradeFailure("no_target", "there is none")
    if item == "large":
        return "y" * 3_000_000
    if isinstance(item, float):
        time.sleep(item)
    return item * 2


def broken() -> None:
    raise SystemExit(7)


def mark(*, answer: str | None, target: str | None, text: str, fields: Any, bonus: float) -> float:
    return bonus if answer == target and fields["x"] == 1 and text else 0.0


def no_mark(**_: Any) -> str:
    return "good"


class StepWithoutReads:
    """A step that does not say which values of other steps it reads."""

    version, columns, isolated, reads_text, field_names = 1, (), False, True, ()

    def prepare(self) -> None:
        pass

    def apply(self, row: Any) -> dict[str, Any]:
        return {}
