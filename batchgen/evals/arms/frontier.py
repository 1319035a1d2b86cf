"""A chart of the arms' scores over another of their numbers, such as tokens_per_forward (`batchgen
compare --x`). An *arm* is one line of a comparison: a job, or jobs that differ only in their
seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.evals.arms.arm_table import ArmTable
from batchgen.evals.arms.arm_values import letter, shown_value
from batchgen.evals.scores.intervals import Interval
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names
from batchgen.util.text.text_table import number_text

_WIDTH, _HEIGHT = 64, 12
"""Characters in a line of the chart, and its lines."""


@dataclass(frozen=True)
class Point:
    """An arm in the chart.

    Attributes:
        letter: its short label.
        name: its name.
        x: its number.
        score: its score.
    """

    letter: str
    name: str
    x: float
    score: Interval

    @property
    def low(self) -> float:
        return self.score.estimate if math.isnan(self.score.low) else self.score.low

    @property
    def high(self) -> float:
        return self.score.estimate if math.isnan(self.score.high) else self.score.high


@dataclass(frozen=True)
class Frontier:
    """The points of a chart.

    Attributes:
        x: the name of the number.
        column: the scored column.
        points: the arms in ascending order of the number.
        without: for each arm without a point, the reason.
    """

    x: str
    column: str
    points: tuple[Point, ...]
    without: tuple[str, ...] = ()


def frontier(table: ArmTable, x: str) -> Frontier:
    """Make the chart of the arms of a table over the metric `x`.

    Raises:
        ConfigError: no arm has such a number, or none that can be compared.
    """
    scored = [(letter(at), row) for at, row in enumerate(table.rows) if row.score is not None]
    if not scored:
        raise ConfigError(
            f"--x {x}: no arm has a score, so there is no chart: leave --x out, and grade the jobs "
            "(batchgen grade OUT)"
        )
    numbers = sorted({key for _, row in scored for key in row.arm.metrics})
    if x not in numbers:
        raise ConfigError(
            f"--x {x}: no arm has such a number in metrics.json or config.yaml: choose among "
            f"{some_names(numbers, x)}"
        )
    points, without = [], []
    for name, row in scored:
        value = row.arm.number(x)
        if value is not None and row.score is not None:
            points.append(Point(name, row.arm.name, value, row.score))
        elif x in row.arm.metrics:
            why = "it shared its machine with another arm, so its times say little"
            without.append(f"{name} has no {x} here: {why}")
        else:
            without.append(f"{name} has no {x}")
    if not points:
        raise ConfigError(f"--x {x}: " + "; ".join(without))
    points.sort(key=lambda point: (point.x, point.letter))
    return Frontier(x, table.column, tuple(points), tuple(without))


def frontier_lines(frontier: Frontier) -> list[str]:
    """The chart for the terminal: each arm's letter at its score, with its interval, over x."""
    points = frontier.points
    low, high = min(p.low for p in points), max(p.high for p in points)
    # If all scores are equal, the margin is a part of them; if all are 0, any margin does.
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - margin, high + margin
    indices = _columns([point.x for point in points])
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]

    def line(value: float) -> int:
        return round((high - value) / (high - low) * (_HEIGHT - 1))

    for point, index in zip(points, indices, strict=True):
        for at in range(line(point.high), line(point.low) + 1):
            grid[at][index] = "│"
        # The label of arm 27 and later has two digits, and there is room for the last.
        grid[line(point.score.estimate)][index] = point.letter[-1]
    as_text = shown_value(frontier.column)
    marks = {line(v): as_text(v) for v in (high - margin, (low + high) / 2, low + margin)}
    side = max(map(len, marks.values()))
    lines = [f"{marks.get(at, ''):>{side}} ┤{''.join(row).rstrip()}" for at, row in enumerate(grid)]
    first, last = number_text(points[0].x), number_text(points[-1].x)
    ends = first if first == last else f"{first}{last:>{_WIDTH - len(first)}}"
    lines += [f"{'':>{side}} └{'─' * _WIDTH}", f"{'':>{side}}  {ends}"]
    return [*lines, f"{'':>{side}}  {frontier.x:^{_WIDTH}}".rstrip(), *frontier.without]


def _columns(values: Sequence[float]) -> list[int]:
    """The column of each of some ascending values. Two columns in use have a free one between them:
    a value that is too near to the one before it moves to the right, or at the end of the line to
    the left."""
    span = values[-1] - values[0]
    indices: list[int] = []
    for value in values:
        index = round((value - values[0]) / span * (_WIDTH - 1)) if span else _WIDTH // 2
        indices.append(max(index, indices[-1] + 2) if indices else index)
    for at in range(len(indices) - 1, -1, -1):
        limit = _WIDTH - 1 if at == len(indices) - 1 else indices[at + 1] - 2
        indices[at] = max(min(indices[at], limit), 0)
    return indices
