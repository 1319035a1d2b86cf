"""The running score in the bar: graded here, by a thread, or read of the grades of shards."""

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.jobs.generation import running_score as module
from batchgen.jobs.generation.progress import Progress
from batchgen.jobs.generation.running_score import RunningScore, running_score
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema
from tests.support.jobs.finished_job import finished_job, row

EXACT = ({"Extract": {"methods": ["whole"]}}, {"Grade": {"method": "exact"}})
PATTERN = (
    {"Extract": {"methods": ["regex"], "pattern": "([a-z]+)"}},
    {"Grade": {"method": "exact"}},
)


def config(steps: Any, *overrides: str) -> JobConfig:
    post = [f"{{{name}: {options}}}" for step in steps for name, options in step.items()]
    given = ["prompt.user='{{ q }}'", f"post=[{', '.join(post)}]", *overrides]
    return compose({}, given)


def schema() -> OutputSchema:
    return OutputSchema.build(pa.schema([("target", pa.string())]), [], [], False)


def answers(*texts: str, reason: str = "stop") -> list[FinishedRow]:
    return [
        FinishedRow(
            f"r{i}", i, 0, {"target": "yes"},
            RequestOutput(i, [1], [2, 3], text, reason),  # type: ignore[arg-type]
        )
        for i, text in enumerate(texts)
    ]  # fmt: skip


def made(given: JobConfig, folder: Path) -> RunningScore:
    found = running_score(given, schema(), folder)
    assert found is not None
    return found


def test_the_bar_has_the_score_of_the_answers_so_far(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress(4, 0, stream=stream, score=made(config(EXACT), tmp_path)) as progress:
        progress.show(0, np.zeros(1, np.int64))
        progress.add(answers("yes", "no", "yes"))
        progress.add([FinishedRow("bad", 3, 0, {})])
        progress.show(6, np.zeros(1, np.int64))
    first, second = stream.getvalue().splitlines()
    assert "so far" not in first and "score 66.7% so far" in second


@pytest.mark.parametrize(
    ("count_as", "shown"), [("as_marked", "100.0%"), ("wrong", "50.0%"), ("left_out", "100.0%")]
)
def test_cut_texts_count_as_in_the_end(tmp_path: Path, count_as: str, shown: str) -> None:
    found = made(config(EXACT, f"score.cut_texts={count_as}"), tmp_path)
    found.add(answers("yes") + answers("yes", reason="length"))
    assert found.text() == f"score {shown} so far"


def test_steps_that_need_a_process_are_graded_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.0)
    found = made(config(PATTERN), tmp_path)
    found.add(answers("yes", "no"))
    end = time.monotonic() + 60
    while not found.text() and time.monotonic() < end:
        time.sleep(0.02)
    assert found.text() == "score 50.0% so far"
    found.close()


def test_grades_of_shards_are_read_as_they_appear(tmp_path: Path) -> None:
    """Where a step reads what only the rows of a shard have, such as the scores of choices."""
    choice = ({"ChoiceScore": {"choices": ["1", "2"]}},)
    found = made(config(choice, "score.column=score"), tmp_path / "job")
    assert found.text() == ""
    scores = pa.field("choice_scores", pa.list_(pa.float64()))
    rows = [row(i, choice_scores=[0.25, 0.75]) for i in range(4)]
    job = finished_job(tmp_path / "job", rows, [scores])
    step = StepConfig(target="ChoiceScore", options={"choices": ["1", "2"]})
    JobGrades(job).make([step], "text", config(choice).score)
    found.add(answers("1"))  # of no use here
    again = made(config(choice, "score.column=score"), job)
    assert again.text() == "score 1.75 so far"


def test_a_job_that_does_not_grade_has_none(tmp_path: Path) -> None:
    assert running_score(config(()), schema(), tmp_path) is None
    assert running_score(config(EXACT, "score.column=num_forwards"), schema(), tmp_path) is None


def test_grading_for_the_bar_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SHARE", 0.0)
    found = made(config(EXACT), tmp_path)
    found.add(answers("yes"))
    found.add(answers("no", "no"))
    assert found.text() == "score 100.0% so far"
