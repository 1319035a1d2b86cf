"""Count how many judgments of answers are right: those of `same_math`, and those of Math-Verify.

    python scripts/check/check_math.py [--pairs pairs.jsonl] [--wrong]

The answers are those of the tests, by family, judged by hand: all answers of a list with its first
one, in both directions, and pairs that are not the same. `--pairs` reads others, a JSON object on a
line with `gold`, `answer` and `same`. Math-Verify is asked where it is installed
(`pip install 'math-verify[antlr4_9_3]==0.9.0'`). `--wrong` prints each judgment that is wrong.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import yaml

from batchgen import same_math

FAMILIES = Path(__file__).parents[2] / "tests/batchgen/evals/math/same.yaml"
Judge = Callable[[str, str], bool]
Pair = tuple[str, str, bool]


def by_math_verify(gold: str, answer: str) -> bool:
    """What Math-Verify says, with each text in a formula."""
    from math_verify import parse, verify

    sides = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(*sides, timeout_seconds=None))


def families() -> dict[str, list[Pair]]:
    """The pairs of each family."""
    found: dict[str, list[Pair]] = {}
    for family in yaml.safe_load(FAMILIES.read_text()):
        pairs = [(gold, answer, True) for gold, *others in family["same"] for answer in others]
        pairs += [(one, other, False) for one, other in family["different"]]
        found[family["family"]] = pairs + [(answer, gold, same) for gold, answer, same in pairs]
    return found


def given(path: Path) -> list[Pair]:
    """The pairs of a file."""
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["gold"], row["answer"], row["same"]) for row in rows]


def wrong(judge: Judge, pairs: list[Pair]) -> Iterator[Pair]:
    """The pairs of which a judge says the opposite."""
    return (pair for pair in pairs if judge(*pair[:2]) != pair[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--wrong", action="store_true")
    arguments = parser.parse_args()
    judges: dict[str, Judge] = {"same_math": same_math}
    if find_spec("math_verify") is not None:
        logging.disable(logging.CRITICAL)
        judges["Math-Verify"] = by_math_verify
    tables = (
        families() if arguments.pairs is None else {arguments.pairs.name: given(arguments.pairs)}
    )
    print("| family | judgments |", *(f"{name}: right | taken for the same |" for name in judges))
    print("|---|---:|" + "---:|---:|" * len(judges))
    for family, pairs in tables.items():
        row = f"| {family} | {len(pairs)} |"
        for judge in judges.values():
            failed = list(wrong(judge, pairs))
            if arguments.wrong:
                print(*(f"    {judge.__name__} {pair}" for pair in failed), sep="\n")
            false = sum(not same for _, _, same in failed)
            row += f" {1 - len(failed) / len(pairs):.1%} | {false} |"
        print(row)


if __name__ == "__main__":
    main()
