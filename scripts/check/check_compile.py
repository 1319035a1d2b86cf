"""Compile the Triton kernels for an NVIDIA GPU that need not be there.

    python scripts/check/check_compile.py [--capability 90] [FILES of tests]

Runs the tests of the kernels (tests/kernels by default) with launches that compile a kernel, as it
is called, and do nothing else. So their results are wrong, and only what the compiler refuses
counts. The interpreter, under which these tests run where there is no GPU, accepts more than the
compiler.
The exit code is 1 if any kernel does not compile, or asks for more shared memory than a
multiprocessor has.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The most shared memory of a program, by compute capability (CUDA C++ programming guide)."""


class AbsentGPU(DriverBase):  # type: ignore[misc]
    """What Triton asks of a driver to compile a kernel; nothing can be launched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """The kernels that were compiled, and what went wrong."""

    def __init__(self, capability: int) -> None:
        self.variants: Counter[str] = Counter()
        self.errors: dict[str, str] = {}
        self._room = SHARED_BYTES.get(capability, SHARED_BYTES[80])
        self._run, self._seen = JITFunction.run, set[int]()

    def launch(self, kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the place of `JITFunction.run`."""
        kwargs["warmup"] = True
        if "INTERPRETED" in kwargs:
            kwargs["INTERPRETED"] = False
        try:
            made = self._run(kernel, *args, **kwargs)
        except Exception as error:
            self.errors.setdefault(kernel.__name__, f"{type(error).__name__}: {error}")
            raise
        if id(made) not in self._seen:
            self._seen.add(id(made))
            self.variants[kernel.__name__] += 1
            if made.metadata.shared > self._room:
                self.errors[kernel.__name__] = (
                    f"{made.metadata.shared:,} bytes of shared memory, of {self._room:,}"
                )
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests/kernels"])
    parser.add_argument("--capability", type=int, default=90, help="such as 90 for Hopper")
    arguments = parser.parse_args()
    driver.set_active(AbsentGPU(arguments.capability))
    compiled = Compiled(arguments.capability)
    JITFunction.run = lambda kernel, *args, **kwargs: compiled.launch(kernel, *args, **kwargs)
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    pytest.main([*quiet, *arguments.tests])
    for name, count in sorted(compiled.variants.items()):
        print(f"{name}: {count} variants")
    for name, error in compiled.errors.items():
        print(f"\n{name} does not compile: {error}")
    sys.exit(1 if compiled.errors or not compiled.variants else 0)


if __name__ == "__main__":
    main()
