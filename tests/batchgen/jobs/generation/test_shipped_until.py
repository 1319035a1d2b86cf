"""Rows of a shipped model that are sampled until enough are right, beside all samples of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.jobs.real_job import run
from tests.support.jobs.until_job import Row, expected, rows_of

ROWS = 10
JOB = [
    "+experiment=nano_hybrid", "sampling=sample", "sampling.temperature=1.8", "sampling.top_p=1",
    f"dataset.limit={ROWS}", "engine.device=cpu", "engine.kv_cache_gib=0.05", "output.report=false",
    "output.columns=[]",
]  # fmt: skip
MOST = 4


def _until(valid: int, most: int = MOST) -> str:
    return f"sampling.until={{where: mark == 1, valid: {valid}, most: {most}}}"


@pytest.mark.slow
def test_the_samples_are_the_first_of_a_job_with_all_of_them(tmp_path: Path) -> None:
    every, one, small = (tmp_path / name for name in ("every", "one", "small"))
    run([*JOB, f"sampling.n={MOST}", f"output.dir={every}"])
    grades = pq.read_table(every / "grades").to_pylist()
    right = {(row["row_index"], row["sample_index"]): row["mark"] == 1 for row in grades}
    assert 0 < sum(right.values()) < len(right)

    def is_right(row: Row) -> bool:
        is_it: bool = right[row["row_index"], row["sample_index"]]
        return is_it

    run([*JOB, _until(1, 3), f"output.dir={one}"])
    assert rows_of(one) == expected(rows_of(every), 1, 3, is_right)
    run([*JOB, _until(2), f"output.dir={one}"])  # it grows
    assert rows_of(one) == expected(rows_of(every), 2, MOST, is_right)
    run([*JOB, _until(2), "engine.max_num_seqs=3", "output.rows_per_shard=4",
         f"output.dir={small}"])  # fmt: skip
    assert rows_of(small) == rows_of(one)
    marks = pq.read_table(one / "grades")["mark"].to_pylist()
    assert [mark == 1 for mark in marks] == [row["valid"] for row in rows_of(one)]
