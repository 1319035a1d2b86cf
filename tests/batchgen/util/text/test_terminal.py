"""What strangers write is read on a terminal, and never obeyed; CSV may go to a spreadsheet."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from batchgen.__main__ import run_command
from batchgen.util.hidden import HIDDEN
from batchgen.util.text.terminal import SafeTerminal, guard_terminal
from tests.support.jobs.finished_job import finished_job, row

EVIL = "\x1b]0;title\x07\x9b2J\u202etxt\u2066\r\b\x1b[31m"
SHOWN = "⟨U+001B⟩]0;title⟨U+0007⟩⟨U+009B⟩2J⟨U+202E⟩txt"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Where the command prints from now on, to both of its streams."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A graded job whose ids, columns, texts, errors, configuration and name are hostile."""
    monkeypatch.chdir(tmp_path)
    rows = [
        row(0, text=f"a {EVIL}", row_id=f"id {EVIL}") | {f"c {EVIL}": f"v {EVIL}"},
        row(1, text=None, error={"type": f"t {EVIL}", "message": f"m {EVIL}"}),
    ]
    metrics = {"error_rows": 1, "errors": {f"t {EVIL}": 1}, "finish_reasons": {f"f {EVIL}": 2}}
    return finished_job(
        tmp_path / f"out{EVIL}",
        rows,
        [pa.field(f"c {EVIL}", pa.string(), metadata={"meaning": "as in the input"})],
        graded=True,
        metrics=metrics,
        config={"model": {"path": EVIL, "name": EVIL}, "prompt": {"kind": "chat", "user": EVIL}},
    )


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "OUT"], ["show", "OUT", "--row", f"id {EVIL}"], ["show", "OUT", "--row", "id"],
        ["show", "OUT", "--errors"], ["show", "OUT", "--json"], ["show", "OUT", "--columns", "no"],
        ["export", "OUT"], ["export", "OUT", "--format", "csv"], ["export", "OUT", "--format=txt"],
        ["score", "OUT"], ["score", "OUT", f"score.subset=c {EVIL}"], ["compare", "OUT", "OUT"],
        ["report", "OUT"], ["grade", "OUT"], ["validate", "OUT"],
        ["show", f"no{EVIL}"], [f"no{EVIL}"], [f"model.path={EVIL}", "--dry-run"],
        [f"{EVIL}.yaml"], ["--cfg", "job", f"prompt.system={EVIL}"], [f"--{EVIL}"],
    ],
)  # fmt: skip
def test_no_verb_prints_what_a_terminal_obeys(
    job: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    screen = terminal(monkeypatch)
    run_command([job.name if argument == "OUT" else argument for argument in arguments])
    shown = screen.getvalue()
    assert shown and not HIDDEN.search(shown)


def test_rows_are_readable(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    assert run_command(["show", job.name]) == 0
    assert f"row id {SHOWN}" in screen.getvalue()


@given(st.lists(st.text(), max_size=5), st.booleans())
def test_nothing_gets_through(texts: list[str], bars: bool) -> None:
    screen = Terminal()
    stream = SafeTerminal(screen, bars=bars)
    for text in texts:
        assert stream.write(text) == len(text)
    stream.writelines(texts)
    returns = 2 * sum(text.startswith("\r") for text in texts) if bars else 0
    assert screen.getvalue().count("\r") == returns
    assert not HIDDEN.search(screen.getvalue().replace("\r", ""))


def test_bars_still_move(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    guard_terminal()
    guard_terminal()
    with tqdm(total=3, desc="x", file=sys.stderr, mininterval=0) as bar:
        bar.update(2)
        tqdm.write(f"beside {EVIL}", file=sys.stderr)
    shown = screen.getvalue()
    assert shown.startswith("\rx:   0%") and f"beside {SHOWN}" in shown
    assert "U+000D" not in shown.replace(f"{SHOWN}⟨U+2066⟩⟨U+000D⟩", "") and "\x1b" not in shown


def test_where_no_terminal_is_texts_stay(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["export", job.name, "--columns", "text", "--format", "csv"]) == 0
    assert EVIL in capsys.readouterr().out


def test_formulas_are_quoted_where_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", " =1", "\t=1", "\r", "＝1", "1-1", "a=b"]
    out = finished_job(tmp_path / "out", [row(i, text=text) for i, text in enumerate(texts)])
    command = ["export", str(out), "--columns", "text,num_generated_tokens", "--format", "csv"]
    assert run_command(command) == 0
    plain = [*csv.reader(io.StringIO(capsys.readouterr().out, newline=""))]
    assert [cells[0] for cells in plain] == ["text", *texts]
    assert run_command([*command, "--quote-formulas"]) == 0
    quoted = [*csv.reader(io.StringIO(capsys.readouterr().out, newline=""))]
    assert [cells[0] for cells in quoted] == ["text", *(f"'{t}" for t in texts[:8]), *texts[8:]]
    assert [cells[1] for cells in quoted] == [cells[1] for cells in plain]
    assert run_command(["export", str(out), "--quote-formulas"]) == 2
    assert "the format is jsonl" in capsys.readouterr().err
