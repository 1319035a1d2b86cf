"""The comparison of two runs."""

import math

import numpy as np
import pytest
from scipy import stats

from batchgen.errors import ConfigError
from batchgen.scoring.compare import Exam, compare, exam_differences, sign_flip_p
from batchgen.scoring.marks import Floats, Marks, Sample


def run(rows: Floats, ids: str | None = None, cluster_of: int | None = None) -> Marks:
    """Marks [Q, K]; question q has the id ids[q], or its number."""
    return Marks.of(
        Sample(
            ids[q] if ids else str(q),
            k,
            float(mark),
            str(mark),
            cluster=None if cluster_of is None else str(q // cluster_of),
        )
        for q, row in enumerate(rows)
        for k, mark in enumerate(row)
    )


def two_runs(n: int, k: int, seed: int = 0) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    p = rng.beta(4, 1, (n, 1))
    a, b = rng.random((n, k)) < p, rng.random((n, k)) < np.minimum(p + 0.05, 1)
    return a.astype(np.float64), b.astype(np.float64)


def test_paired_figures_are_those_of_a_paired_t_test() -> None:
    a, b = two_runs(60, 4)
    found = compare(run(a), run(b))
    test = stats.ttest_rel(b.mean(1), a.mean(1))
    interval = test.confidence_interval(0.95)
    assert found.difference.estimate / found.difference.se == pytest.approx(test.statistic)
    assert found.difference.low == pytest.approx(interval.low)
    assert found.difference.high == pytest.approx(interval.high)
    t = stats.t.ppf(0.975, 59) + stats.t.ppf(0.8, 59)
    assert found.detectable == pytest.approx(t * found.difference.se)


def test_same_questions_figures_are_the_closed_form() -> None:
    a, b = two_runs(60, 4)
    found = compare(run(a), run(b)).same_questions
    variances = [(m.mean(1) * (1 - m.mean(1)) / 3).sum() for m in (a, b)]
    assert found is not None and found.se == pytest.approx(math.sqrt(sum(variances)) / 60)
    p = compare(run(a), run(b)).same_questions_p
    assert p == pytest.approx(2 * stats.norm.sf(abs(found.estimate) / found.se), rel=1e-6)
    assert compare(run(a[:, :1]), run(b[:, :1])).same_questions_p is None


def test_few_differences_have_the_exact_p() -> None:
    differences = np.array([0.5, 0.25, -0.25, 0.75, 0, 0, 1.0])
    wanted = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    assert sign_flip_p(differences, np.arange(7)) == pytest.approx(wanted)


def test_many_differences_have_nearly_the_exact_p() -> None:
    rng = np.random.default_rng(3)
    differences = rng.integers(-4, 5, 50) / 4 + 0.06
    found = sign_flip_p(differences, np.arange(50))
    wanted = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=20_000, rng=rng
    ).pvalue
    assert found == pytest.approx(wanted, abs=0.015)
    assert found == sign_flip_p(differences, np.arange(50))


def test_p_is_uniform_where_nothing_differs() -> None:
    rng = np.random.default_rng(0)
    found = [sign_flip_p(rng.normal(size=9), np.arange(9)) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 1e-3


def test_questions_of_a_cluster_are_flipped_together() -> None:
    differences = np.full(8, 0.5)
    assert sign_flip_p(differences, np.arange(8)) == 2 / 2**8
    assert sign_flip_p(differences, np.arange(8) // 4) == 0.5


def test_equal_runs_do_not_differ() -> None:
    a, _ = two_runs(30, 4)
    found = compare(run(a), run(a))
    assert found.p == 1 and found.difference.estimate == 0 and len(found.ties) == 30
    assert not found.wins and not found.losses


def test_questions_are_joined_by_id() -> None:
    a = run(np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), "pqrx")
    b = run(np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), "rqpy")
    found = compare(a, b)
    assert [(q.row_id, q.a, q.b) for q in found.wins] == [("q", 0.0, 0.5), ("r", 0.5, 1.0)]
    assert [q.row_id for q in found.losses] == ["p"]
    assert (found.only_a, found.only_b) == (("x",), ("y",))


def test_runs_without_a_common_question_are_refused() -> None:
    with pytest.raises(ConfigError, match="no question"):
        compare(run(np.ones((1, 1)), "a"), run(np.ones((1, 1)), "b"))


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    shift = np.repeat(rng.random((10, 1)) < 0.5, 6, axis=0)
    a, b = np.zeros((60, 2)), shift * np.ones(2)
    alone, together = compare(run(a), run(b)), compare(run(a, cluster_of=6), run(b))
    assert together.difference.se > 2 * alone.difference.se and together.p > alone.p


def test_exams_are_compared_over_common_rows() -> None:
    one = Exam({"a": "1", "b": "2", "c": "3"}, {"a": "A", "b": "B", "c": "C"})
    assert exam_differences(one, Exam({"a": "1", "b": "2"}, {"a": "A", "b": "B"})) == ()
    prompt, target = exam_differences(one, Exam({"a": "9", "b": "2"}, {"a": "A", "b": "D"}))
    assert "1 of 3 rows have another prompt (a)" in prompt and "another target (b)" in target
