"""Engines whose weights are divided between processes on the CPU, one after another in the same
processes. Those are forks, because a process of its own imports for seconds.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.adapters import add_adapters
from batchgen.engine.loading.config_file import LoadFormat
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.peft_files import open_adapter
from batchgen.engine.models.model_config import KVCacheDtype
from batchgen.engine.parallel import rank_main, rank_processes
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.replicas import Leader, follow_engine
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.engine.constrained_rows import END, make_tokenizer
from tests.support.engine.engine_rows import Pictured, Request, Scored, expect_short_rows, run

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """An engine and what it is asked for."""

    folder: Path
    requests: Sequence[Request | Scored | Pictured]
    strategy: Strategy = field(default_factory=ARStrategy)
    config: Mapping[str, Any] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    draft: Path | None = None
    columns: tuple[str, ...] = ()
    has_text: bool = False
    short_rows: bool = False
    adaptive: bool = False
    tolerance: float = 1e-5
    aborts: Mapping[int, Sequence[int]] | None = None
    restarts: Collection[int] = ()
    load_format: LoadFormat = "auto"
    vision: bool = False
    adapters: Mapping[str, Path] = field(default_factory=dict)
    native_fp8: bool = False  # weights in FP8, which are rounded while they load if they are not
    kv_cache_dtype: KVCacheDtype = "auto"
    dtype: torch.dtype = torch.float32
    in_four_bits: bool = False  # weights stay in 4 bits

    @contextmanager
    def engine(
        self, parallel: TensorParallel = ALONE, leader: Leader | None = None
    ) -> Iterator[LLMEngine]:
        options: dict[str, Any] = {"max_model_len": 200, "kv_cache_gib": 0.01, "max_num_seqs": 6}
        where: dict[str, Any] = {"device": CPU, "parallel": parallel, "dtype": self.dtype}
        others = {} if self.draft is None else {"draft": load_model(self.draft, **where)}
        with pytest.MonkeyPatch.context() as patch:
            if self.short_rows:
                expect_short_rows(patch)
            model = load_model(
                self.folder,
                load_format=self.load_format,
                heads=self.heads,
                quantization="fp8" if self.native_fp8 else None,
                native_fp8=self.native_fp8 or self.in_four_bits,
                vision=self.vision,
                kv_cache_dtype=self.kv_cache_dtype,
                **where,
            )
            if self.adapters:
                adapters = {n: open_adapter(path) for n, path in self.adapters.items()}
                add_adapters(model, adapters, slots=self.config.get("lora_slots"))
            yield LLMEngine(
                model,
                make_tokenizer() if self.has_text else None,
                (END,) if self.has_text else (2,),
                copy.deepcopy(self.strategy),
                EngineConfig(**options | dict(self.config)),
                others=others,
                context_columns=self.columns,
                leader=leader,
            )

    def run(
        self, parallel: TensorParallel = ALONE, leader: Leader | None = None
    ) -> tuple[list[RequestOutput], LLMEngine]:
        with self.engine(parallel, leader) as engine:
            return run(engine, self.requests, self.aborts, self.restarts), engine


class _UntilNone:
    """A connection that seems to end where None is sent."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def recv(self) -> object:
        received = self._connection.recv()
        if received is None:
            raise EOFError
        return received


@dataclass(frozen=True)
class Cases:
    """The recipe of one engine after another."""

    cases: Sequence[Case]

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        torch.set_num_threads(1)
        for case in self.cases:
            with case.engine(parallel) as engine:
                follow_engine(engine, cast("Connection[Any, Any]", _UntilNone(connection)))


class Fork:
    """The part of `subprocess.Popen` that `RankProcesses` needs, for a fork of this process."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: object) -> None:
        self._process = multiprocessing.get_context("fork").Process(
            target=_be_rank, args=(command[command.index("-c") :], pass_fds)
        )
        self._process.start()
        self._joining = threading.Lock()  # only one thread can ask the system for an exit code

    def wait(self, timeout: float | None = None) -> int:
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        with self._joining:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Let ranks be started as forks of the process that starts them."""
    forks = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(rank_processes, "subprocess", forks):
        yield


def _be_rank(arguments: Sequence[str], descriptors: Sequence[int]) -> None:
    sys.argv, sys.stdout, sys.stderr = [*arguments], sys.__stdout__, sys.__stderr__
    sys.argv[1:2] = []  # the program
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in descriptors:
            with suppress(OSError):
                # A rank ends when all others have closed its socket. Files stay open: a log that
                # writes to one would else write to the socket that gets its number.
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.close(descriptor)
    rank_main.main()


def run_divided(
    cases: Sequence[Case], size: int
) -> Iterator[tuple[list[RequestOutput], LLMEngine]]:
    """Yield what each engine makes of its requests, divided between so many ranks."""
    with forked_ranks():
        processes = RankProcesses(size, Cases(cases), "cpu")
    try:
        for case in cases:
            yield case.run(processes.parallel, Leader(processes))
            processes.send(None)
    finally:
        processes.close()
