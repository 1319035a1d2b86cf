"""The page about a sweep."""

from pathlib import Path

from batchgen.evals.arms.arm_table import Arm, arm_table
from batchgen.evals.scores.marks import Marks, Sample
from batchgen.pages.report.sweep_report import sweep_html


def test_the_headline_names_the_arm_that_the_others_are_compared_with(tmp_path: Path) -> None:
    lost = Arm("lost", without="the job is not complete")
    marks = Marks.of([Sample(f"q{q}", 0, float(q % 2), str(q)) for q in range(4)], bounded=True)
    html = sweep_html(tmp_path, "sweep", arm_table([lost, Arm("base", marks=marks)]))
    assert "4 answers of B" in html
    assert "answers of" not in sweep_html(tmp_path, "sweep", arm_table([lost]))
