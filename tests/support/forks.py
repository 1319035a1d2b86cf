"""Tests in forks of the process that collected them: `--forks 2`.

A worker of pytest-xdist collects the tests itself: it imports all that they import, and makes all
of them, which takes half a minute of CPU. A fork has them. With a GPU, whose driver works in no
fork, one process runs all tests, or pytest-xdist's do (`-n 2`).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any
from warnings import WarningMessage

import pytest
from _pytest.capture import CaptureManager

RUN = 100  # tests of one module that a fork takes at once, as they share what the module prepares


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=1, help="processes that run tests, as forks")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not _divides(session):
        return None
    capture = _capture(session.config)
    capture.stop_global_capturing()  # forks would share the files that it writes to
    forks = {}
    try:
        queue = _queue(len(_runs(session.items)))
        for number in range(session.config.option.forks):
            fork = _Fork(session, queue, number)
            forks[fork.reports] = fork
        os.close(queue)
        _start(capture)
        while forks:
            for reports in wait(forks):
                assert isinstance(reports, Connection)
                if not forks[reports].pass_on():
                    del forks[reports]
    finally:
        for fork in forks.values():
            fork.process.terminate()
    return True


def _capture(config: pytest.Config) -> CaptureManager:
    capture = config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    return capture


def _start(capture: CaptureManager) -> None:
    """Let it capture what tests write, and nothing between them."""
    capture.start_global_capturing()
    capture.suspend_global_capture()


def _divides(session: pytest.Session) -> bool:
    options = session.config.option
    xdist = getattr(options, "numprocesses", None) or "PYTEST_XDIST_WORKER" in os.environ
    if options.forks < 2 or options.collectonly or session.testsfailed or xdist:
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_available()


def _runs(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests that are beside each other in one module."""
    modules = [list(module) for _, module in itertools.groupby(items, lambda item: item.path)]
    return [tests[at : at + RUN] for tests in modules for at in range(0, len(tests), RUN)]


def _queue(count: int) -> int:
    """A pipe with the numbers below count, from which each fork reads the next that it takes."""
    source, sink = os.pipe()
    os.write(sink, b"".join(number.to_bytes(4) for number in range(count)))
    os.close(sink)
    return source


class _Fork:
    """A process that runs tests, and what it reports to the process that collected them."""

    def __init__(self, session: pytest.Session, queue: int, number: int) -> None:
        self._session, self._begun = session, "no test"
        self.reports, sink = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(
            target=with_room, args=(_work, session, queue, sink, number)
        )
        self.process.start()
        sink.close()

    def pass_on(self) -> bool:
        """Pass what happened to the plug-ins of this process; returns whether the fork goes on.

        Raises:
            pytest.Session.Failed: it died, or `--exitfirst` ends the run.
        """
        session = self._session
        try:
            message = self.reports.recv()
        except EOFError:
            self.process.join()
            ended = f"{self._begun} ended its process with {self.process.exitcode}"
            session.shouldfail = ended
            raise session.Failed(ended) from None
        if message is None:
            self.process.join()
            return False
        hook, values = message
        if hook == "pytest_runtest_logstart":
            self._begun = values["nodeid"]
        elif hook == "pytest_runtest_logreport":
            values["report"] = session.config.hook.pytest_report_from_serializable(
                config=session.config, data=values["report"]
            )
        caller = getattr(session.config.hook, hook)
        if caller.is_historic():
            caller.call_historic(kwargs=values)
        else:
            caller(**values)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True


class _Reporter:
    """A plug-in of the fork that sends what happens."""

    def __init__(self, config: pytest.Config, sink: Connection) -> None:
        self._config, self._sink = config, sink

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._sink.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._sink.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sink.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_warning_recorded(
        self, warning_message: WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if when != "runtest":
            return  # the process that collected the tests has seen it
        plain = WarningMessage(
            str(warning_message.message),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        values = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._sink.send(("pytest_warning_recorded", values))


def _work(session: pytest.Session, queue: int, sink: Connection, number: int) -> None:
    config = session.config
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.mktemp(f"fork{number}", numbered=False)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Reporter(config, sink))
    capture = _capture(config)
    _start(capture)
    try:
        tests = _taken(queue, _runs(session.items))
        test = next(tests, None)
        while test is not None:
            following = next(tests, None)
            config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            test = following
        sink.send(None)
    finally:
        capture.stop_global_capturing()


def with_room(function: Callable[..., None], *arguments: Any) -> None:
    """Call it with room for the frames of all calls that it makes.

    Python keeps frames in pieces of memory of 16 KiB, or of what a frame needs, and frees a piece
    when the calls in it end: a loop whose calls need the next piece gets and frees one in each of
    its rounds, which can take longer than what it computes. The frame of this call says that it
    needs 8 MiB. It gets 16 MiB, whose other half is for the calls below it.
    """
    function(*arguments)


with_room.__code__ = with_room.__code__.replace(co_stacksize=1 << 20)


def _taken(queue: int, runs: Sequence[Sequence[pytest.Item]]) -> Iterator[pytest.Item]:
    while number := os.read(queue, 4):
        yield from runs[int.from_bytes(number)]
