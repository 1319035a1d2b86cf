"""Which rows a list shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.rows.grade_columns import ANSWER_KEY, GRADE_ERROR, MARK
from batchgen.rows.job_rows import starts
from batchgen.util.errors import ConfigError

Bools = npt.NDArray[np.bool_]

MARKS = {
    "right": "right",
    "partly": "between right and wrong",
    "wrong": "wrong answer",
    "no_answer": "no answer found",
    "grade_error": "could not be graded",
    "ungraded": "not graded",
}
"""How a sample can be marked, and what that means."""
REASONS = ("stop", "length", "constraint_conflict", "error")
TEXT_TYPES = (pa.string(), pa.large_string())
LONGEST = 1000
"""Characters of a text that is sought."""


@dataclass(frozen=True)
class Filter:
    """What samples must have in common to be listed; empty values allow anything."""

    text: str = ""  # that `column` contains, in upper or lower case
    column: str = ""  # of texts; empty for the generated text
    mark: str = ""  # one of MARKS
    reason: str = ""  # one of REASONS
    error: str = ""  # the type of the row's error
    least: str = ""  # generated tokens
    most: str = ""
    disagree: str = ""
    """`yes` for rows whose samples differ in their answer; in their mark, where the job has no
    answers; in their text, where it has no marks either."""
    subset: str = ""  # the value of `subset_column`, as text
    subset_column: str = ""  # the job's, and no key of a URL

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
    def of(cls, query: Mapping[str, str], subset_column: str = "") -> Filter:
        """The filter that the query of a URL describes.

        Raises:
            ConfigError: a value is none that the key may have.
        """
        names = {field.name for field in fields(cls)} - {"subset_column"}
        given = {key: value for key, value in query.items() if key in names}
        return cls(**given, subset_column=subset_column)

    @property
    def query(self) -> dict[str, str]:
        """The keys of a URL that describe it."""
        given = asdict(self).items()
        return {key: value for key, value in given if value and key != "subset_column"}

    def __bool__(self) -> bool:
        return any(value for key, value in self.query.items() if key != "column")

    def columns(self, schema: pa.Schema, text_column: str) -> list[str]:
        """The columns that `matches` reads, given the schema of the rows with their grades.

        Raises:
            ConfigError: `column` is no column of texts, or there are no grades to filter by.
        """
        names: list[str] = []
        if self.text:
            column = self.column or text_column
            if column not in text_columns(schema):
                raise ConfigError(f"there is no column of texts {column!r}")
            names.append(column)
        if self.mark and not any(name in schema.names for name in (MARK, GRADE_ERROR)):
            raise ConfigError("this job has no grades: mark needs some")
        if self.disagree:
            names += _answers(schema, text_column)
        if self.subset:
            if self.subset_column not in schema.names:
                raise ConfigError("this job has no subsets: score.subset names a column of them")
            names.append(self.subset_column)
        names += [MARK, ANSWER_KEY, GRADE_ERROR] if self.mark else ()
        names += ["finish_reason"] if self.reason or self.mark else ()
        names += ["error"] if self.error else ()
        names += ["num_generated_tokens"] if self.least or self.most else ()
        return [name for name in dict.fromkeys(names) if name in schema.names]

    def matches(self, table: pa.Table, text_column: str) -> Bools:
        """[R] Which samples of a table of whole rows, with the columns of `columns`, are listed."""
        found = np.ones(table.num_rows, np.bool_)
        if self.reason:
            found &= _bools(pc.equal(table["finish_reason"], self.reason))
        if self.error:
            types = pc.struct_field(_one(table["error"]), "type")
            found &= _bools(pc.equal(types, self.error))
        if self.least:
            found &= _bools(pc.greater_equal(table["num_generated_tokens"], int(self.least)))
        if self.most:
            found &= _bools(pc.less_equal(table["num_generated_tokens"], int(self.most)))
        if self.mark:
            found &= marks(table) == self.mark
        if self.subset:
            values = table[self.subset_column]
            if values.type not in TEXT_TYPES:  # named as the scores name them
                names = [None if v is None else str(v) for v in values.to_pylist()]
                values = pa.chunked_array([pa.array(names, pa.string())])
            found &= _bools(pc.equal(values, self.subset))
        if self.disagree and found.any():
            found &= _disagreeing(table, text_column)
        if self.text and found.any():
            column = table[self.column or text_column]
            found &= _bools(pc.match_substring(column, self.text, ignore_case=True))
        return found


def text_columns(schema: pa.Schema) -> list[str]:
    """The columns that hold texts."""
    return [field.name for field in schema if field.type in TEXT_TYPES]


def marks(table: pa.Table) -> npt.NDArray[np.str_]:
    """[R] Which of MARKS each sample has, by its finish reason and the grades that there are; empty
    for rows with an error of their own."""
    count, names = table.num_rows, table.column_names
    found = np.full(count, "ungraded", dtype="<U11")
    if MARK in names:
        mark = pc.fill_null(table[MARK], np.nan).to_numpy()
        found[mark == 1] = "right"
        found[(mark > 0) & (mark < 1)] = "partly"
        found[mark == 0] = "wrong"
        if ANSWER_KEY in names:
            found[np.asarray(pc.is_null(table[ANSWER_KEY])) & (mark == 0)] = "no_answer"
    if GRADE_ERROR in names:
        found[np.asarray(pc.is_valid(table[GRADE_ERROR]))] = "grade_error"
    found[_bools(pc.equal(table["finish_reason"], "error"))] = ""
    return found


def _answers(schema: pa.Schema, text_column: str) -> Sequence[str]:
    """The column that samples must agree in."""
    return [next(n for n in (ANSWER_KEY, MARK, text_column) if n in schema.names)]


def _disagreeing(table: pa.Table, text_column: str) -> Bools:
    """[R] Whether the row of a sample has samples that differ."""
    (name,) = _answers(table.schema, text_column)
    codes = _one(pc.fill_null(_one(table[name]).cast(pa.string()), "")).dictionary_encode()
    values, begin = np.asarray(codes.indices), starts(table)
    differs = np.maximum.reduceat(values, begin) != np.minimum.reduceat(values, begin)
    return np.repeat(differs, np.diff(np.append(begin, len(values))))


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _bools(column: pa.ChunkedArray) -> Bools:
    """The values of a column of truths, with null for false."""
    return np.asarray(pc.fill_null(column, False), np.bool_)
