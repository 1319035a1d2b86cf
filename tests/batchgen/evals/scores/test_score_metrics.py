"""Metrics against their definitions, counted over all subsets of samples."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.evals.scores.marks import Marks, Sample
from batchgen.evals.scores.score_metrics import avg_at, maj_at, pass_all, pass_at
from batchgen.evals.scores.scores import compute_scores, default_ks
from batchgen.util.errors import ConfigError


def table(*questions: str) -> Marks:
    """A mark table in which a question is a word of samples.

    `x` is wrong, `o` right, `-` without an answer, `?` not known, and a digit gives that answer, of
    which 1 is right.
    """
    return Marks.of(
        Sample(
            str(place),
            index,
            None if sign == "?" else float(sign in "o1"),
            None if sign in "-?" else sign,
            grade_error="timeout" if sign == "?" else None,
            truncated=sign == "-",
        )
        for place, word in enumerate(questions)
        for index, sign in enumerate(word)
    )


def test_a_k_far_above_the_samples_takes_no_time() -> None:
    marks = table("oox", "o")
    for metric in (pass_at, pass_all, maj_at):
        assert np.isnan(metric(marks, 10**30)).all()


WORDS = st.lists(st.text("xo-?", min_size=1, max_size=7), min_size=1, max_size=4)


@given(WORDS, st.integers(1, 7))
def test_pass_metrics_are_means_over_all_subsets_of_k_samples(words: list[str], k: int) -> None:
    marks = table(*words)
    for word, one, every in zip(words, pass_at(marks, k), pass_all(marks, k), strict=True):
        draws = [set(draw) for draw in combinations(word.replace("?", ""), k)]
        if not draws:
            assert np.isnan(one) and np.isnan(every)
            continue
        assert one == pytest.approx(np.mean(["o" in draw for draw in draws]))
        assert every == pytest.approx(np.mean([draw == {"o"} for draw in draws]))


def test_pass_at_k_is_exact_where_binomials_are_huge() -> None:
    marks = table("o" * 100 + "x" * 900)
    wanted = 1 - Fraction(comb(900, 50), comb(1000, 50))
    assert pass_at(marks, 50)[0] == pytest.approx(float(wanted), rel=1e-12)


SAMPLES = st.tuples(st.integers(0, 3), st.sampled_from("xo12-?"), st.booleans())


@given(st.lists(SAMPLES, min_size=1, max_size=12))
def test_cut_texts_count_as_what_is_asked_for(given: list[tuple[int, str, bool]]) -> None:
    """As if the answers themselves were wrong and without a vote, or could not be graded."""
    drawn = []
    for index, (question, sign, cut) in enumerate(given):
        mark = None if sign == "?" else float(sign in "o1")
        key = None if sign in "-?" else sign
        error = "timeout" if sign == "?" else None
        drawn.append(Sample(str(question), index, mark, key, cut, grade_error=error))
    marks = Marks.of(drawn)
    assert marks.counting_cut_texts("as_marked") is marks
    for count_as in ("wrong", "left_out"):
        mark = 0.0 if count_as == "wrong" else None
        instead = [
            s._replace(mark=None if s.mark is None else mark, key=None) if s.truncated else s
            for s in drawn
        ]
        found, wanted = compute_scores(marks, None, count_as), compute_scores(Marks.of(instead))
        assert found["cut_texts"] == count_as and found["samples"] == len(given)
        # What is said of the texts themselves stays.
        assert found["rates"] == compute_scores(marks)["rates"]
        for scores in (found, wanted):
            del scores["rates"], scores["cut_texts"]
        assert found == wanted


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("1", 1),
        ("2", 0),
        ("112", 1),
        ("122", 0),
        ("12", 0.5),  # a tie
        ("1123223", 0),
        ("112233", 1 / 3),
        ("1---", 1),  # no answer is no vote
        ("---", 0),
        ("1?2?2", 0),
        ("1?", 1),
    ],
)
def test_majority_of_all_samples(word: str, wanted: float) -> None:
    marks = table(word)
    assert maj_at(marks, int(marks.num_samples[0]))[0] == pytest.approx(wanted)


def test_majority_of_fewer_samples_is_the_mean_of_full_runs() -> None:
    assert maj_at(table("1122231"), 3)[0] == pytest.approx(0.5)
    assert np.isnan(maj_at(table("11"), 3)[0])


def test_mean_marks_leave_out_what_is_not_known() -> None:
    means = avg_at(table("oo?x", "??", "-x"))
    assert means[0] == pytest.approx(2 / 3) and np.isnan(means[1]) and means[2] == 0


def test_score_has_rates_and_bounds_beside_the_mean() -> None:
    values = compute_scores(table("oo?x", "o--x"), ks=[1, 4, 9])
    assert values["questions"] == 2 and values["samples"] == 8 and values["marked"] == 7
    assert values["avg"]["value"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert values["rates"] == {
        "no_answer": 0.25,
        "truncated": 0.25,
        "error": 0.0,
        "grade_error": 0.125,
        "truncated_with_answer": 0.0,
    }
    assert values["bounds"] == [pytest.approx(0.375), pytest.approx(0.5)]
    assert values["pass@4"]["questions"] == 1 and values["pass@4"]["value"] == 1
    assert values["pass@9"] == {"value": None, "questions": 0, "population": None}


def test_marks_of_cut_texts_are_counted() -> None:
    """A cut text without an answer is wrong, and one that could not be graded has no mark."""
    cut = [("a", "1", 1.0), ("b", "2", 0.0), ("c", None, 0.0), ("d", "3", None), ("e", "1", 1.0)]
    samples = [
        Sample(
            row_id,
            0,
            mark,
            key,
            truncated=row_id != "e",
            grade_error="timeout" * (mark is None) or None,
        )
        for row_id, key, mark in cut
    ]
    rates = compute_scores(Marks.of(samples))["rates"]
    assert rates["truncated"] == 0.8 and rates["truncated_with_answer"] == 0.4


def test_an_error_of_the_row_is_no_missing_answer() -> None:
    marks = Marks.of(
        [Sample("a", 0, None, None, error="prompt_too_long"), Sample("a", 1, 1.0, "1")]
    )
    rates = compute_scores(marks)["rates"]
    assert rates["error"] == 0.5 and rates["no_answer"] == 0 and rates["grade_error"] == 0


def test_subsets_are_scored_alone() -> None:
    samples = [Sample(str(i), 0, float(i < 3), "k", subset="ab"[i % 2]) for i in range(4)]
    values = compute_scores(Marks.of(samples))
    assert values["avg"]["value"] == 0.75
    assert {name: part["avg"]["value"] for name, part in values["subsets"].items()} == {
        "a": 1.0,
        "b": 0.5,
    }


def test_order_of_samples_does_not_matter() -> None:
    samples = [
        Sample(f"{q}", i, float((q * i) % 3 == 0), f"{q * i % 3}")
        for q in range(5)
        for i in range(4)
    ]
    reversed_marks = Marks.of(reversed(samples))
    assert (
        compute_scores(reversed_marks)["maj@2"]["value"]
        == compute_scores(Marks.of(samples))["maj@2"]["value"]
    )


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([], "no graded rows"),
        ([Sample("a", 0, 1.0, "x"), Sample("a", 0, 0.0, "x")], "twice"),
        ([Sample("a", 0, 1.5, "x")], "from 0 to 1"),
    ],
)
def test_tables_that_make_no_sense_are_refused(samples: list[Sample], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Marks.of(samples)


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        compute_scores(table("o"), ks=[0])


def test_default_sizes_are_powers_of_two_and_the_number_of_samples() -> None:
    assert default_ks(table("oooooo")) == (1, 2, 4, 6)
