"""What a job needs of the rows that it reads, wherever they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchgen.storage.costs.chain_costs import JobCost

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

    from batchgen.engine.interface.outputs import RequestError
    from batchgen.storage.stores.job_storage import Storage


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
        identity: what its manifest says that decides its rows, by group and key.
    """

    name: str
    digest: str
    depth: int
    costs: Sequence[JobCost] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)


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


class Source(ABC):
    """The rows of a job: at most `dataset.limit`, always in the same order.

    A source is random access (`num_rows` is known and every row can be read by its index), or a
    stream, which is read from its start for every call of `rows`, or it grows: rows before
    `num_ready` can be read by their indices, and `num_rows` is None until `learn` has found that no
    more will come. While rows are read, a file that cannot be read further raises ConfigError, and
    a network or a disk that fails JobError.

    Attributes:
        columns: the names of all columns that templates may use.
        features: what the columns hold, in the terms of datasets.
        schema: the columns that are copied to the output.
    """

    columns: tuple[str, ...]
    features: Features
    schema: pa.Schema

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """How many rows there are; None for a stream, and as long as more may come."""

    @property
    def num_ready(self) -> int | None:
        """How many rows are there, as far as is known; None for a stream."""
        return self.num_rows

    @property
    def ends(self) -> Sequence[int]:
        """Behind which of the rows that are there each stretch ends in which they came, which is
        the same in every process; not of a stream."""
        return [self.num_ready or 0]

    @property
    def follows(self) -> bool:
        """Whether the rows are of a job that was followed, whether or not it has ended."""
        return False

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal rows on every machine."""

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        """The jobs whose rows these are, in their order; none for a data set."""
        return ()

    @property
    def funnel(self) -> tuple[Left, ...]:
        """How many rows there were first, and how many each choice among them has left."""
        return ()

    @property
    def data(self) -> Source:
        """The rows of the data set, of which the manifest keeps number and digests."""
        return self

    @abstractmethod
    def rows(self, start: int = 0) -> Iterator[Row]:
        """The rows from index `start` on."""

    @abstractmethod
    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """The rows with these indices, in this order; not of a stream."""

    @abstractmethod
    def passthrough(self, row: Row) -> dict[str, Any]:
        """The values of the columns that are copied to the output. Raises RequestError (bad_row) if
        one does not fit its column."""

    @abstractmethod
    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """What is read of the rows before `stop`, in tables of `size` rows, of which the last one
        may have fewer; not of a stream."""

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """Find out what has come since the last call; returns whether there was something.

        Args:
            may_write: whether this process is the one that writes down in the reader's folder
                where rows come from. It is asked only if there is something to write.

        Raises:
            ConfigError: no row is left of all.
            JobError: a file is damaged, or is another one than before.
        """
        return False

    def open_index(  # noqa: B027
        self, storage: Storage, *, alone: bool, finished: Callable[[], int] = lambda: 0
    ) -> None:
        """Have the row index in a job's folder, if steps choose among the rows: make it, add new
        rows to it, or read it.

        Args:
            alone: whether no other worker runs in the folder.
            finished: up to which number rows of the job are finished; it is asked if the data set
                has become shorter.

        Raises:
            ConfigError: the steps leave no row, or a step cannot start.
            JobError: the index cannot be written.
        """

    def find_index(self, storage: Storage | None) -> None:  # noqa: B027
        """Have the row index without writing into the job's folder: read the one that is there, or
        make one in a temporary folder."""

    def close(self) -> None:  # noqa: B027
        """Delete what is of no use without this object."""


class SourceOver(Source):
    """The base of a `Source` that makes its rows of another one's, one for one or more, and says of
    them what that says."""

    def __init__(self, source: Source) -> None:
        """Create a source over another one."""
        self._source = source

    @property
    def num_rows(self) -> int | None:
        return self._source.num_rows

    @property
    def num_ready(self) -> int | None:
        return self._source.num_ready

    @property
    def follows(self) -> bool:
        return self._source.follows

    @property
    def fingerprint(self) -> str:
        """That of the other source: what is made of it is part of the job's configuration."""
        return self._source.fingerprint

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        return self._source.jobs

    @property
    def funnel(self) -> tuple[Left, ...]:
        return self._source.funnel

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        return self._source.learn(may_write)
