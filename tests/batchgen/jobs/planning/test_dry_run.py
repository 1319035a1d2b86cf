"""How `--dry-run` shows prompts, and that it leaves everything as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from batchgen.__main__ import run_command
from batchgen.jobs.planning.outline_text import LONGEST_PROMPT, shown_prompt
from tests.support.jobs.real_job import contents, overrides


def shown(model: Path, text: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return shown_prompt(tokenizer.encode(text), tokenizer)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb", "│ a\n│ b"),
        ("a\\nb", "│ a\\nb"),
        ("a\n", "│ a\n│ "),
        ("\ta \r\n", "│ ␉a ␍\n│ "),
        ("a  \n b", "│ a··\n│  b"),
        ("\x1b[2J\x7f\u202e", "│ ␛[2J␡<U+202E>"),
        ("日本<eos>", "│ 日本<eos>"),
    ],
)
def test_every_character_is_seen(model: Path, text: str, lines: str) -> None:
    assert shown(model, text) == lines


def test_of_a_long_prompt_the_ends_are_shown(model: Path) -> None:
    text = "a" * 3000 + "\n" + "b" * 3000
    half = LONGEST_PROMPT // 2
    assert shown(model, text) == f"│ {'a' * half}\n⋮ 4,001 characters more\n│ {'b' * half}"


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert shown_prompt([1, 2, 3], None) == "│ 1 2 3"
    assert shown_prompt([7] * 1000, None) == "│ " + "7 " * 200 + "…"


def test_nothing_is_written(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(model, rows, tmp_path / "deep/out")
    assert run_command([*arguments, "launcher.workers=2", "--dry-run"]) == 0
    assert not (tmp_path / "deep").exists()
    assert "\nlauncher     local: 2 workers\n" in capsys.readouterr().out
    assert run_command(arguments) == 0
    before = contents(tmp_path / "deep")
    assert run_command([*arguments, "--dry-run"]) == 0
    assert contents(tmp_path / "deep") == before
    assert "resumes, 22 of 22 answers are there" in capsys.readouterr().out


def test_no_file_of_weights_is_read(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.safetensors").write_bytes(b"damaged")
    assert run_command([*overrides(copy, rows, tmp_path / "out"), "--dry-run"]) == 0
    assert "row 2 (r2)" in capsys.readouterr().out
