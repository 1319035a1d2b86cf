"""Whether two mathematical answers are equal, by the library Math-Verify (the extra `math`)."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from batchgen.grading.integers import normal_integer
from batchgen.grading.latex import number, plain
from batchgen.grading.step import GradeFailure

MOST_CHARACTERS = 10_000
"""Of an answer; a longer one is not handed to the parser, which would take minutes."""

_SPACE = re.compile(r"\s+")


def normal_math(answer: str) -> str:
    """The answer's text without layout, so that samples which say the same often have one text.

    Unlike `same_math` it never computes: equal texts are equal answers, not the other way round.
    """
    if (integer := normal_integer(answer)) is not None:
        return integer
    text = plain(answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _SPACE.sub("", text)


def same_math(target: str, answer: str) -> bool:
    """Whether an answer is mathematically equal to the target, and in a form that it allows.

    Equal texts and exact numbers are compared here; anything else by Math-Verify, for which the
    target and the answer have different roles (a target `x = 5` allows the answer `5`). There is no
    time limit: call it in a process that can be killed.

    Raises:
        GradeFailure: no parser reads the target, the comparison raised an error, or the answer is
            too long.
    """
    if normal_math(target) == normal_math(answer):
        return True
    left, right = number(plain(target)), number(plain(answer))
    if left is not None and right is not None:
        if left == right:
            return True
        if left.denominator == right.denominator == 1:
            return False
    if len(answer) > MOST_CHARACTERS:
        raise GradeFailure("too_long", f"the answer has {len(answer)} characters")
    from math_verify import verify

    targets = _parsed_target(target)
    if not targets:
        raise GradeFailure("bad_target", f"Math-Verify cannot read the target {target[:200]!r}")
    failed: Exception | None = None
    percent = "%" in target + answer  # 50% may equal 50 or 1/2
    for parsed in _parsed(answer):
        for wanted in targets:
            if not percent and _far_apart(wanted, parsed):
                continue
            # The library promises no type for what a comparison raises. One pair that cannot be
            # compared does not matter when another one is equal.
            try:
                if verify(wanted, parsed, timeout_seconds=None, raise_on_error=True):
                    return True
            except (MemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                failed = error
    if failed is not None:
        raise GradeFailure("failed", f"Math-Verify: {type(failed).__name__}: {failed}"[:500])
    return False


def _far_apart(left: Any, right: Any) -> bool:
    """Whether two expressions certainly differ, because their values do at one point.

    Where there is nothing to evaluate it returns False. It saves the attempt to simplify their
    difference to zero, which is nearly all the time that a wrong answer costs.
    """
    import sympy
    from latex2sympy2_extended import is_expr_of_only_symbols

    for side in (left, right):
        # Products of symbols may be words, which the library compares by their letters.
        if not isinstance(side, sympy.Expr) or is_expr_of_only_symbols(side):
            return False
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {name: sympy.Rational(1009 + 310 * i, 997) for i, name in enumerate(names)}
    try:
        a, b = (complex(side.subs(point).evalf(15)) for side in (left, right))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False
    return abs(a - b) > 1e-5 * max(1.0, abs(a), abs(b))  # false for NaN


@lru_cache(maxsize=256)  # the samples of one question follow each other
def _parsed_target(target: str) -> list[Any]:
    return _parsed(target)


def _parsed(text: str) -> list[Any]:
    """What Math-Verify reads in a text: an expression of sympy, the text, or nothing."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # It would warn of what it cannot parse, once for each answer, and that it has no time limit.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    body = plain(text)
    latex = LatexExtractionConfig(boxed_match_priority=0)
    config = [latex, ExprExtractionConfig()]
    return list(parse(f"\\boxed{{{body}}}", extraction_config=config, parsing_timeout=None))
