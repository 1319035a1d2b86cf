"""The progress of a job over time, in a bounded number of points."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 240
_FIRST_INTERVAL = 0.25  # seconds
_IN_LINE = 6  # points in a line of the file
Point = tuple[float, int, int]
"""Seconds for which engines have run, finished output rows, and generated tokens."""


class Timeline:
    """At most MOST_POINTS points of a job, about equally far apart in time.

    When there are more, every second point is dropped, and from then on points are added half as
    often. A job that is resumed in another process keeps the points of the earlier processes.
    """

    def __init__(self, points: Sequence[Sequence[float]] = (), rows: int = 0) -> None:
        """Continue the `points` of earlier processes, which had written `rows` output rows."""
        self._points: list[Point] = [(s, int(rows), int(tokens)) for s, rows, tokens in points]
        self._seconds, _, self._tokens = self._points[-1] if self._points else (0.0, 0, 0)
        self._rows = rows
        self._interval = max(_FIRST_INTERVAL, self._seconds / MOST_POINTS)
        self._next = 0.0

    def due(self, seconds: float) -> bool:
        """Whether it is time for a new point, `seconds` after the engine of this process began."""
        return seconds >= self._next

    def add(self, seconds: float, rows: int, tokens: int) -> None:
        """Add a point.

        Args:
            seconds: since the engine of this process began.
            rows, tokens: output rows and tokens that this process has finished and generated.
        """
        self._points.append(
            (round(self._seconds + seconds, 3), self._rows + rows, self._tokens + tokens)
        )
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::-2][::-1]  # the last point stays
            self._interval *= 2
        self._next = seconds + self._interval

    @property
    def points(self) -> list[Point]:
        """All points, the first one first."""
        return list(self._points)


def metrics_text(values: Mapping[str, Any]) -> str:
    """The text of metrics.json: indented JSON, with several points of `timeline` in a line."""
    rest = {key: value for key, value in values.items() if key != "timeline"}
    text = json.dumps(rest, indent=2, ensure_ascii=False)
    points = [json.dumps(point) for point in values.get("timeline", ())]
    lines = [", ".join(points[i : i + _IN_LINE]) for i in range(0, len(points), _IN_LINE)]
    timeline = "".join(f"\n    {line}," for line in lines).removesuffix(",")
    return text.removesuffix("\n}") + f',\n  "timeline": [{timeline}\n  ]\n}}\n'
