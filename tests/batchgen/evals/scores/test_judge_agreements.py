"""How marks of a judge are paired with known ones: by row, and a pair's two orders as one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.scores import judge_agreements
from batchgen.evals.scores.agreement import Agreement
from batchgen.util.errors import ConfigError

ROWS = [
    # the answer's number, the order, the marks of both answers, and that of the judge
    *[(0, order, 1.0, 0.0, 1.0) for order in ("ab", "ba")],
    *[(1, order, 0.0, 1.0, 0.0) for order in ("ab", "ba")],
    (2, "ab", 1.0, 0.0, 1.0),  # by the order alone
    (2, "ba", 1.0, 0.0, 0.0),
    *[(3, order, 1.0, 1.0, 1.0) for order in ("ab", "ba")],  # no answer is the better one
    (4, "ab", 0.0, 1.0, 1.0),
    (4, "ba", 0.0, 1.0, 0.5),
    (5, "ab", 1.0, 0.0, None),  # the judge said nothing in one order
    (5, "ba", 1.0, 0.0, 1.0),
]


class Job:
    """What the agreement needs of a job."""

    path = Path("job")
    given = "job"
    columns = ("row_id", "sample_index", "source", "mark", "other_mark")

    def batches(self, columns: list[str]) -> list[pa.RecordBatch]:
        rows = [
            {
                "row_id": f"r{number}#0#{place % 2}",
                "sample_index": 0,
                "source": {"row_id": f"r{number}", "sample_index": 0},
                "mark": mark,
                "other_mark": other,
            }
            for place, (number, _, mark, other, _) in enumerate(ROWS)
        ]
        return [pa.RecordBatch.from_pylist(rows).select(columns)]


def found(monkeypatch: pytest.MonkeyPatch, known: str, steps: str) -> Agreement:
    def samples(path: Path, config: ScoreConfig) -> Any:
        ids = [f"r{number}#0#{place % 2}" for place, (number, *_) in enumerate(ROWS)]
        marks = [row[4] for row in ROWS]
        table = pa.table({"row_id": ids, "sample_index": [0] * len(ids), "mark": marks})
        return SimpleNamespace(table=lambda: table, grades=SimpleNamespace(steps=steps))

    monkeypatch.setattr(judge_agreements, "Samples", samples)
    job: Any = Job()
    return judge_agreements.judge_agreements(job, ScoreConfig(), known).marks


PAIRS = '[{"_target_": "batchgen.evals.graders.verdict.Verdict", "flip": {"order": "ba"}}]'
PREFERRED = "(1 + mark - other_mark) / 2"


def test_both_orders_of_a_pair_are_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # r0 and r1 alike, r4 not; r2, r3 and r5 left out
    assert found(monkeypatch, PREFERRED, PAIRS) == Agreement(1, 1, 0, 1, 3)


def test_other_answers_count_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, "mark", "[]") == Agreement(6, 1, 1, 2, 2)


def test_mistakes_in_the_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, says in (
        ("marks", "there is no column 'marks'"),
        ("mark + ", "--agreement"),
        ("mark / 0", "row r0#0#0"),
        ("'x'", "no answer has a mark in both"),
    ):
        with pytest.raises(ConfigError, match=says):
            found(monkeypatch, known, "[]")
