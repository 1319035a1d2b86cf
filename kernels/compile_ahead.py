"""Compiles the Triton kernels of a piece of work in several threads, before that work runs.

Usually a kernel is compiled by its first launch, one kernel after another in one thread. Within
`compiling_ahead`, code is run once without a device: its launches are only recorded, each recorded
variant is compiled in a pool of threads, and nothing is launched. Triton keeps the results in
memory and on disk, where the real launches find them. The engine calls this at its start.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import triton
from torch import Tensor

_ahead: ContextVar[_Variants | None] = ContextVar("_ahead", default=None)
"""The variants that launches of this thread are recorded in; None: launches run as usual."""
_FEWEST_KERNELS = 12
"""An engine leaves more compiled kernels than this in Triton's cache."""
_redirected = threading.Lock()
"""Held while `KernelInterface.__getitem__` is replaced."""


def can_compile_ahead() -> bool:
    """Return whether Triton compiles here, and has the mode that compiles in several threads."""
    return hasattr(triton, "AsyncCompileMode") and not triton.knobs.runtime.interpret


def have_compiled() -> bool:
    """Return whether Triton has compiled as many kernels on this machine as an engine needs."""
    folder = Path(triton.knobs.cache.dir)
    # The folder may have thousands of entries, one per kernel; no more are listed than needed.
    entries = islice(folder.iterdir(), _FEWEST_KERNELS) if folder.is_dir() else ()
    return len(list(entries)) == _FEWEST_KERNELS


@contextmanager
def compiling_ahead(threads: int, start_thread: Callable[[], object]) -> Iterator[None]:
    """Compile the kernels that this thread launches within the context, without launching them.

    Only dtypes, addresses and numbers matter, so tensors may be on the device `meta`. `threads`
    kernels are compiled at once, and each thread calls `start_thread` first. The context ends when
    all kernels are compiled. A compiler error is dropped here: it is raised by the real launch of
    that kernel.
    """
    launch: Callable[[Any, Any], Callable[..., object]] = triton.KernelInterface.__getitem__

    def launch_or_compile(kernel: Any, grid: Any) -> Callable[..., object]:
        variants = _ahead.get()
        if variants is None:  # another thread's launch
            return launch(kernel, grid)
        return lambda *args, **options: variants.add(kernel, grid, args, options)

    with _redirected, ThreadPoolExecutor(threads, "compile", start_thread) as pool:
        token = _ahead.set(_Variants(pool))
        triton.KernelInterface.__getitem__ = launch_or_compile
        try:
            yield
        finally:
            triton.KernelInterface.__getitem__ = launch
            _ahead.reset(token)


class _Variants:
    """The kernel variants that are compiled or being compiled."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._seen: set[Hashable] = set()

    def add(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile the variant that this launch needs in a thread, unless it was added before."""
        names, constants = _parameters(kernel)
        any_value = getattr(kernel, "do_not_specialize", ())
        any_alignment = getattr(kernel, "do_not_specialize_on_alignment", ())
        arguments = {**dict(zip(names, args, strict=False)), **options}
        values = []
        for name, value in arguments.items():
            if name not in constants and name in names:
                value = _specialised(
                    value,
                    by_value=name not in any_value,
                    by_alignment=name not in any_alignment,
                )
            values.append((name, value))
        variant = kernel, tuple(values)
        if variant in self._seen:
            return
        self._seen.add(variant)
        # Triton computes this once per kernel, and in some versions it depends on the order in
        # which kernels come. So it is not left to the threads.
        kernel.cache_key  # noqa: B018
        self._pool.submit(kernel.warmup, *args, grid=grid, **options)


@cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of a kernel's parameters, and which of them are constants."""
    parameters = inspect.signature(kernel.fn).parameters
    constants = {name for name, each in parameters.items() if "constexpr" in str(each.annotation)}
    return tuple(parameters), frozenset(constants)


def _specialised(value: Any, *, by_value: bool, by_alignment: bool) -> Hashable:
    """Return what the compiler specialises on in a value that is not a constant: whether it is 1
    (`by_value`), or a multiple of 16 (`by_alignment`)."""
    by_alignment = by_alignment and by_value
    if isinstance(value, Tensor):
        return value.dtype, by_alignment and value.data_ptr() % 16 == 0
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        aligned = by_alignment and value % 16 == 0
        return by_value and value == 1, aligned, value.bit_length() > 31
    if isinstance(value, float):
        return float
    # A descriptor of a tensor.
    return value.base.dtype, tuple(value.block_shape)
