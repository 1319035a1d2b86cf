"""The interface between a job and its rows: `Source`, whatever the rows come from.

Implementations are a data set (`row_source`), counted rows, row steps over another source
(`row_steps`, `indexed_source`), several adapters (`grid_source`) and answers of other jobs
(`upstream/job_source`).
"""

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
        name: a name that tells it from other jobs that are read: the last parts of its folder's
            path.
        digest: a digest of its identity, 32 hex digits; it stays the same when the job grows.
        depth: the length of the chain of jobs that ends with it: 1 if it reads no job itself.
        costs: the costs of the jobs of this chain, its own last.
        identity: the part of its manifest that decides its rows, by group and key.
    """

    name: str
    digest: str
    depth: int
    costs: Sequence[JobCost] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Left:
    """The number of rows that are left after a filter, such as `dataset.where`."""

    choice: str
    rows: int


def funnel_line(funnel: Sequence[Left]) -> str:
    """A line with the number of rows left after each filter."""
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
        features: the types of the columns, as `datasets` features.
        schema: the columns that are copied to the output.
    """

    columns: tuple[str, ...]
    features: Features
    schema: pa.Schema

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """The number of rows; None for a stream, and as long as more may come."""

    @property
    def num_ready(self) -> int | None:
        """The number of rows that can be read now; None for a stream."""
        return self.num_rows

    @property
    def ends(self) -> Sequence[int]:
        """For rows that arrive in stretches (shards of a running job), the number of rows up to the
        end of each stretch; equal in every process. Not for a stream."""
        return [self.num_ready or 0]

    @property
    def follows(self) -> bool:
        """Whether the rows come from a job that may still run or was still running when it was
        opened."""
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
        """The number of rows at first, and after each filter."""
        return ()

    @property
    def data(self) -> Source:
        """The rows of the data set itself, whose number and digests the manifest keeps."""
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
        """The columns that are read of the rows before `stop`, in tables of `size` rows (the last
        may have fewer). Not for a stream."""

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """Find out which rows have arrived since the last call; return whether there are any.

        Args:
            may_write: whether this process is the one that writes the row index into the reader's
                folder; called only if there is something to write.

        Raises:
            ConfigError: no row is left after the filters.
            JobError: a file is damaged, or is another one than before.
        """
        return False

    def open_index(  # noqa: B027
        self, storage: Storage, *, alone: bool, finished: Callable[[], int] = lambda: 0
    ) -> None:
        """Prepare the row index in a job's folder, if row steps choose among the rows: make it,
        extend it, or read it.

        Args:
            alone: whether no other worker runs in the folder.
            finished: returns the number of the job's first rows up to the last finished one; called
                if the data set has become shorter.

        Raises:
            ConfigError: the steps leave no row, or a step cannot start.
            JobError: the index cannot be written.
        """

    def find_index(self, storage: Storage | None) -> None:  # noqa: B027
        """Prepare the row index without writing into the job's folder: read the one that is there,
        or make one in a temporary folder."""

    def close(self) -> None:  # noqa: B027
        """Delete temporary files."""


class SourceOver(Source):
    """Base class of a `Source` that makes its rows from those of another source, to which it
    delegates the rest."""

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
        """That of the other source; the changes to its rows are part of the job's configuration."""
        return self._source.fingerprint

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        return self._source.jobs

    @property
    def funnel(self) -> tuple[Left, ...]:
        return self._source.funnel

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        return self._source.learn(may_write)
