"""Defines `Source`, the interface through which a job reads its rows, and `Row`.

Implementations are a data set (`row_source`), counted rows (`counted_rows`), row steps over another
source (`row_steps`, `indexed_source`), several adapters (`grid_source`) and answers of other jobs
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
        index: its position in the data set, from 0.
        id: the value of `dataset.id_column` as text, or the index if there is no such column.
        fields: the values of its columns. Dates are datetimes, labels are numbers, and JSON is
            parsed. Columns that are not read, such as audio, are missing.
        failure: why no prompt can be made for the row, if that is already known.
    """

    index: int
    id: str
    fields: dict[str, Any]
    failure: RequestError | None = None


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Another job whose rows this job reads.

    Attributes:
        name: the last parts of its folder's path, as many as distinguish it from other jobs that
            are read.
        digest: a digest of its identity, 32 hex digits, which stays the same when the job grows.
        depth: the length of the chain of jobs that ends with it; 1 if it reads no job itself.
        costs: the costs of the jobs of this chain; its own is the last.
        identity: the part of its manifest that decides its rows, by group and key.
    """

    name: str
    digest: str
    depth: int
    costs: Sequence[JobCost] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Left:
    """The number of rows that are left after a filter.

    Attributes:
        choice: the filter's name, such as `dataset.where`.
        rows: the number of rows after it.
    """

    choice: str
    rows: int


def funnel_line(funnel: Sequence[Left]) -> str:
    """Return a line with the number of rows after each filter, such as "1,000 rows of the data set
    → Filter 800 → Dedupe 750"."""
    first, *others = funnel
    return " → ".join(
        [f"{first.rows:,} {first.choice}", *(f"{o.choice} {o.rows:,}" for o in others)]
    )


class Source(ABC):
    """The rows of a job: at most `dataset.limit`, always in the same order.

    There are three kinds of sources. With random access, `num_rows` is known, and every row can be
    read by its index. A stream is read from its start for every call of `rows`. A growing source
    has random access to the rows before `num_ready`; its `num_rows` is None until `learn` finds
    that no more rows will come.

    While rows are read, a file that cannot be read raises ConfigError, and a failing network or
    disk raises JobError.

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
        """The number of rows; None for a stream, and while more rows may come."""

    @property
    def num_ready(self) -> int | None:
        """The number of rows that can be read now; None for a stream."""
        return self.num_rows

    @property
    def ends(self) -> Sequence[int]:
        """For rows that arrive in pieces (shards of a running job), the number of rows up to the
        end of each piece; equal in every process. Not for a stream."""
        return [self.num_ready or 0]

    @property
    def follows(self) -> bool:
        """Whether the rows come from a job that may be running, or was running when the source was
        opened."""
        return False

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A text that is equal for equal rows on every machine."""

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        """The jobs whose rows these are, in their order; empty for a data set."""
        return ()

    @property
    def funnel(self) -> tuple[Left, ...]:
        """The number of rows at first, and after each filter; empty without filters."""
        return ()

    @property
    def data(self) -> Source:
        """The source of the data set itself, whose number of rows and digests the manifest
        stores."""
        return self

    @abstractmethod
    def rows(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from index `start` on."""

    @abstractmethod
    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """Yield the rows with these indices, in this order. Not for a stream."""

    @abstractmethod
    def passthrough(self, row: Row) -> dict[str, Any]:
        """Return the values of a row's columns that are copied to the output. Raises RequestError
        (`bad_row`) if a value does not fit its column."""

    @abstractmethod
    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """Yield the rows before `stop`, with the columns that are read, in tables of `size` rows;
        the last table may have fewer. Not for a stream."""

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        """Find out which rows have arrived since the last call. Returns whether there are any.

        Args:
            may_write: returns whether this process writes the row index into the reading job's
                folder. It is called only if there is something to write.

        Raises:
            ConfigError: no row is left after the filters.
            JobError: a file is damaged, or was replaced.
        """
        return False

    def open_index(  # noqa: B027
        self, storage: Storage, *, alone: bool, finished: Callable[[], int] = lambda: 0
    ) -> None:
        """Prepare the row index in a job's folder, if row steps choose among the rows: make, extend
        or read it.

        Args:
            alone: whether no other worker runs in the folder.
            finished: returns the number of rows up to the last finished one. It is called if the
                data set has become shorter.

        Raises:
            ConfigError: the steps leave no row, or a step cannot start.
            JobError: the index cannot be written.
        """

    def find_index(self, storage: Storage | None) -> None:  # noqa: B027
        """Prepare the row index without writing into the job's folder: read the existing one, or
        make one in a temporary folder."""

    def close(self) -> None:  # noqa: B027
        """Delete temporary files."""


class SourceOver(Source):
    """Base class of a `Source` that makes its rows from those of another source. Properties that a
    subclass does not override are the other source's."""

    def __init__(self, source: Source) -> None:
        """Create a source over `source`."""
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
        """The other source's fingerprint. The changes to its rows are part of the job's
        configuration."""
        return self._source.fingerprint

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        return self._source.jobs

    @property
    def funnel(self) -> tuple[Left, ...]:
        return self._source.funnel

    def learn(self, may_write: Callable[[], bool] = lambda: False) -> bool:
        return self._source.learn(may_write)
