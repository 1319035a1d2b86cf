"""Launches that are compiled ahead. Kernels stand in for Triton's, which a CPU only interprets;
`scripts/check/check_kernels.py` compiles real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from batchgen.kernels.compile_ahead import can_compile_ahead, compiling_ahead, have_compiled


def body(x_ptr, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a kernel is made of."""


class Kernel(triton.KernelInterface):  # type: ignore[misc]
    """Notes what is compiled and what is launched."""

    cache_key = "key"
    do_not_specialize: Sequence[str] = ()
    do_not_specialize_on_alignment: Sequence[str] = ()

    def __init__(self, error: Exception | None = None) -> None:
        self.fn: Callable[..., None] = body
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self._error = error

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        (self.compiled if warmup else self.launched).append((*args[1:], options))
        self.threads.add(threading.current_thread().name)
        if warmup and self._error is not None:
            raise self._error


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_launches_compile_each_variant_once_in_other_threads() -> None:
    kernel, started = Kernel(), threading.Semaphore(0)
    with compiling_ahead(3, started.release):
        for _ in range(4):
            kernel[(1,)](meta(8), 16, SIZE=4)
            kernel[(2,)](meta(9), 32, SIZE=4)  # a multiple of 16 as well
            kernel[(1,)](meta(8), 16, SIZE=8)
    assert sorted(options["SIZE"] for *_, options in kernel.compiled) == [4, 8]
    assert not kernel.launched
    assert threading.current_thread().name not in kernel.threads
    assert started.acquire(blocking=False)


@pytest.mark.parametrize(
    ("x", "count", "options"),
    [
        (meta(8, dtype=torch.bfloat16), 16, {}),
        (meta(8)[1:], 16, {}),  # at an address that is no multiple of 16
        (meta(8), 1, {}),
        (meta(8), 17, {}),
        (meta(8), 2**40, {}),
        (meta(8), 0.5, {}),
        (meta(8), None, {}),
        (None, 16, {}),
        (meta(8), 16, {"num_warps": 8}),
    ],
)
def test_what_the_compiler_takes_notice_of_makes_another_variant(
    x: Any, count: Any, options: dict[str, Any]
) -> None:
    kernel = Kernel()
    with compiling_ahead(2, lambda: None):
        kernel[(1,)](meta(8), 16, SIZE=4)
        kernel[(1,)](x, count, SIZE=4, **options)
        kernel[(1,)](x, count, SIZE=4, **options)
    assert len(kernel.compiled) == 2


def test_what_the_kernel_has_excepted_makes_no_other_variant() -> None:
    kernel = Kernel()
    kernel.do_not_specialize, kernel.do_not_specialize_on_alignment = ["count"], ["x_ptr"]
    with compiling_ahead(2, lambda: None):
        for x, count in ((meta(8), 16), (meta(8), 1), (meta(8), 17), (meta(8)[1:], 16)):
            kernel[(1,)](x, count, SIZE=4)
    assert len(kernel.compiled) == 1


def test_launches_of_other_threads_and_later_ones_run() -> None:
    kernel = Kernel()
    with compiling_ahead(1, lambda: None):
        other = threading.Thread(target=lambda: kernel[(1,)](meta(8), 1, SIZE=1))
        other.start()
        other.join()
    kernel[(1,)](meta(8), 2, SIZE=1)
    assert [count for count, _ in kernel.launched] == [1, 2]
    assert not kernel.compiled


def test_an_error_of_the_compiler_is_left_to_the_launch() -> None:
    broken, sound = Kernel(ValueError("no such layout")), Kernel()
    with compiling_ahead(1, lambda: None):
        broken[(1,)](meta(8), 1, SIZE=1)
        sound[(1,)](meta(8), 1, SIZE=1)
    assert broken.compiled and sound.compiled


def test_an_error_of_the_work_ends_the_redirection() -> None:
    kernel, launch = Kernel(), triton.KernelInterface.__getitem__
    with pytest.raises(RuntimeError, match="the work"), compiling_ahead(1, lambda: None):
        raise RuntimeError("the work")
    assert triton.KernelInterface.__getitem__ is launch
    kernel[(1,)](meta(8), 1, SIZE=1)
    assert kernel.launched


def test_interpreted_kernels_and_old_versions_are_not_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton, "AsyncCompileMode", object(), raising=False)
    assert can_compile_ahead()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert not can_compile_ahead()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.delattr(triton, "AsyncCompileMode")
    assert not can_compile_ahead()


def test_a_machine_has_compiled_kernels_once_triton_keeps_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    assert not have_compiled()
    for index in range(11):
        (tmp_path / "cache" / f"KERNEL{index}").mkdir(parents=True)
    assert not have_compiled()
    (tmp_path / "cache" / "KERNEL11").mkdir()
    assert have_compiled()
