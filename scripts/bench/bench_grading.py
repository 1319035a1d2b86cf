"""Time the grading of answers: whole numbers in this process, mathematics in worker processes.

    python scripts/bench/bench_grading.py [--integers 100000] [--math 4000] [--workers 2]

The answers stand at the end of texts of about 1,100 characters. Printed are the microseconds of one
answer and the answers of a second, by the clock and by the time that processors spent, which other
programs on the machine disturb less. The mathematics is a mix of equal texts, equal values and
wrong answers; the rate is given for workers that have started.
"""

import argparse
import os
import time
from collections.abc import Iterator
from itertools import cycle, islice

from batchgen.grading.extract import Extract
from batchgen.grading.grade import Grade
from batchgen.grading.rows import Grader

FILLER = "the next step follows from the one before it. " * 24
MATHEMATICS = [
    (r"\frac{1}{2}", r"\frac{1}{2}"),
    (r"\frac{1}{2}", "0.5"),
    ("10", "11"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"3\pi", "9.4"),
    ("x^2+1", "1+x^2"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
    ("6-5i", "6-5i"),
    (r"\frac{3}{4}", "3/4"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("p-q", "q-p"),
    (r"\text{Evelyn}", "Evelyn"),
    ("[-2,7]", "[-2,7)"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    ("42", "42"),
    (r"90^\circ", "90"),
]

Rows = Iterator[tuple[str, dict[str, str]]]


def integer_rows(count: int) -> Rows:
    return ((rf"{FILLER}So \boxed{{{i % 1000}}}.", {"target": f"{i % 999}"}) for i in range(count))


def math_rows(count: int) -> Rows:
    pairs = islice(cycle(MATHEMATICS), count)
    return ((rf"{FILLER}So \boxed{{{answer}}}.", {"target": target}) for target, answer in pairs)


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
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with Grader([Extract(), Grade(method="integer")]) as grader:
        measure("integers", grader, integer_rows(arguments.integers), arguments.integers)
    with Grader([Extract(), Grade(method="math")], workers=arguments.workers) as grader:
        list(grader.grade(math_rows(256)))
        measure("mathematics", grader, math_rows(arguments.math), arguments.math)


if __name__ == "__main__":
    main()
