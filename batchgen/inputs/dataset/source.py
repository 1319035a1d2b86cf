"""What a job needs of the rows that it reads, wherever they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from batchgen.storage.costs.chain_costs import JobCost

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

    from batchgen.engine.interface.outputs import RequestError


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the data set.

    Attributes:
        index: its position in the data set, where the first row has 0.
        id: the value of `dataset.id_column` as text, or the index if there is no such column.
        fields: the values of its columns. Dates are datetimes, labels are numbers, and JSON is
            parsed. Images, audio and the like are left out.
        failure: why the row can have no prompt, if that is known before one is made.
    """

    index: int
    id: str
    fields: dict[str, Any]
    failure: RequestError | None = None


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Another job whose rows are read.

    Attributes:
        name: what tells it from others that are read: the last names of its folder's path.
        digest: of its identity, which growing does not change; 32 hex digits.
        depth: how many jobs stand behind each other up to it: 1 if it reads no job itself.
        costs: what the jobs that stand behind each other took, it the last one.
    """

    name: str
    digest: str
    depth: int
    costs: Sequence[JobCost] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """How many rows are left after a choice among rows, such as `dataset.where`."""

    choice: str
    rows: int


def funnel_line(funnel: Sequence[Left]) -> str:
    """How many rows each choice has left, in one line."""
    first, *others = funnel
    return " → ".join(
        [f"{first.rows:,} {first.choice}", *(f"{o.choice} {o.rows:,}" for o in others)]
    )


class Source(Protocol):
    """The rows of a job: at most `dataset.limit`, always in the same order.

    A source is random access (`num_rows` is known and every row can be read by its index), a
    stream, which is read from its start for every call of `rows`, or `Following`. While rows are
    read, a file that cannot be read further raises ConfigError, and a network or a disk that fails
    JobError.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that templates may use."""
        ...

    @property
    def features(self) -> Features:
        """What the columns hold, in the terms of datasets."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """The columns that are copied to the output."""
        ...

    @property
    def num_rows(self) -> int | None:
        """How many rows there are; None for a stream."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal rows on every machine."""
        ...

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        """The jobs whose rows these are, in their order; none for a data set."""
        ...

    @property
    def funnel(self) -> tuple[Left, ...]:
        """How many rows there were first, and how many each choice among them has left."""
        ...

    def rows(self, start: int = 0) -> Iterator[Row]:
        """The rows from index `start` on."""
        ...

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """The rows with these indices, in this order, of random access only."""
        ...

    def passthrough(self, row: Row) -> dict[str, Any]:
        """The values of the columns that are copied to the output, or RequestError (bad_row)."""
        ...

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """What is read of the rows before `stop`, in tables of `size` rows, of which the last one
        may have fewer; of random access only."""
        ...


class Following(ABC):
    """What a `Source` is besides whose rows come while they are read.

    Rows before `num_ready` can be read by their indices; `num_rows` is None until `learn` has found
    that no more will come.
    """

    @property
    @abstractmethod
    def num_ready(self) -> int:
        """How many rows are there, as far as is known."""

    @abstractmethod
    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """Find out what has come since the last call; returns whether there was something.

        Args:
            may_write: whether this process is the one that writes down in the reader's folder
                where rows come from. It is asked only if there is something to write.

        Raises:
            ConfigError: no row is left of all.
            JobError: a file is damaged, or is another one than before.
        """
