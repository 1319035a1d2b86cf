"""What people see of the images of rows: pages, the terminal, plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.__main__ import run_command
from batchgen.evals.scores.asked_prompts import JobExam
from batchgen.evals.scores.graded_folder import GradedJob
from batchgen.inputs.images.thumbnails import Thumbnails, read_thumbnails
from batchgen.pages.report.write_report import report_html
from batchgen.pages.viewer.job_view import JobView
from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs.image_job import arguments, picture, run

EVIL = "<script>alert(1)</script>.png"


@pytest.fixture(scope="module")
def job(vl_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of three rows: an image with a name for a stranger, two images, none."""
    folder = tmp_path_factory.mktemp("job")
    images = [
        [{"bytes": picture(320, 160), "path": EVIL}],
        [{"bytes": picture(64, 64, seed=i), "path": None} for i in (1, 2)],
        [],
    ]
    table = pa.table({"question": ["One?", "Two?", "None?"], "images": images})
    pq.write_table(table, folder / "rows.parquet")
    more = ["output.report=true", "prompt.max_pixels=65536"]
    run(arguments(vl_model, folder / "rows.parquet", folder / "out", *more))
    return folder / "out"


def test_the_report_has_small_pictures(job: Path) -> None:
    page = (job / "report.html").read_text()
    assert page.count('<img alt="" src="data:image/jpeg;base64,/9j/') == 3
    assert EVIL not in page and "&lt;script&gt;alert(1)" in page
    assert len(page.encode()) < 5_000_000
    thumbnails = read_thumbnails(job)
    assert len(thumbnails) == 3 and all(len(text) < 16_384 for text in thumbnails.values())


def test_a_page_of_the_viewer_has_them(job: Path) -> None:
    view = JobView(JobFolderReader(job), "out")
    page = view.page(tokens=False)
    texts = [page.html(facts, key="a") for i in range(3) for facts in view.row(i, tokens=False)]
    assert [text.count("<img") for text in texts] == [1, 2, 0]
    assert "64×64, 4 tokens" in texts[1] and EVIL not in texts[0]


def test_show_prints_path_size_and_digest(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", str(job)]) == 0
    said = capsys.readouterr().out
    (first, *_) = JobFolderReader(job).rows(["prompt_images"])
    image = first["prompt_images"][0]
    assert f"{EVIL}: 320×160, 50 tokens, {image['digest'][:12]}" in said
    assert said.count("64×64, 4 tokens") == 2


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", json.dumps({"0" * 32: "PHN2Zz4="}), json.dumps({"0" * 32: 7}),
        json.dumps({'"><script>': "/9j/AA"}), json.dumps({"0" * 32: '/9j/"><script>'}),
        json.dumps({"0" * 32: "/9j/" + "A" * 20_000}),
    ],
)  # fmt: skip
def test_pictures_of_strangers_are_jpeg_files_or_nothing(
    content: str, job: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(job, out)
    for file in (out / "thumbnails").iterdir():
        file.unlink()
    (out / "thumbnails" / "00001.json").write_text(content)
    assert read_thumbnails(out) == {}
    if content == "{":
        assert "<img" not in report_html(JobFolderReader(out))
    (out / "thumbnails" / "00002.json").symlink_to(job / "thumbnails" / "00001.json")
    assert read_thumbnails(out) == {}


def test_a_worker_keeps_a_bounded_number(monkeypatch: pytest.MonkeyPatch, job: Path) -> None:
    from batchgen.inputs.images import thumbnails
    from batchgen.storage.stores.folder_storage import FolderStorage

    monkeypatch.setattr(thumbnails, "MOST_BYTES", 4000)
    found = Thumbnails()
    for i in range(20):
        import numpy as np

        found.add(f"{i:032x}", np.zeros((64, 64, 3), np.uint8))
    found.save(FolderStorage(job), 7)
    kept = json.loads((job / "thumbnails" / "00007.json").read_text())
    assert 1 <= len(kept) < 20 and f"{0:032x}" in kept
    (job / "thumbnails" / "00007.json").unlink()


def test_plans_count_the_tokens_of_images(
    vl_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the headers: one of the files has nothing behind it."""
    images = [picture(64, 64), picture(128, 96)[:100]]
    table = pa.table({"question": ["a", "b"], "image": images})
    pq.write_table(table, tmp_path / "rows.parquet")
    given = arguments(vl_model, tmp_path / "rows.parquet", tmp_path / "out")
    assert run_command([*given, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "<|image_pad|> × 12<" in said and "images have" in said
    assert run_command(["plan", *given, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    text = len("<user\n<>a<\n<assistant\n")  # < and > are special tokens
    assert plan["prompt_tokens"]["sum"] == 2 * text + 4 + 12


def test_two_jobs_with_other_pictures_asked_other_things(
    vl_model: Path, job: Path, tmp_path: Path
) -> None:
    table = pq.read_table(job.parent / "rows.parquet")
    images = table["images"].to_pylist()
    images[1][0]["bytes"] = picture(64, 64, seed=5)
    changed = table.set_column(1, "images", pa.array(images, table.schema.field("images").type))
    pq.write_table(changed, tmp_path / "rows.parquet")
    run(arguments(vl_model, tmp_path / "rows.parquet", tmp_path / "out"))
    one, other = (JobExam(GradedJob(str(at), "compare")).rendered for at in (job, tmp_path / "out"))
    assert [one[key] == other[key] for key in sorted(one)] == [True, False, True]
