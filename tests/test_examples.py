"""Each job of examples/ runs as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen import JobFolderReader
from batchgen.__main__ import run_command

ROOT = Path(__file__).parents[1]
JOBS = {
    "block_diffusion": (8, ["logprobs", "step_map"]),
    "chat": (4, ["logprobs"]),
    "graded_samples": (32, []),
    "json_schema": (3, ["parsed"]),
    "speculation": (8, ["draft_accepted", "step_map", "routed_experts"]),
}


def test_every_example_has_a_test_and_a_line_in_the_readme() -> None:
    jobs = {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    readme = (ROOT / "examples" / "README.md").read_text()
    assert jobs == set(JOBS)
    assert all(f"    batchgen examples/{name}.yaml\n" in readme for name in jobs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["block_diffusion", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(JOBS)[1:])],
)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = JOBS[name]
    monkeypatch.chdir(ROOT)
    options = [f"output.dir={tmp_path}", "engine.device=cpu", "engine.kv_cache_gib=0.5"]
    assert run_command([f"examples/{name}.yaml", *options]) == 0
    job = JobFolderReader(tmp_path)
    found = list(job.rows())
    assert len(found) == rows
    assert all(row["error"] is None and row["text"] and set(columns) <= set(row) for row in found)
    if name == "graded_samples":
        assert job.metrics["score"]
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = {*job.metrics, *job.metrics["attempts"][0], *job.metrics.get("score", ())}
    assert [key for key in named if f"`{key}`" not in page and key[-1] not in "124"] == []
    page = (ROOT / "docs" / "reference" / "output.md").read_text()
    inputs = {"id", "kind", "question", "target", "topic", "passage"}
    assert [column for column in {*found[0]} - inputs if f"`{column}`" not in page] == []


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert "16 answers" in capsys.readouterr().out
