"""Whether two jobs asked the same."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.evals.scores.asked_prompts import JobExam, exam_differences
from batchgen.evals.scores.graded_folder import GradedJob
from tests.support.jobs.finished_job import finished_job, row

IMAGES = pa.field("prompt_images", pa.list_(pa.struct([("digest", pa.string())])))


def exam(path: Path, *fields: pa.Field, prompt: dict[str, Any], **values: Any) -> JobExam:
    """The exam of a job of one row of a known data set."""
    prompt = {"kind": "chat", "user": "Q: {{ question }}", **prompt}
    finished_job(path, [row(0, **values)], fields, graded=True, config={"prompt": prompt})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["fingerprints"]["dataset"] = "one"
    (path / "manifest.json").write_text(json.dumps(manifest))
    return JobExam(GradedJob(str(path), "compare"))


def test_a_job_with_images_and_one_without_asked_other_things_in_either_order(
    tmp_path: Path,
) -> None:
    plain = exam(tmp_path / "plain", prompt={})
    images = [{"digest": "ab"}]
    shown = exam(tmp_path / "shown", IMAGES, prompt={"image_column": "image"}, prompt_images=images)
    assert exam_differences(plain, plain) == ()
    assert exam_differences(shown, plain)
    assert exam_differences(plain, shown)


def test_other_images_of_prompts_that_cannot_be_rendered_are_other_prompts(tmp_path: Path) -> None:
    lacks = {"user": "{{ question }} {{ absent }}"}  # the jobs have no copy of `absent`
    one, other = (
        exam(tmp_path / name, prompt={**lacks, "images": [f"{name}.png"]}) for name in ("a", "b")
    )
    assert exam_differences(one, one) == ()
    assert exam_differences(one, other)
