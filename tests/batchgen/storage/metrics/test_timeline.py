"""The points of a job over time: few, equally far apart, and kept when the job goes on."""

import json
from itertools import pairwise

from batchgen.storage.metrics.timeline import MOST_POINTS, Timeline, metrics_text


def run(timeline: Timeline, seconds: float, step: float = 0.1) -> int:
    """Let a job run at 10 rows and 100 tokens a second; returns how often a point was added."""
    added = 0
    for i in range(round(seconds / step) + 1):
        now = i * step
        if timeline.due(now):
            timeline.add(now, round(10 * now), round(100 * now))
            added += 1
    return added


def test_points_stay_few_and_equally_far_apart() -> None:
    timeline = Timeline()
    assert run(timeline, 3600) < 2000
    points = timeline.points
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
    gaps = [after[0] - before[0] for before, after in pairwise(points)]
    assert max(gaps) <= 4 * min(gaps)
    assert points[-1][0] > 3500
    assert all(abs(tokens - 100 * seconds) < 1 for seconds, _, tokens in points)


def test_a_job_goes_on_with_the_points_that_it_has() -> None:
    first = Timeline()
    run(first, 100)
    second = Timeline(json.loads(json.dumps(first.points)), rows=1000)
    assert second.points == first.points
    run(second, 100)
    seconds, rows, tokens = second.points[-1]
    assert (round(seconds), round(rows, -1), round(tokens, -2)) == (200, 2000, 20_000)
    assert sorted(second.points) == second.points


def test_the_file_is_json_and_has_few_lines() -> None:
    timeline = Timeline()
    run(timeline, 60)
    values = {"status": "complete", "attempts": [{"rows": 3}], "timeline": timeline.points}
    text = metrics_text(values)
    assert json.loads(text) == json.loads(json.dumps(values))
    assert text.endswith("}\n") and text.count("\n") < 60
    assert json.loads(metrics_text({"a": 1, "timeline": []})) == {"a": 1, "timeline": []}
    assert json.loads(metrics_text({"a": 1})) == {"a": 1, "timeline": []}
