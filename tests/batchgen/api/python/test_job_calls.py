"""Jobs from Python: the same keys, the same folder, the same messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen import run_job
from batchgen.api.python.job_calls import CompleteJob, Summary
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.storage.folder.how_to_read import CARD_HEADER
from batchgen.util.errors import ConfigError
from tests.support.jobs.finished_job import finished_job
from tests.support.jobs.finished_job import row as job_row
from tests.support.jobs.real_job import ROWS


@pytest.fixture
def job(model: Path, rows: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "dataset": {"path": str(rows), "id_column": "id"},
        "prompt.user": "{{ q }}",
        "sampling": {"n": 2, "max_new_tokens": 4, "stop": "END"},
        "engine": {"device": "cpu", "kv_cache_gib": 0.01},
        "output.dir": str(tmp_path / "out"),
    }


def test_a_job_gives_its_figures_and_its_rows(job: dict[str, Any], tmp_path: Path) -> None:
    result = run_job(job)
    assert (result.exit_code, result.path) == (0, tmp_path / "out")
    assert result.summary["rows"] == 22
    assert result.summary["error_rows"] == 0
    assert result.summary["generated_tokens"] <= 88
    assert "attempts" not in result.summary
    text = str(result.summary)
    assert text.startswith("answers ") and str(tmp_path / "out") in text
    rows = result.dataset()
    assert rows.num_rows == 22
    assert rows["q"][::2] == [row["q"] for row in ROWS]
    assert repr(result) == f"CompleteJob('{tmp_path}/out', 22 answers, 0 errors, exit_code=0)"
    with pytest.raises(ConfigError, match=r"has no grades of all its rows: batchgen grade "):
        result.dataset(grades=True)
    again = run_job(job)
    assert "complete already" in str(again.summary)
    assert again.summary == result.summary


def test_rows_come_with_their_grades(tmp_path: Path) -> None:
    rows = [job_row(i, text="yes" if i % 3 else "no") | {"mark": i} for i in range(9)]
    folder = finished_job(tmp_path / "out", rows, [pa.field("mark", pa.int64())], graded=True)
    (folder / "README.md").write_text(CARD_HEADER.format(mark=tmp_path))
    result = CompleteJob(folder, 0, Summary({"rows": 9, "error_rows": 0}, ""))
    found = result.dataset(grades=True)
    assert found["grades_mark"] == [float(i % 3 > 0) for i in range(9)]
    assert found["mark"] == list(range(9)) and found["answer"][:2] == ["no", "yes"]
    assert found.column_names.count("row_id") == 1


@pytest.mark.thorough
def test_a_mistake_of_a_job_is_found_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from batchgen import run_job\n"
        "try: run_job({'dataset.path': 'no.jsonl', 'prompt.user': '{{ q }}', 'output.dir': 'x'})\n"
        "except ValueError as error: print('torch' in sys.modules, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith("False dataset.path: no.jsonl does not exist in "), done


def test_overrides_go_before_the_job(job: dict[str, Any], tmp_path: Path) -> None:
    result = run_job(job, ["sampling.n=1", "dataset.limit=3", f"output.dir={tmp_path}/other"])
    assert (result.path, result.summary["rows"]) == (tmp_path / "other", 3)


def test_error_rows_are_counted(job: dict[str, Any]) -> None:
    result = run_job({**job, "prompt.user": "{{ q if id != 'r3' else none }}"})
    assert (result.exit_code, result.summary["error_rows"]) == (3, 2)
    assert result.summary["errors"] == {"missing_field": 2}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sampling.temprature": 1}, "temperature"),
        ({"sampling.temperature": -1}, "sampling.temperature must be"),
        ({"sampling.temperature": "hot"}, "sampling.temperature must be a number, got 'hot'"),
        ({"prompt.user": "{{ nope }}"}, "no column 'nope'"),
        ({"wibble": {}}, "wibble"),
    ],
)
def test_mistakes_are_raised(job: dict[str, Any], changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_job({**job, **changed})
    assert says in str(error.value)


def test_a_job_file_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match=r"got 'job\.yaml': a job file is read by yaml"):
        run_job("job.yaml")  # type: ignore[arg-type]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_job_that_was_stopped_does_not_look_complete(
    job: dict[str, Any],
    number: signal.Signals,
    raised: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = LLMEngine.step

    def interrupted(engine: LLMEngine) -> list[RequestOutput]:
        os.kill(os.getpid(), number)
        return step(engine)

    with monkeypatch.context() as patch, pytest.raises(raised) as stopped:
        patch.setattr(LLMEngine, "step", interrupted)
        run_job(job)
    says = "run the same command to resume" if number == signal.SIGINT else str(128 + number)
    assert says in str(stopped.value)
    assert run_job(job).exit_code == 0
