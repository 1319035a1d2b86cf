"""What is left of a running job, on jobs that are played with known lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from batchgen.jobs.generation.remaining import AnswerLengths, TimeLeft

Ints = npt.NDArray[np.int64]
MOST = 400
LENGTHS: dict[str, Callable[[np.random.Generator], Ints]] = {
    "uniform": lambda draws: draws.integers(1, MOST + 1, 2000),
    "normal": lambda draws: np.clip(draws.normal(200, 40, 2000).round().astype(int), 1, MOST),
    "short or at the limit": lambda draws: np.where(draws.random(2000) < 0.7, 30, MOST),
    "exponential": lambda draws: np.clip(draws.exponential(90, 2000).astype(int) + 1, 1, MOST),
}


def test_nothing_is_known_before_the_first_row() -> None:
    assert AnswerLengths(MOST).remaining(np.array([3, 4]), 10) is None


def test_without_running_rows_it_is_the_mean_of_the_finished() -> None:
    lengths = AnswerLengths(MOST)
    for length in (10, 20, 60, MOST):
        lengths.add(length)
    left = lengths.remaining(np.empty(0, np.int64), 5)
    assert left is not None
    assert left.tokens == pytest.approx(5 * (10 + 20 + 60 + MOST) / 4)


def test_a_row_that_runs_has_what_longer_rows_had_to_come() -> None:
    lengths = AnswerLengths(MOST)
    for length in (10, 10, 50, 90):
        lengths.add(length)
    left = lengths.remaining(np.array([30]), 0)
    assert left is not None
    assert left.tokens == pytest.approx((20 + 60) / 2)


def test_rows_that_all_reach_the_limit_have_it_to_come() -> None:
    lengths = AnswerLengths(MOST)
    lengths.add(MOST)
    left = lengths.remaining(np.array([100, 399]), 1)
    assert left is not None
    assert left.tokens == pytest.approx(300 + 1 + MOST)


def test_beyond_the_longest_finished_row_rows_end_as_often_as_before() -> None:
    lengths = AnswerLengths(10**5)
    for length in range(1, 101):
        lengths.add(length)
    left = lengths.remaining(np.array([100] * 10), 0)
    assert left is not None
    # Of the rows of 81 to 100 tokens 20 ended, over as many tokens as they and the 10 had there.
    tokens = sum(range(20, 0, -1)) + 21 * 10
    assert left.tokens == pytest.approx(10 * tokens / 20, rel=0.15)


@pytest.mark.parametrize("name", LENGTHS)
def test_the_mean_is_right_while_only_short_rows_have_finished(name: str) -> None:
    """256 rows started together and run for 120 steps: the mean of those that ended is far off."""
    draws = np.random.default_rng(3)
    every = LENGTHS[name](draws)
    now = 200 if name == "normal" else 120
    batch = every[:256]
    lengths = AnswerLengths(MOST)
    for length in batch[batch <= now]:
        lengths.add(int(length))
    running = np.full(int((batch > now).sum()), now)
    found = lengths.remaining(np.append(running, 0), 0)
    waiting_more = lengths.remaining(np.append(running, 0), 1)
    assert found is not None and waiting_more is not None
    mean = waiting_more.tokens - found.tokens
    naive = float(batch[batch <= now].mean())
    truth = float(every.mean())
    assert abs(mean - truth) < 0.8 * abs(naive - truth)
    assert mean == pytest.approx(truth, rel=0.2)


@pytest.mark.parametrize("waiting", [0, 50])
def test_the_last_row_is_longer_than_the_mean_by_the_drain(waiting: int) -> None:
    """Against 2,000 draws of rests of rows that run now, or that one meets at any moment."""
    draws = np.random.default_rng(7)
    lengths = AnswerLengths(MOST)
    every = draws.integers(1, MOST, 20_000)
    for length in every:
        lengths.add(int(length))
    running = draws.integers(0, 100, 16)
    left = lengths.remaining(running, waiting)
    assert left is not None
    if waiting:
        chosen = draws.choice(every, (2000, 16), p=every / every.sum())
        rests = chosen * draws.random(chosen.shape)
    else:
        rests = np.stack([draws.choice(every[every > x], 2000) - x for x in running], axis=1)
    drain = float((rests.max(axis=1) - rests.mean(axis=1)).mean())
    assert left.drain == pytest.approx(drain, rel=0.04)


def played(
    lengths: Ints, places: int, seconds_of: Callable[[int], float], batch_share: float
) -> list[tuple[float, float, float | None]]:
    """Play a job step by step: (share done, seconds that are truly left, what was said)."""
    now, generated, steps = 0.0, 0, 0
    running: list[list[int]] = []
    waiting = lengths.tolist()
    left = TimeLeft(len(lengths), MOST, batch_share, 0.0)
    said: list[tuple[float, float | None]] = []
    while waiting or running:
        while waiting and len(running) < places:
            running.append([waiting.pop(0), 0])
        now += seconds_of(len(running))
        for row in running:
            row[1] += 1
        generated += len(running)
        for row in running:
            if row[1] >= row[0]:
                left.add(row[0])
        running = [row for row in running if row[1] < row[0]]
        done = np.array([row[1] for row in running], np.int64)
        steps += 1
        if steps % 8 == 0:  # a terminal does not ask after every step either
            said.append((now, left.seconds(now, generated, done)))
    return [(time / now, now - time, text) for time, text in said]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_time_left_of_a_played_job_is_about_right(name: str, device: str) -> None:
    """A step of a GPU takes as long for few rows as for many, that of a CPU goes with its rows."""
    draws = np.random.default_rng(5)
    lengths = LENGTHS[name](draws)[:600]
    seconds_of = (lambda rows: 0.01) if device == "gpu" else (lambda rows: 0.001 * rows)
    moments = played(lengths, 64, seconds_of, 1.0 if device == "gpu" else 0.0)
    checked = [(true, said) for share, true, said in moments if 0.25 < share < 0.8]
    errors = [abs(said / true - 1) for true, said in checked if said is not None]
    assert len(errors) == len(checked)
    assert np.median(errors) < 0.12 and max(errors) < 0.8, (np.median(errors), max(errors))


def test_rows_without_an_answer_are_counted_and_teach_nothing() -> None:
    left = TimeLeft(10, MOST, 0.0, 0.0)
    for _ in range(5):
        left.add(None)
    assert left.seconds(1.0, 50, np.array([10])) is None
    left.add(20)
    assert left.seconds(2.0, 100, np.empty(0, np.int64)) == pytest.approx(4 * 20 / 50, rel=0.01)
