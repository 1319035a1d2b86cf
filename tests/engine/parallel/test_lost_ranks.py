"""A rank that is lost ends the others, and the engine says which one and how."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest

from batchgen.engine.device.transfer import Download
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.parallel import place, rank_processes
from batchgen.engine.parallel.rank_group import DistributedGroup
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import TensorParallel
from batchgen.engine.replicas import Leader, follow_engine
from batchgen.engine.sampling.sampling_params import RequestParams
from tests.support.engine.ranked_engines import Case, Cases, Fork, forked_ranks

TinyModel = Callable[..., Path]


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished():
        engine.step()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "rank 1 was ended by signal 9"),
        pytest.param(signal.SIGSTOP, "rank 1 has not answered for 3 sec", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_an_error(
    tiny_model: TinyModel, number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tiny_model("qwen3"), ())
    with (
        closing(RankProcesses(2, Cases([case]), "cpu")) as processes,
        case.engine(processes.parallel, Leader(processes)) as engine,
    ):
        (process,) = processes._processes.values()
        params = RequestParams(max_new_tokens=100, ignore_eos=True)
        engine.add_request("0", [5, 6, 7], params)
        engine.step()
        if number == signal.SIGSTOP:
            monkeypatch.setattr(rank_processes, "_SILENT_SECONDS", 3.0)
        os.kill(process.pid, number)
        with pytest.raises(RuntimeError, match=message):
            finish(engine)
        # It stays so, also for who asks again.
        with pytest.raises(RuntimeError):
            engine.step()
        assert process.wait(60) == -signal.SIGKILL
        engine.close()
        engine.close()


class Apart(Cases):
    """A rank that believes to have had other tokens than rank 0."""

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        (case,) = self.cases
        with case.engine(parallel) as engine:
            engine._digest = 1
            follow_engine(engine, connection)


@pytest.mark.thorough
def test_a_rank_with_other_tokens_is_found(tiny_model: TinyModel) -> None:
    case = Case(tiny_model("qwen3"), ())
    with (
        closing(RankProcesses(2, Apart([case]), "cpu")) as processes,
        case.engine(processes.parallel, Leader(processes)) as engine,
    ):
        engine.add_request("0", [5, 6, 7], RequestParams(max_new_tokens=100, ignore_eos=True))
        with pytest.raises(RuntimeError, match="the tokens of this rank differ from those of rank"):
            finish(engine)


class Stuck(Cases):
    """A rank that never launches its second step."""

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        (case,) = self.cases
        with case.engine(parallel) as engine:
            launch = engine._launcher.launch

            def launch_once(*arguments: Any) -> Any:
                engine._launcher.launch = lambda *_: time.sleep(1000)  # type: ignore[assignment]
                return launch(*arguments)

            engine._launcher.launch = launch_once  # type: ignore[assignment,method-assign]
            follow_engine(engine, connection)


def test_what_waits_is_there() -> None:
    group = DistributedGroup
    waits = (Download.wait, group.agree, group.least, group._gathered, follow_engine)
    assert {wait.__qualname__ for wait in waits} == place._WAITS


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tiny_model("qwen3"), ())
    with (
        closing(RankProcesses(2, Stuck([case]), "cpu")) as processes,
        case.engine(processes.parallel, Leader(processes)) as engine,
    ):
        engine.add_request("0", [5, 6, 7], RequestParams(max_new_tokens=100, ignore_eos=True))
        # On a CPU a step may take any time.
        monkeypatch.setattr(processes, "_gpu", True)
        monkeypatch.setattr(rank_processes, "_STEP_SECONDS", 8.0)
        message = r"after 8 seconds: rank 1 is at llm_engine.py:\d+ \(_step\), so no further step"
        with pytest.raises(RuntimeError, match=message):
            finish(engine)
        monkeypatch.setattr(processes, "_gpu", False)


def test_threads_that_wait_for_one_fork_all_learn_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.engine.ranked_engines._be_rank", lambda *_: time.sleep(0.01))
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            fork = Fork(["-c"], pass_fds=())
            assert list(threads.map(fork.wait, [None, 9, None, 9])) == [0] * 4


class Writes(Cases):
    """A rank that writes to files which were open when it was forked, as a log does."""

    files: ClassVar[list[TextIOWrapper]] = []

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        for file in self.files:
            file.write("here")
            file.flush()
        parallel.least(2)


def test_a_fork_writes_to_files_and_not_to_sockets_of_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number) for number in range(9)]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("w")) for path in paths]
        monkeypatch.setattr(Writes, "files", files)
        stack.enter_context(forked_ranks())
        processes = stack.enter_context(closing(RankProcesses(2, Writes([]), "cpu")))
        assert processes.parallel.least(3) == 2
    assert [path.read_text() for path in paths] == ["here"] * 9


class Unwilling(Cases):
    """A recipe that other processes cannot read."""

    def __setstate__(self, state: object) -> None:
        raise OSError("no such thing here")


@pytest.mark.slow
def test_a_rank_that_cannot_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="rank 1 has failed: OSError: no such thing here"):
        RankProcesses(2, Unwilling([]), "cpu")


def test_what_only_the_main_module_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "__module__", "__main__")
    monkeypatch.setattr("__main__.Apart", Apart, raising=False)
    with pytest.raises(ValueError, match="put it in a module of its own"):
        RankProcesses(2, Apart([]), "cpu")
