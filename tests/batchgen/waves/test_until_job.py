"""Jobs with `sampling.until`: the same samples whatever runs when, and no more than are needed."""

from pathlib import Path

from until_job import UntilJob, every_sample, expected, rows_of


def test_rows_have_the_samples_up_to_the_last_valid_one(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=40)
    assert job.run().exit_code == 3  # rows without a prompt
    every = every_sample(job, tmp_path / "every")
    assert rows_of(job.out) == expected(every, 2, 6)
