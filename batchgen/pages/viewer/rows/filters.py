"""The filters of the row list of `batchgen view`. `SampleFilter` turns the keys of a URL into
conditions on samples.

R is the number of samples in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pages.rows.grade_columns import ANSWER_KEY, GRADE_ERROR, MARK
from batchgen.pages.rows.job_rows import starts
from batchgen.util.errors import ConfigError

Bools = npt.NDArray[np.bool_]
Condition = tuple[tuple[str, ...], Callable[[pa.Table], Bools]]
"""The columns that a condition reads, and a function that says which samples [R] of a table meet
it. The table has all samples of each of its rows."""

MARKS = {
    "right": "right",
    "partly": "between right and wrong",
    "wrong": "wrong answer",
    "no_answer": "no answer found",
    "grade_error": "could not be graded",
    "ungraded": "not graded",
}
"""The values of the filter `mark`, with their labels."""
REASONS = ("stop", "length", "tool_call", "no_answer", "constraint_conflict", "error")
TEXT_TYPES = (pa.string(), pa.large_string())
LONGEST = 1000
"""The most characters that a text to search for may have."""


@dataclass(frozen=True)
class SampleFilter:
    """The conditions under which a sample is listed; empty values allow anything."""

    text: str = ""  # a text that `column` must contain, ignoring case
    column: str = ""  # a text column; empty for the generated text
    mark: str = ""  # one of MARKS
    reason: str = ""  # one of REASONS
    error: str = ""  # the type of the row's error
    least: str = ""  # the minimum of generated tokens
    most: str = ""  # the maximum of generated tokens
    disagree: str = ""
    """`yes` for rows whose samples disagree: in their answers, or in their marks if the job has no
    answers, or in their texts if it has no marks either."""
    subset: str = ""  # the value of `subset_column`, as text
    subset_column: str = ""  # from the job's configuration; not a key of a URL

    def __post_init__(self) -> None:
        for name, allowed in (("mark", MARKS), ("reason", REASONS), ("disagree", ("yes",))):
            value = asdict(self)[name]
            if value and value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        for name, value in (("least", self.least), ("most", self.most)):
            if value and not (value.isascii() and value.isdecimal() and len(value) < 10):
                raise ConfigError(f"{name} must be a number of tokens, got {value[:80]!r}")
        if len(self.text) > LONGEST:
            raise ConfigError(f"text must have at most {LONGEST:,} characters")

    @classmethod
    def of(cls, query: Mapping[str, str], subset_column: str = "") -> SampleFilter:
        """Read the filter from the query of a URL.

        Raises:
            ConfigError: a key has a value that is not allowed.
        """
        names = {field.name for field in fields(cls)} - {"subset_column"}
        values = {key: value for key, value in query.items() if key in names}
        return cls(**values, subset_column=subset_column)

    @property
    def query(self) -> dict[str, str]:
        """The keys of a URL that describe the filter."""
        values = asdict(self).items()
        return {key: value for key, value in values if value and key != "subset_column"}

    def __bool__(self) -> bool:
        """Whether any condition is set; `column` alone is none."""
        return any(value for key, value in self.query.items() if key != "column")

    def columns(self, schema: pa.Schema, text_column: str) -> list[str]:
        """Return the columns that `matches` reads.

        Args:
            schema: the schema of the rows with their grades.
            text_column: the column of the generated texts.

        Raises:
            ConfigError: `column` is not a text column, or the job lacks the grades or subsets to
                filter by.
        """
        column = self.column or text_column
        if self.text and column not in text_columns(schema):
            raise ConfigError(f"there is no text column {column!r}")
        if self.mark and not any(name in schema.names for name in (MARK, GRADE_ERROR)):
            raise ConfigError("this job has no grades: mark needs some")
        if self.subset and self.subset_column not in schema.names:
            raise ConfigError("this job has no subsets: score.subset names a column of them")
        needed = (names for names, _ in self._conditions(schema.names, text_column))
        columns = dict.fromkeys(name for names in needed for name in names)
        return [name for name in columns if name in schema.names]

    def matches(self, table: pa.Table, text_column: str) -> Bools:
        """Return which samples of a table match the filter [R].

        Args:
            table: has the columns of `columns`, and all samples of each of its rows.
        """
        matches = np.ones(table.num_rows, np.bool_)
        for _, holds in self._conditions(table.column_names, text_column):
            if matches.any():
                matches &= holds(table)
        return matches

    def _conditions(self, names: Collection[str], text_column: str) -> Iterator[Condition]:
        """Yield the conditions that are set, the slowest to check last.

        Args:
            names: the columns of the table.
        """
        if self.reason:
            yield ("finish_reason",), lambda t: _bools(pc.equal(t["finish_reason"], self.reason))
        if self.error:
            yield ("error",), lambda t: _bools(pc.equal(_error_type(t), self.error))
        for bound, compare in ((self.least, pc.greater_equal), (self.most, pc.less_equal)):
            if bound:
                yield (_TOKENS,), partial(_compared, compare=compare, bound=int(bound))
        if self.mark:
            yield (MARK, ANSWER_KEY, GRADE_ERROR, "finish_reason"), lambda t: marks(t) == self.mark
        if self.subset:
            yield (
                (self.subset_column,),
                lambda t: _bools(pc.equal(_texts(t[self.subset_column]), self.subset)),
            )
        if self.disagree:
            answer = next(n for n in (ANSWER_KEY, MARK, text_column) if n in names)
            yield (answer,), partial(_disagreeing, name=answer)
        if self.text:
            column = self.column or text_column
            yield (
                (column,),
                lambda t: _bools(pc.match_substring(t[column], self.text, ignore_case=True)),
            )


_TOKENS = "num_generated_tokens"


def text_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the text columns."""
    return [field.name for field in schema if field.type in TEXT_TYPES]


