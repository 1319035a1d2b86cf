"""The filters of the viewer's list of rows: from the keys of a URL to conditions on samples."""

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
"""How a sample can be marked, and what that means."""
REASONS = ("stop", "length", "tool_call", "no_answer", "constraint_conflict", "error")
TEXT_TYPES = (pa.string(), pa.large_string())
LONGEST = 1000
"""The most characters of a text that is searched for."""


@dataclass(frozen=True)
class SampleFilter:
    """The conditions under which a sample is listed; empty values allow anything."""

    text: str = ""  # that `column` contains, in upper or lower case
    column: str = ""  # of texts; empty for the generated text
    mark: str = ""  # one of MARKS
    reason: str = ""  # one of REASONS
    error: str = ""  # the type of the row's error
    least: str = ""  # the fewest generated tokens
    most: str = ""  # the most generated tokens
    disagree: str = ""
    """`yes` for rows whose samples differ in their answer; in their mark, where the job has no
    answers; in their text, where it has no marks either."""
    subset: str = ""  # the value of `subset_column`, as text
    subset_column: str = ""  # from the job's configuration; not a key of a URL

    def __post_init__(self) -> None:
        for name, known in (("mark", MARKS), ("reason", REASONS), ("disagree", ("yes",))):
            value = asdict(self)[name]
            if value and value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        for name, value in (("least", self.least), ("most", self.most)):
            if value and not (value.isascii() and value.isdecimal() and len(value) < 10):
                raise ConfigError(f"{name} must be a number of tokens, got {value[:80]!r}")
        if len(self.text) > LONGEST:
            raise ConfigError(f"text must have at most {LONGEST:,} characters")

    @classmethod
    def of(cls, query: Mapping[str, str], subset_column: str = "") -> SampleFilter:
        """The filter that the query of a URL describes.

        Raises:
            ConfigError: a key has a value that is not allowed.
        """
        names = {field.name for field in fields(cls)} - {"subset_column"}
        values = {key: value for key, value in query.items() if key in names}
        return cls(**values, subset_column=subset_column)

    @property
    def query(self) -> dict[str, str]:
        """The keys of a URL that describe it."""
        values = asdict(self).items()
        return {key: value for key, value in values if value and key != "subset_column"}

    def __bool__(self) -> bool:
        return any(value for key, value in self.query.items() if key != "column")

    def columns(self, schema: pa.Schema, text_column: str) -> list[str]:
        """The columns that `matches` reads, given the schema of the rows with their grades.

        Raises:
            ConfigError: `column` is no column of texts, or there are no grades to filter by.
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
        """[R] Which samples of a table are listed. The table has the columns of `columns`, and all
        samples of each of its rows."""
        matches = np.ones(table.num_rows, np.bool_)
        for _, holds in self._conditions(table.column_names, text_column):
            if matches.any():
                matches &= holds(table)
        return matches

    def _conditions(self, names: Collection[str], text_column: str) -> Iterator[Condition]:
        """All conditions, the slowest ones last.

        Args:
            names: of the columns that there are.
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
    """The columns that hold texts."""
    return [field.name for field in schema if field.type in TEXT_TYPES]


def marks(table: pa.Table) -> npt.NDArray[np.str_]:
    """[R] Which of MARKS each sample has, by its finish reason and the grades that there are; empty
    for rows with an error of their own."""
    count, names = table.num_rows, table.column_names
    texts = np.full(count, "ungraded", dtype="<U11")
    if MARK in names:
        mark = pc.fill_null(table[MARK], np.nan).to_numpy()
        texts[mark == 1] = "right"
        texts[(mark > 0) & (mark < 1)] = "partly"
        texts[mark == 0] = "wrong"
        if ANSWER_KEY in names:
            texts[np.asarray(pc.is_null(table[ANSWER_KEY])) & (mark == 0)] = "no_answer"
    if GRADE_ERROR in names:
        texts[np.asarray(pc.is_valid(table[GRADE_ERROR]))] = "grade_error"
    texts[_bools(pc.equal(table["finish_reason"], "error"))] = ""
    return texts


def _compared(table: pa.Table, compare: Callable[..., pa.ChunkedArray], bound: int) -> Bools:
    return _bools(compare(table[_TOKENS], bound))


def _disagreeing(table: pa.Table, name: str) -> Bools:
    """[R] Whether the row of a sample has samples that differ in a column."""
    texts = pc.fill_null(_one(table[name]).cast(pa.string()), "")
    values, begin = np.asarray(_one(texts).dictionary_encode().indices), starts(table)
    differs = np.maximum.reduceat(values, begin) != np.minimum.reduceat(values, begin)
    return np.repeat(differs, np.diff(np.append(begin, len(values))))


def _error_type(table: pa.Table) -> pa.Array:
    return pc.struct_field(_one(table["error"]), "type")


def _texts(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column as texts, written as the names of subsets in the job's scores are."""
    if values.type in TEXT_TYPES:
        return values
    names = [None if value is None else str(value) for value in values.to_pylist()]
    return pa.chunked_array([pa.array(names, pa.string())])


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _bools(column: pa.ChunkedArray) -> Bools:
    """The values of a column of Booleans, in which null counts as false."""
    return np.asarray(pc.fill_null(column, False), np.bool_)
