"""Scores and comparisons as lines for people."""

import math

import numpy as np
import pytest

from batchgen.evals.scores.compared_jobs import comparison_lines
from batchgen.evals.scores.marks import Marks, Sample
from batchgen.evals.scores.paired_comparison import compare
from batchgen.evals.scores.scores import compute_scores
from batchgen.util.text.text_table import score_lines, table_text


def _names(values: list[str]) -> list[str]:
    """How the table names subsets with these values; none of its lines is long."""
    samples = [Sample(str(i), 0, i % 3 / 2, "k", subset=values[i // 5]) for i in range(200)]
    lines = score_lines(compute_scores(Marks.of(samples)))
    found = [name for name, _ in lines if name.startswith("  ")]
    assert max(map(len, table_text(lines).splitlines()[-len(found) :])) <= 80
    return found


SAME = "A question about the history of " * 9


@pytest.mark.parametrize("values", [
    [f"{SAME}{place}{SAME}\n\x1b[2J" for place in range(40)],
    [f"{place} {SAME}" for place in range(40)],
    [f"{SAME} {place}" for place in range(40)],
    [*(f"history {place}" for place in range(39)), SAME],
    [*(f"{SAME}{place}" for place in range(20)), *(f"{SAME}{place}{SAME}" for place in range(20))],
])  # fmt: skip
def test_long_names_of_subsets_stay_apart_and_in_80_columns(values: list[str]) -> None:
    found = _names(values)
    assert len(set(found)) == 40
    assert all(name.isprintable() for name in found)


def test_names_of_subsets_are_marked_only_where_they_would_be_equal() -> None:
    found = _names(sorted(f"{place:02} {SAME}" for place in range(40)))
    assert found[7] == "  07 A question ab… the history of"
    found = _names(sorted([f"{SAME}{place:02}{SAME}" for place in range(39)] + ["short"]))
    assert found[3] == "  A question abou…he history of #4" and found[39] == "  short"


def test_copies_cannot_tell_how_sure_a_score_is() -> None:
    copies = [Sample(str(q), k, float(q > 3), "k") for q in range(10) for k in range(4)]
    lines = dict(score_lines(compute_scores(Marks.of(copies))))
    assert lines["score"].endswith("same questions unknown (all samples of a question agree)")
    found = compare(Marks.of(copies), Marks.of(copies[4:]))
    text = table_text(comparison_lines(found))
    assert "uncertainty unknown (same questions)" in text and "nan" not in text


def test_one_question_cannot_tell_about_others() -> None:
    lines = dict(score_lines(compute_scores(Marks.of([Sample("0", 0, 1.0, "5")]))))
    assert lines["score"] == "100.0%, new questions unknown (it needs two questions)"


def test_cut_texts_are_no_texts_without_a_mark() -> None:
    cut = [Sample(str(i), 0, 1.0, "5", truncated=i < 7) for i in range(10)]
    lines = dict(score_lines(compute_scores(Marks.of(cut))))
    of = "of 10 answers"
    assert lines[of] == "0.0% no answer found, 70.0% truncated (70.0% of all have an answer)"
    assert lines["not marked"] == "0.0% error, 0.0% grade error"
    assert lines["score"].startswith("100.0%")
    lines = dict(score_lines(compute_scores(Marks.of(cut), None, "wrong")))
    assert lines["score"].startswith("30.0%")
    assert "70.0% truncated (counted as wrong)" in lines[of]
    lines = dict(score_lines(compute_scores(Marks.of(cut), None, "left_out")))
    assert "70.0% truncated (left out)" in lines[of]


@pytest.mark.parametrize(("losses", "n"), [(4, 250), (5, 250), (6, 250), (6, 5000)])
def test_what_is_printed_of_p_and_interval_agrees(losses: int, n: int) -> None:
    """Four questions of 250 that all changed in one way had −1.6 to −0.0 beside p = 0.125."""
    a = Marks.of([Sample(str(i), 0, 1.0, "k") for i in range(n)])
    b = Marks.of([Sample(str(i), 0, float(i >= losses), "k") for i in range(n)])
    found = compare(a, b)
    line = dict(comparison_lines(found))["B − A"]
    low, _, high = line.split(", ")[1].split(" ")
    p = float(line.split("p = ")[1].split(" ")[0])
    assert (float(high) < 0) == (p < 0.05) == (losses > 5)
    assert float(low) < 0 and math.isclose(found.p, p, abs_tol=6e-4)


def test_one_cluster_has_no_interval() -> None:
    marks = [
        Marks.of([Sample(str(i), 0, m, "k", cluster="c") for i in range(3)]) for m in (0.0, 1.0)
    ]
    text = dict(comparison_lines(compare(*marks)))["B − A"]
    assert text == "+100.0 points, uncertainty unknown (new questions)"
    assert np.isnan(compare(*marks).p)