def marks(table: pa.Table) -> npt.NDArray[np.str_]:
    """Return the key of MARKS that applies to each sample [R], by its finish reason and grades. The
    key is empty for error rows."""
    num_samples, names = table.num_rows, table.column_names
    keys = np.full(num_samples, "ungraded", dtype="<U11")
    if MARK in names:
        mark = pc.fill_null(table[MARK], np.nan).to_numpy()
        keys[mark == 1] = "right"
        keys[(mark > 0) & (mark < 1)] = "partly"
        keys[mark == 0] = "wrong"
        if ANSWER_KEY in names:
            keys[np.asarray(pc.is_null(table[ANSWER_KEY])) & (mark == 0)] = "no_answer"
    if GRADE_ERROR in names:
        keys[np.asarray(pc.is_valid(table[GRADE_ERROR]))] = "grade_error"
    keys[_bools(pc.equal(table["finish_reason"], "error"))] = ""
    return keys


def _compared(table: pa.Table, compare: Callable[..., pa.ChunkedArray], bound: int) -> Bools:
    """Return which samples have a number of tokens within a bound [R]."""
    return _bools(compare(table[_TOKENS], bound))


def _disagreeing(table: pa.Table, name: str) -> Bools:
    """Return, for each sample, whether the samples of its row differ in a column [R]."""
    texts = pc.fill_null(_one(table[name]).cast(pa.string()), "")
    values, begin = np.asarray(_one(texts).dictionary_encode().indices), starts(table)
    differs = np.maximum.reduceat(values, begin) != np.minimum.reduceat(values, begin)
    return np.repeat(differs, np.diff(np.append(begin, len(values))))


def _error_type(table: pa.Table) -> pa.Array:
    """Return the type of each sample's error; null without an error."""
    return pc.struct_field(_one(table["error"]), "type")


def _texts(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values of a column as texts, in the form in which the job's scores name
    subsets."""
    if values.type in TEXT_TYPES:
        return values
    names = [None if value is None else str(value) for value in values.to_pylist()]
    return pa.chunked_array([pa.array(names, pa.string())])


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _bools(column: pa.ChunkedArray) -> Bools:
    """Convert a Boolean column to NumPy; null becomes false."""
    return np.asarray(pc.fill_null(column, fill_value=False), np.bool_)
