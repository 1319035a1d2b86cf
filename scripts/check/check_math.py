"""Count how often `batchgen.same_math` and Math-Verify judge rightly whether two mathematical
answers are the same.

    python scripts/check/check_math.py [--pairs pairs.jsonl] [--wrong]

By default the pairs of answers are those of the tests, judged by hand and grouped into families: in
a list of answers that are the same, each answer with the first one, and pairs that are not the
same, all in both directions. `--pairs` reads other pairs, a JSON object per line with `gold`,
`answer` and `same`. Math-Verify is compared if it is installed
(`pip install 'math-verify[antlr4_9_3]==0.9.0'`). `--wrong` prints each judgment that is wrong.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import yaml

from batchgen import same_math

FAMILIES = Path(__file__).parents[2] / "tests/batchgen/evals/math/same.yaml"
Judge = Callable[[str, str], bool]
"""Says whether a gold answer and an answer are the same."""


class Pair(NamedTuple):
    """A gold answer, another answer, and whether they are the same."""

    gold: str
    answer: str
    same: bool


def by_math_verify(gold: str, answer: str) -> bool:
    """Return the judgment of Math-Verify, which reads each text as a formula between $ signs."""
    from math_verify import parse, verify

    sides = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(*sides, timeout_seconds=None))


def pairs_of_tests() -> dict[str, list[Pair]]:
    """Read the pairs of the tests, by family."""
    families: dict[str, list[Pair]] = {}
    for family in yaml.safe_load(FAMILIES.read_text()):
        pairs = [
            Pair(gold, answer, same=True) for gold, *others in family["same"] for answer in others
        ]
        pairs += [Pair(one, other, same=False) for one, other in family["different"]]
        reversed_pairs = [Pair(answer, gold, same) for gold, answer, same in pairs]
        families[family["family"]] = pairs + reversed_pairs
    return families


def pairs_of_file(path: Path) -> list[Pair]:
    """Read the pairs of a JSONL file."""
    rows = map(json.loads, path.read_text().splitlines())
    return [Pair(row["gold"], row["answer"], row["same"]) for row in rows]


def wrong(judge: Judge, pairs: list[Pair]) -> Iterator[Pair]:
    """Yield the pairs that a judge judges wrongly."""
    return (pair for pair in pairs if judge(pair.gold, pair.answer) != pair.same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--wrong", action="store_true")
    arguments = parser.parse_args()
    judges: dict[str, Judge] = {"same_math": same_math}
    if find_spec("math_verify") is not None:
        logging.disable(logging.CRITICAL)
        judges["Math-Verify"] = by_math_verify
    if arguments.pairs is None:
        tables = pairs_of_tests()
    else:
        tables = {arguments.pairs.name: pairs_of_file(arguments.pairs)}
    print("| family | judgments |", *(f"{name}: right | taken for the same |" for name in judges))
    print("|---|---:|" + "---:|---:|" * len(judges))
    for family, pairs in tables.items():
        row = f"| {family} | {len(pairs)} |"
        for judge in judges.values():
            failed = list(wrong(judge, pairs))
            if arguments.wrong:
                print(*(f"    {judge.__name__} {tuple(pair)}" for pair in failed), sep="\n")
            taken_for_same = sum(not pair.same for pair in failed)
            row += f" {1 - len(failed) / len(pairs):.1%} | {taken_for_same} |"
        print(row)


if __name__ == "__main__":
    main()
