"""Selects and pools the samples of arms, for `job_arms.py`.

An *arm* is one line of a comparison: several jobs that differ only in their seed, or the rows with
one value of a column. The tables are those of `evals/scores/marks.py`: a line for each sample of a
question, with its `row_id`, `sample_index` and mark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

if TYPE_CHECKING:
    import pyarrow as pa

# The most arms that the values of a column may make.
_MOST_VALUES = 200


def pooled_samples(tables: Sequence[pa.Table]) -> pa.Table:
    """Pool the samples of several jobs into one table: the questions of all jobs, each with all its
    answers.

    The `sample_index` of each job is moved behind those of the jobs before it: two jobs with 4
    samples have 0 to 3 and 4 to 7. The metadata STARTS lists where each job starts, here [0, 4].
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from batchgen.evals.scores.marks import STARTS

    moved: list[pa.Table] = []
    starts: list[int] = []
    start = 0
    for table in tables:
        starts.append(start)
        position = table.column_names.index("sample_index")
        index = pc.add(table["sample_index"], start)
        moved.append(table.set_column(position, "sample_index", index))
        start += 1 + int(pc.max(table["sample_index"]).as_py() or 0)
    metadata = tables[0].schema.metadata
    if metadata is not None:  # the rule of `sampling.until`, which ended the rows of each job
        metadata = {**metadata, STARTS: json.dumps(starts).encode()}
    return pa.concat_tables(moved).replace_schema_metadata(metadata)


def arm_values_of(table: pa.Table, by: str) -> list[str | None]:
    """The values of a column, each of which makes an arm.

    Raises:
        ConfigError: there are too many values.
    """
    values: list[str | None] = table[by].unique().to_pylist()
    if len(values) > _MOST_VALUES:
        raise ConfigError(
            f"--by {by}: the column has {len(values):,} values, such as "
            f"{some_names([str(value) for value in values])}, and each would be an arm: name a "
            f"column with at most {_MOST_VALUES} values"
        )
    return values


def samples_with(table: pa.Table, by: str, value: str | None) -> pa.Table:
    """The samples that have this value in a column."""
    import pyarrow.compute as pc

    column = table[by]
    return table.filter(pc.is_null(column) if value is None else pc.equal(column, value))
