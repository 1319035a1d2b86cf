"""The interface of row steps that drop, split or add rows (`TableStep`). batchgen's own steps and
those of users derive from it; `Chain` runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from datasets import Features
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row as a step sees it.

    Attributes:
        id: the row's id, with `#k` for each earlier step that made several rows of one.
        index: the position of the row of the data set from which it was made.
        fields: the columns of the data set, and those of earlier steps.
    """

    id: str
    index: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a step returns for a row that it drops, with a readable reason."""

    reason: str


class BadRow(Exception):
    """Raised for a row that a step cannot read. The row becomes an error row of the output
    (bad_row) with this message."""


KEPT: Sequence[Mapping[str, Any]] = ({},)
"""What a step returns for a row that it keeps unchanged."""
Taken = Sequence[Mapping[str, Any]] | Dropped
"""What a step returns for a row: the values of the step's columns for each row that it becomes; or
`Dropped`."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a step may use besides the rows.

    Attributes:
        features: the types of the columns before the step, as datasets describes them.
        tokenizer: that of the job's model, if it has one.
    """

    features: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None


class Pass(Protocol):
    """One pass of a step over the rows, from the first one on."""

    @property
    def full(self) -> bool:
        """Whether every later row is dropped, so that no more need to be read."""
        ...

    def take(self, row: StepRow) -> Taken:
        """Return what becomes of the next row. Raises BadRow if the row lacks what the step
        needs."""
        ...

    def close(self) -> None:
        """Free the resources of the pass."""
        ...


class TableStep:
    """A step that changes which rows there are. Derive your own from it, as a frozen dataclass.

    Steps are prefix-stable: what a step decides about a row depends on that row, the rows before
    it and the step's options, and on nothing else. So a data set can grow at its end, and all
    workers find the same rows. A step of one's own says by `stable = True` that it keeps this rule.

    Attributes:
        version: grows when the same options may give other rows than before.
        stable: whether the step is prefix-stable.
        splits: whether it may make several rows of one, whose ids then get `#k` from 0 on.
        has_state: whether it remembers rows. Then `start` must return a new object, and a job that
            grows goes through all rows again to remember them.
        takes_failed: whether rows in which a step before has failed go through it. Other steps let
            them pass.
        rest: the option that gets all keys which are no options, as a mapping; None refuses them.
        full: see `Pass`.
    """

    version: ClassVar[int] = 1
    stable: ClassVar[bool] = False
    splits: bool = False
    has_state: ClassVar[bool] = False
    takes_failed: ClassVar[bool] = False
    rest: ClassVar[str | None] = None
    full: ClassVar[bool] = False

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have. A name with dots means a field of a struct."""
        return ()

    @property
    def uncopied(self) -> Sequence[str]:
        """The columns that are no longer copied to the output, because each new row would repeat
        them. Prompts can still use them."""
        return ()

    def made(self, features: Features) -> Features:
        """Return the columns that the step adds or replaces, given the columns before it. Raises
        ConfigError if the step cannot use those."""
        from datasets import Features

        return Features({})

    def stored(self, features: Features) -> Features:
        """Return the columns whose values from `take` the row index stores: by default all that the
        step makes."""
        return self.made(features)

    def fingerprints(self) -> Mapping[str, str]:
        """Return digests of what the rows depend on besides the options, such as the content of a
        file, by readable names."""
        return {}

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row."""
        return self

    def take(self, row: StepRow) -> Taken:
        """See `Pass`. A step with state returns another object from `start` and does not define
        this method."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Pass`."""

    def restored(self, fields: Mapping[str, Any], k: int, stored: Mapping[str, Any]) -> Any:
        """Recompute the values of the step's columns.

        Args:
            fields: the row before the step.
            k: the number of the row among those that `take` made of it.
            stored: the values that the row index has stored.
        """
        return stored


class SplittingStep(TableStep):
    """The base of steps that make several rows of one, from the parts of one column."""

    stable = True
    splits = True

    column: str
    as_: str | None

    @property
    def name(self) -> str:
        """The name of the column that gets a part."""
        return self.as_ or self.column.rpartition(".")[2]

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have."""
        return (self.column,)

    @property
    def uncopied(self) -> Sequence[str]:
        """The whole column, unless its parts replace it."""
        return () if self.name == self.column else (self.column,)
