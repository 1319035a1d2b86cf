"""The interface of post steps: frozen options, declared columns, and a pure function of a row.

The steps of the list `post` run over finished rows, in their order: `Extract` writes the column
`answer`, `Grade` reads it and writes `mark`. `grade_rows.py` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["string", "strings", "int32", "float64", "error"]
"""The types of columns; `strings` is a list of texts, and `error` a struct of `type` and `message`,
as in the rows of a job."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a step writes. Every value may be null.

    Attributes:
        name: its name.
        kind: its type.
        meaning: its description, for readers of the file.
    """

    name: str
    kind: Kind
    meaning: str


GRADE_ERROR = Column(
    "grade_error",
    "error",
    "why the answer has no grade (timeout, crash, memory, failed, too_long, no_target, "
    "bad_target); null if it has one or the row itself has an error",
)
"""The column that every chain of steps adds."""


MARK = "mark"
"""The column from which scores are computed: from 0, wrong, to 1, right."""


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """A finished row as a step sees it.

    Attributes:
        text: the generated text.
        fields: the row's columns: those of the data set and those of row steps.
        values: the columns of earlier steps, by name.
    """

    text: str
    fields: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """N finished rows that all have an answer, as columns; `ColumnStep` reads them.

    Attributes:
        texts: [N], the generated texts.
        fields: the rows' columns [N] by name.
        values: the columns [N] of earlier steps, by name.
    """

    texts: pa.StringArray
    fields: Mapping[str, Sequence[Any]]
    values: Mapping[str, Sequence[Any]]


class GradeFailure(Exception):
    """A row cannot be graded, which does not mean that its answer is wrong.

    Attributes:
        type: a word for machines, such as no_target; the message is for people.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type, str(self))


class PostStep(Protocol):
    """A step that makes columns from a finished row.

    Steps are frozen dataclasses that can be pickled. The same options, `version` and row give the
    same values in any process.
    """

    @property
    def version(self) -> int:
        """A number that increases when the same options may give other values than before."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the step writes."""

    @property
    def isolated(self) -> bool:
        """Whether `apply` may hang or crash, and so must run in a worker process."""

    @property
    def reads_text(self) -> bool:
        """Whether `apply` reads `AnswerRow.text`, which can be long."""

    @property
    def field_names(self) -> tuple[str, ...] | None:
        """The fields that `apply` reads; None for all fields."""

    @property
    def value_names(self) -> tuple[str, ...]:
        """The columns of earlier steps that `apply` needs."""

    def prepare(self) -> None:
        """Import modules that `apply` needs, so that the first row does not take longer than the
        others."""

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        """The values of the step's columns.

        Raises:
            GradeFailure: the row cannot be graded.
        """


@runtime_checkable
class ColumnStep(PostStep, Protocol):
    """A step that can also process many rows together, in a fraction of the time of single rows.

    A chain of such steps, none of them isolated, runs in the process of the job. So `apply_all`
    must take time in proportion to the texts, and neither hang nor end the process.
    """

    def apply_all(
        self, rows: AnswerRows, failures: dict[int, GradeFailure]
    ) -> dict[str, list[Any]]:
        """The step's columns [N], with the values that `apply` returns for each row.

        Args:
            rows: the rows.
            failures: receives, by the index of a row, the error that `apply` would raise for it;
                the row's values are None.
        """


@runtime_checkable
class SelfTimedStep(PostStep, Protocol):
    """A step that ends calls which take too long by itself, and that not every machine can run."""

    @property
    def most_seconds(self) -> float:
        """The longest time of `apply` in seconds. `score.seconds` is for other steps."""

    def check_machine(self) -> None:
        """Raise ConfigError if the step cannot run on this machine. Called before a job begins."""


def num_groups(pattern: str, where: str) -> int:
    """The number of groups in a user's regular expression. `where` names its key in the message.

    Raises:
        ConfigError: the expression is invalid.
    """
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"{where} is not a regular expression: {error}") from None


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The Arrow schema of columns, with their meanings in the metadata of the fields."""
    import pyarrow as pa

    error = pa.struct([("type", pa.string()), ("message", pa.string())])
    types = {
        "string": pa.string(),
        "strings": pa.list_(pa.string()),
        "int32": pa.int32(),
        "float64": pa.float64(),
        "error": error,
    }
    return pa.schema(
        [pa.field(c.name, types[c.kind], metadata={"meaning": c.meaning}) for c in columns]
    )


class TextStep:
    """Base class of steps that read only a row's text and need no preparation."""

    @property
    def reads_text(self) -> bool:
        return True

    @property
    def field_names(self) -> tuple[str, ...]:
        return ()

    @property
    def value_names(self) -> tuple[str, ...]:
        return ()

    def prepare(self) -> None:
        pass
