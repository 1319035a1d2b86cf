"""A small run of each form of tests/support/kills: jobs, pipelines and grading killed at random."""

from pathlib import Path

import pytest

from tests.support.kills.check_kills import main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "form",
    [
        "--engine null --kills 12 --rows 600 --workers 3 --grade integer",
        "--engine null --kills 8 --rows 400 --workers 2 --store s3",
        "--kills 5 --rows 120 --workers 2 --launcher",
        "--pipeline --kills 8 --rows 120 --workers 2",
        "--pipeline --kills 6 --rows 80 --workers 1 --change judge.sampling.seed=1",
        "--only-grading regex --kills 4 --rows 3000",
    ],
)
def test_nothing_is_lost_or_done_twice(tmp_path: Path, form: str) -> None:
    main(["--work", str(tmp_path / "work"), "--seed", "1", *form.split()])
