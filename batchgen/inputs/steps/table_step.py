"""The interface of row steps that drop, split or add rows (`TableStep`); users derive their own
from it."""

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
        id: the row's id, with `#k` for each step before that made several rows of one.
        index: the position in the data set of the row that it comes from.
        fields: the columns of the data set and those of the steps before.
    """

    id: str
    index: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a step returns for a row that it takes out, with a reason for people."""

    reason: str


class BadRow(Exception):
    """A row that a step cannot read. It becomes an error row of the output (bad_row), with the
    message as its reason."""


KEPT: Sequence[Mapping[str, Any]] = ({},)
"""What a step returns for a row that stays as it is."""
Taken = Sequence[Mapping[str, Any]] | Dropped
"""The values of the step's columns, for each row that the row becomes; or why it is dropped."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a step may use besides the rows.

    Attributes:
        features: what the columns of its rows hold, in the terms of datasets.
        tokenizer: that of the job's model, if it has one.
    """

    features: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None


class Pass(Protocol):
    """A step on its way through the rows, from the first one on."""

    @property
    def full(self) -> bool:
        """Whether every later row is dropped, so that no more need be read."""
        ...

    def take(self, row: StepRow) -> Taken:
        """What becomes of the next row; BadRow if the row lacks what the step needs."""
        ...

    def close(self) -> None:
        """Give up what the step holds."""
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
        """The columns that a row must have; a name with dots is one inside a struct."""
        return ()

    @property
    def uncopied(self) -> Sequence[str]:
        """Columns that are not copied to the output any more, because each new row would repeat
        them. Prompts can have them still."""
        return ()

    def made(self, features: Features) -> Features:
        """The columns that the step adds or replaces, given those of its rows. Raises ConfigError
        if these do not suit it."""
        from datasets import Features

        return Features({})

    def stored(self, features: Features) -> Features:
        """What the row index keeps of the values that `take` gave for a row: by default those of
        all columns."""
        return self.made(features)

    def fingerprints(self) -> Mapping[str, str]:
        """Digests of what the rows depend on besides the options, such as the content of a file,
        by a name for people."""
        return {}

    def start(self, tools: Tools) -> Pass:
        """The step at the first row."""
        return self

    def take(self, row: StepRow) -> Taken:
        """See `Pass`; a step that has a state makes an object in `start` instead."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Pass`."""

    def restored(self, fields: Mapping[str, Any], k: int, stored: Mapping[str, Any]) -> Any:
        """The values of the step's columns, made again for row number `k` of those that `take` made
        of a row with these fields."""
        return stored


class SplittingStep(TableStep):
    """A step that makes rows of what one column of a row holds."""

    stable = True
    splits = True

    column: str
    as_: str | None

    @property
    def name(self) -> str:
        """The column that gets a part."""
        return self.as_ or self.column.rpartition(".")[2]

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have."""
        return (self.column,)

    @property
    def uncopied(self) -> Sequence[str]:
        """The whole, unless a part takes its place."""
        return () if self.name == self.column else (self.column,)
