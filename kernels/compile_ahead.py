"""Compiles the kernels of a piece of work in several threads, before the work is done.

A kernel is compiled by its first launch, one after another in one thread. Here the work is gone
through once without a device: its launches say which variants it needs, and these are compiled side
by side. Triton keeps them in memory and on disk, where the real launches find them.
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
"""Where the launches of this thread go; None if they are launched."""
_FEWEST_KERNELS = 12
"""An engine needs more kernels than this."""
_redirected = threading.Lock()
"""Held while `KernelInterface` is changed."""


def can_compile_ahead() -> bool:
    """Whether Triton compiles here, and in several threads at once, which it has a mode for."""
    return hasattr(triton, "AsyncCompileMode") and not triton.knobs.runtime.interpret


def have_compiled() -> bool:
    """Return whether Triton has compiled as many kernels on this machine as an engine needs."""
    folder = Path(triton.knobs.cache.dir)
    kept = islice(folder.iterdir(), _FEWEST_KERNELS) if folder.is_dir() else ()
    return len(list(kept)) == _FEWEST_KERNELS


@contextmanager
def compiling_ahead(threads: int, start_thread: Callable[[], object]) -> Iterator[None]:
    """Compile the kernels that this thread launches within the context, and launch none.

    Only dtypes, addresses and numbers matter: tensors may be on the device `meta`. `threads`
    kernels are compiled at once, and each thread calls `start_thread` first. The context ends when
    all is compiled. An error of the compiler is left to the launch that needs the kernel.
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
    """The variants of kernels that are compiled or will be."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._seen: set[Hashable] = set()

    def add(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Let a thread compile the variant that this launch needs, unless one does already."""
        names, constants = _parameters(kernel)
        plain = getattr(kernel, "do_not_specialize", ())
        unaligned = getattr(kernel, "do_not_specialize_on_alignment", ())
        arguments = {**dict(zip(names, args, strict=False)), **options}
        values = []
        for name, value in arguments.items():
            if name not in constants and name in names:
                value = _specialised(value, name not in plain, name not in unaligned)
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


def _specialised(value: Any, by_value: bool, by_alignment: bool) -> Hashable:
    """Return what the compiler notices in a value that is no constant: 1, or a multiple of 16."""
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
