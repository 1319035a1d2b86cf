"""The leaderboard of a folder of jobs: a table for each exam, the best arm first."""

from pathlib import Path
from typing import Any

import pytest

from batchgen.pages.viewer.folder_site import FolderSite
from batchgen.pages.viewer.jobs_below import jobs_below
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.viewed_page import read


def job(path: Path, right: int, **config: Any) -> None:
    rows = [row(i, text="yes" if i < right else "no") for i in range(10)]
    finished_job(path, rows, graded=True, config=config)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs"
    for seed in (1, 2):
        job(folder / f"small-{seed}", 3 + seed, sampling={"temperature": 0.5, "seed": seed})
    job(folder / "large", 9, model={"path": "large"})
    job(folder / "other", 6, prompt={"kind": "chat", "user": "So {{ question }}"})
    finished_job(folder / "bare", [row(0)])
    return folder


def test_each_exam_has_a_table_with_the_best_first(outputs: Path) -> None:
    page = read(FolderSite(outputs, "outputs"), "leaderboard")
    keys = {job.name: f"{job.key}/" for job in jobs_below(outputs).jobs}
    best = page.text.index("A  large")
    averaged = page.text.index("averaged over sampling.seed 1, 2")
    assert best < page.text.index("90.0%") < page.text.index("45.0%") < averaged
    assert page.text.index("60.0%") > averaged and "bare" not in page.text
    assert "So {{ question }}" in page.text  # which exam of this data set it is
    assert keys["large"] in page.links and keys["other"] in page.links
    assert "leaderboard" in read(FolderSite(outputs, "outputs"), "").links


@pytest.mark.thorough
def test_a_board_is_made_again_when_a_job_has_changed(outputs: Path) -> None:
    site = FolderSite(outputs, "outputs")
    assert "B  new" not in read(site, "leaderboard").text
    job(outputs / "new", 8, model={"path": "new"})
    assert "B  new" in read(site, "leaderboard").text


def test_a_damaged_job_is_named_and_takes_no_other_with_it(outputs: Path) -> None:
    next((outputs / "large" / "data").glob("*.parquet")).write_bytes(b"PAR1")
    (outputs / "other" / "config.yaml").write_text("[1, 2]")
    text = read(FolderSite(outputs, "outputs"), "leaderboard").text
    assert "has no score" in text and "damaged" in text and "45.0%" in text
    assert "config.yaml is not the configuration of a job" in text
