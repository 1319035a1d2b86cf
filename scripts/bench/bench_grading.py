"""Time the grading of answers: whole numbers and mathematics.

    python scripts/bench/bench_grading.py [--integers 100000] [--math 4000]

The answers stand at the end of texts of about 1,100 characters. Printed are the microseconds of one
answer and the answers of a second, by the clock and by the time that processors spent, which other
programs on the machine disturb less. The mathematics is a mix of equal texts, equal values and
wrong answers, with numbers that no other row has, so that nothing is remembered.
"""

import argparse
import os
import time
from collections.abc import Iterator
from itertools import cycle, islice

from batchgen.grading.extract import Extract
from batchgen.grading.grade import Grade
from batchgen.grading.grade_rows import Grader

FILLER = "the next step follows from the one before it. " * 24
MATHEMATICS = [
    (r"\frac{1}{N}", r"\frac{1}{N}"),
    (r"\frac{1}{N}", "1/N"),
    ("N", "N1"),
    (r"\sqrt{4 \cdot N}", r"2\sqrt{N}"),
    (r"N\pi", "9.4"),
    ("x^2+N", "N+x^2"),
    (r"\left(N,\frac{\pi}{2}\right)", r"(N, \pi/2)"),
    ("6-Ni", "6-Ni"),
    (r"\frac{N}{4}", "N/4"),
    (r"\{1,N\}", r"\{N,1\}"),
    ("p-Nq", "q-Np"),
    (r"\text{Evelyn}", "Evelyn"),
    ("[-2,N]", "[-2,N)"),
    (r"\frac{\sqrt{N}}{2}", r"\sqrt{N}/2"),
    ("N", "N"),
    (r"N^\circ", "N"),
]
"""Targets and answers, in which N is the row's number."""

Rows = Iterator[tuple[str, dict[str, str]]]


def integer_rows(count: int) -> Rows:
    return ((rf"{FILLER}So \boxed{{{i % 1000}}}.", {"target": f"{i % 999}"}) for i in range(count))


def math_rows(count: int) -> Rows:
    pairs = enumerate(islice(cycle(MATHEMATICS), count), 2)
    return (
        (
            rf"{FILLER}So \boxed{{{answer.replace('N', str(number))}}}.",
            {"target": target.replace("N", str(number))},
        )
        for number, (target, answer) in pairs
    )


def processor_seconds(pids: list[int]) -> float:
    """What these processes and this one have spent so far."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(name: str, grader: Grader, rows: Rows, count: int) -> None:
    clock, spent = time.perf_counter(), processor_seconds(grader.pids)
    marks = [values["mark"] for values in grader.grade(rows)]
    clock = time.perf_counter() - clock
    spent = processor_seconds(grader.pids) - spent
    assert len(marks) == count and None not in marks
    print(
        f"{name}: {count} answers, {sum(marks) / count:.1%} right; by the clock "
        f"{clock / count * 1e6:.0f} µs each, {count / clock:.0f}/s; of processors "
        f"{spent / count * 1e6:.0f} µs each, {count / spent:.0f}/s on each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--integers", type=int, default=100_000)
    parser.add_argument("--math", type=int, default=4000)
    arguments = parser.parse_args()
    with Grader([Extract(), Grade(method="integer")]) as grader:
        measure("integers", grader, integer_rows(arguments.integers), arguments.integers)
    with Grader([Extract(), Grade(method="math")]) as grader:
        measure("mathematics", grader, math_rows(arguments.math), arguments.math)


if __name__ == "__main__":
    main()
