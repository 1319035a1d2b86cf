"""The row steps `Pick` and `Cross`, which add pieces such as personas to rows: at random, or in all
combinations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from batchgen.inputs.steps.side_table import SideTable, of_table
from batchgen.inputs.steps.table_step import StepRow, TableStep, Taken
from batchgen.inputs.steps.values import hashed_number
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Features

    from batchgen.inputs.steps.stored_values import Storing

_MOST_PIECES = 1_000_000
"""The maximum number of pieces in a file, and of rows that `Pick` makes of one."""


@dataclass(frozen=True, kw_only=True)
class _Pieces(TableStep):
    """The base of both steps: its options map the name of a column to the pieces for it."""

    rest: ClassVar[str | None] = "pieces"

    pieces: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ConfigError("give at least one column with its pieces: style: [terse, formal]")
        for name, piece in self.pieces.items():
            if not isinstance(piece, (list, tuple, str)) or not piece:
                raise ConfigError(
                    f"{name} must be a list of pieces or the path of a file, got {piece!r}"
                )

    def made(self, features: Features) -> Features:
        """Return the columns of the pieces."""
        from datasets import Features

        return Features({name: feature for name, (_, feature) in self.lists.items()})

    def fingerprints(self) -> Mapping[str, str]:
        """Return digests of the files with pieces, by the names of their columns."""
        files = {name: piece for name, piece in self.pieces.items() if isinstance(piece, str)}
        return {name: SideTable(path).fingerprint for name, path in files.items()}

    @cached_property
    def lists(self) -> Mapping[str, tuple[Sequence[Any], Any]]:
        """The pieces of each column, and their feature."""
        return dict(self._lists())

    def _lists(self) -> Iterator[tuple[str, tuple[Sequence[Any], Any]]]:
        for name, piece in self.pieces.items():
            if isinstance(piece, str):
                yield name, _of_file(name, piece)
            else:
                yield name, (list(piece), _feature(name, list(piece)))


@dataclass(frozen=True, kw_only=True)
class Pick(_Pieces):
    """Adds one or more columns to each row, each with a random piece from a list:
    `Pick: {persona: personas.jsonl, style: [terse, formal]}`.

    The hash of seed, column and row id decides, so the pieces of a row do not depend on other rows.
    Each row of a file is a piece: the value of its column of the same name or of its only column,
    otherwise all its columns together.

    Attributes:
        pieces: the pieces of each new column, by its name: a list, or the path of a file. Keys that
            are not options of this step are names of such columns, too, as in the example.
        times: how many rows to make of each row. They get different pieces, and the id of the row
            with `#0`, `#1` … at its end. null makes one row and keeps its id.
        seed: a different number gives different pieces.
    """

    stable = True

    times: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.times is not None and not 1 <= self.times <= _MOST_PIECES:
            allowed = f"null or from 1 to {_MOST_PIECES:,}"
            raise ConfigError(f"times must be {allowed}, got {self.times!r}")

    @property
    def splits(self) -> bool:  # type: ignore[override]
        """Whether ids of rows get a suffix `#k`."""
        return self.times is not None

    def take(self, row: StepRow) -> Taken:
        """Return the picked values: `times` times, or once."""
        if self.times is None:
            return [self._picked(row.id)]
        return [self._picked(f"{row.id}#{k}") for k in range(self.times)]

    def _picked(self, row_id: str) -> dict[str, Any]:
        """Return a random piece for each column, which the row's id decides."""
        # The upper half of the 128-bit product of a 64-bit hash and n is a number from 0 to n - 1.
        return {
            name: pieces[hashed_number("pick", self.seed, name, row_id) * len(pieces) >> 64]
            for name, (pieces, _) in self.lists.items()
        }


@dataclass(frozen=True, kw_only=True)
class Cross(_Pieces):
    """Makes a row of each row for each combination of pieces, with `#0`, `#1` … at the end of its
    id: `Cross: {style: [faq, table], language: [en, de, fr]}` makes six rows of one. The last
    column changes fastest.

    Attributes:
        pieces: the pieces of each new column, by its name: a list, or the path of a file. Keys that
            are not options of this step are names of such columns, too, as in the example.
        most: a configuration with more combinations is refused.
    """

    stable = True
    splits = True

    most: int = 1000

    @cached_property
    def combinations(self) -> Sequence[Mapping[str, Any]]:
        """The values of the columns, in the order of the rows. Raises ConfigError if there are more
        than `most`."""
        lists = [pieces for pieces, _ in self.lists.values()]
        number = 1
        for pieces in lists:
            number *= len(pieces)
        if number > self.most:
            raise ConfigError(
                f"there are {number:,} combinations, more than most={self.most:,}: raise most, "
                "or draw some at random with Pick"
            )
        return [dict(zip(self.lists, values, strict=True)) for values in product(*lists)]

    def made(self, features: Features) -> Features:
        """Return the columns of the pieces. Raises ConfigError for too many combinations."""
        _ = self.combinations
        return super().made(features)

    def take(self, row: StepRow) -> Taken:
        """Return the values of all combinations."""
        return self.combinations


def _of_file(name: str, path: str) -> tuple[Sequence[Any], Any]:
    """Return the pieces in a file, and their feature. Raises ConfigError for too many, or one that
    is null."""
    table = SideTable(path)
    features = table.features(())
    column = name if name in features else next(iter(features)) if len(features) == 1 else None
    pieces = []
    for fields in table.rows(tuple(features) if column is None else (column,)):
        pieces.append(fields if column is None else fields[column])
        if len(pieces) > _MOST_PIECES:
            raise ConfigError(f"{name}: {path} has more than {_MOST_PIECES:,} pieces")
    if None in pieces:
        raise ConfigError(f"{name}: row {pieces.index(None)} of {Path(path).name} has no piece")
    feature = dict(features) if column is None else features[column]
    with of_table(path):
        _storing(name, feature).table([{name: piece} for piece in pieces])
    return pieces, feature


def _storing(name: str, feature: Any) -> Storing:
    from datasets import Features

    from batchgen.inputs.steps.stored_values import Storing  # it loads datasets

    return Storing(Features({name: feature}))


def _feature(name: str, pieces: Sequence[Any]) -> Any:
    """Infer the feature (a type of datasets) of the pieces in a list. Raises ConfigError if none
    holds all of them unchanged."""
    import pyarrow as pa
    from datasets import Features

    if None in pieces:
        raise ConfigError(f"{name}: a piece must not be null")
    try:
        kind = pa.array(pieces, from_pandas=False).type
        feature = Features.from_arrow_schema(pa.schema([(name, kind)]))[name]
        storing = _storing(name, feature)
        table = storing.table([{name: piece} for piece in pieces])
        stored = [storing.value(table, row)[name] for row in range(len(pieces))]
        # Parquet has no objects without keys, and 1 == 1.0, but not as text.
        unchanged = "struct<>" not in str(kind) and _json(stored) == _json(pieces)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        unchanged = False
    if not unchanged:
        raise ConfigError(
            f"{name}: pieces must all be of one type, which holds them unchanged, got "
            f"{pieces!r:.100}: beside fractions write 1 as 1.0, leave out keys that are null or "
            "{}, and write all else as text"
        )
    return feature


def _json(pieces: Sequence[Any]) -> str:
    """Return pieces as JSON text, which differs if a value or its type differs."""
    return json.dumps(pieces, sort_keys=True, default=str)
