"""What a job shows while it runs, and the summary at its end."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.jobs.generation import progress as module
from batchgen.jobs.generation.progress import Progress, _Speed
from batchgen.storage.shards.output_schema import FinishedRow
from batchgen.util.duration import duration
from tests.support.jobs.fake_job import FakeJob


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def answered(name: str, text: str = "Four.", prompt: int = 3, sample: int = 0) -> FinishedRow:
    output = RequestOutput(name, [7] * prompt, [1, 2], text, "stop", stop="</s>")
    return FinishedRow(name, 0, sample, {}, output=output)


def failed(name: str, type: str, message: str, *, in_engine: bool = False) -> FinishedRow:
    error = RequestError(type, message)
    if not in_engine:
        return FinishedRow(name, 0, 0, {}, error=error)
    output = RequestOutput(name, [7], [], "", "error", error=error)
    return FinishedRow(name, 0, 0, {}, output=output)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.4, "59.4 s"),
        (119.7, "0:02:00"),
        (3599.6, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_durations_carry_over(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_speed_is_that_of_the_last_seconds() -> None:
    speed = _Speed(100.0)
    assert speed.at(102.0, 100) == 50
    assert speed.at(110.0, 100) == 10
    assert speed.at(112.0, 300) == 20  # since 102, when there were 100
    assert speed.at(150.0, 300) == 0  # nothing came since 112


def test_a_line_has_rows_speed_running_errors_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("batchgen.jobs.generation.progress.time.monotonic", lambda: now)
    stream = io.StringIO()
    with Progress(1200, 200, stream=stream) as progress:
        now += 29
        progress.add([answered("a")] * 98 + [failed("b", "empty_prompt", "it is empty")] * 2)
        assert not progress.due()
        now += 1
        assert progress.due()
        progress.show(600, np.zeros(48, np.int64))  # 900 rows of 2 tokens are left
        assert not progress.due()
    assert stream.getvalue() == (
        "first empty_prompt, row b: it is empty\n"
        "300/1,200 answers, 20 tok/s, 48 running, 2 errors, 0:01:30 left\n"
    )


def test_a_job_of_unknown_length_has_no_time_left() -> None:
    stream = io.StringIO()
    with Progress(None, 0, stream=stream) as progress:
        progress.add([answered("a")])
        progress.show(0, np.zeros(1, np.int64))
    assert stream.getvalue() == "1 answers, 0 tok/s, 1 running\n"


def test_each_type_of_error_is_shown_once_wherever_it_comes_from() -> None:
    stream = io.StringIO()
    with Progress(9, 0, stream=stream) as progress:
        progress.add([failed("a", "empty_prompt", "one\nline"), failed("b", "empty_prompt", "two")])
        progress.add([failed("c", "bad_logits", "NaN", in_engine=True)])
        progress.show(0, np.zeros(0, np.int64))
    first, second, line = stream.getvalue().splitlines()
    assert first == "first empty_prompt, row a: one line"
    assert second == "first bad_logits, row c: NaN"
    assert line.endswith(", 3 errors")


def test_a_terminal_has_a_bar_with_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "20")
    stream = Terminal()
    with Progress(1000, 0, stream=stream) as progress:
        progress.add([failed("a", "empty_prompt", "it is empty")])
        progress.add([answered("b")] * 249)
        progress.show(5000, np.zeros(48, np.int64))
        shown = stream.getvalue()
    assert "\rfirst empty_prompt, row a: it is empty\n" in shown
    bar = shown.rsplit("\r", 1)[1]
    assert bar.startswith(" 25%|") and "| 250/1,000 answers, " in bar
    assert " tok/s, 48 running, 1 error, " in bar and bar.endswith(" left")
    assert "250/1,000 answers, 1 error, in 0." in stream.getvalue().rsplit("\r", 1)[1]


def test_a_bar_without_a_total_counts() -> None:
    stream = Terminal()
    with Progress(None, 5, stream=stream, resumed_errors=1) as progress:
        progress.add([answered("b")])
        progress.show(5, np.zeros(2, np.int64))
    assert "6 answers, " in stream.getvalue() and "%" not in stream.getvalue()
    assert "2 running, 1 error" in stream.getvalue()


def test_every_few_seconds_one_finished_answer_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("batchgen.jobs.generation.progress.time.monotonic", lambda: now)
    stream = io.StringIO()
    decoded: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        decoded.append(ids)
        return "What is  2 + 2?\nanswer:\n"

    with Progress(9, 0, 30.0, decode, stream) as progress:
        progress.add([answered("early")])
        now += 31
        progress.add([failed("a", "empty_prompt", "empty")])
        progress.add([answered("b", "It is\n\x1b[2J four. " + "z" * 300, 99, 2), answered("c")])
        progress.add([answered("d")])
    shown = stream.getvalue().splitlines()[1:]
    assert shown[:2] == ["row b, sample 2, stop, 2 tokens:", "  What is 2 + 2? answer:"]
    assert shown[2].startswith("  → It is ⟨U+001B⟩[2J four. zzz") and shown[2].endswith("z…")
    assert len(shown) == 3 and len(shown[2]) == 4 + 200
    assert [len(ids) for ids in decoded] == [64]


@pytest.mark.parametrize("every", [0.0, 1e-9])
def test_a_job_shows_answers_unless_it_is_told_not_to(
    every: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeJob(str(tmp_path / "out"), rows=20, show=every).run()
    assert ("\n  → " in capsys.readouterr().err) == (every > 0)


def test_a_job_says_how_many_rows_really_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not how many requests wait in the window, which is twice as large."""
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    FakeJob(str(tmp_path / "out"), rows=40, max_num_seqs=4).run()
    lines = [line for line in capsys.readouterr().err.splitlines() if " tok/s, " in line]
    running = [int(line.split(" tok/s, ")[1].split(" running")[0]) for line in lines]
    assert max(running) == 4


def test_the_errors_of_other_workers_count() -> None:
    stream = io.StringIO()
    attempt = {"rows": 3, "generated_tokens": 6, "generate_s": 1.0}
    beat = {"worker": 2, "dead": False, "attempt": attempt, "totals": {"error_rows": 2}}
    starting = {"worker": 3, "dead": False}
    with Progress(10, 0, stream=stream) as progress:
        progress.add([failed("a", "bad", "no prompt")])
        progress.set_others([beat, starting], number=1)
        progress.show(2, np.zeros(0, np.int64))
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("4/10 answers, ") and ", 3 workers, 3 errors, " in line
