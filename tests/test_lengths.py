"""Files and functions of the product are short, or a line here says why not.

A file has at most 300 lines, or 350 where it is one thing without a seam. A function has at most
60. A Triton kernel is one function, whatever it has to do.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.imports import LAYERS, package_files, syntax_tree

ROOT = Path(__file__).parents[1]
MOST_LINES, MOST_OF_FUNCTION = 350, 60

LONG_FILES = {
    "batchgen/api/python/llm.py": "the reference of LLM: three quarters are signatures and texts",
    "engine/execution/model_runner.py": "one class: the forwards of a model, captured or not",
    "engine/layers/feed_forward/experts.py": "one module: the experts of a layer in every form",
    "engine/llm_engine.py": "one class: all that whoever drives the engine calls",
    "engine/models/causal_lm.py": "one class: what all families inherit",
}
LONG_FUNCTIONS = {
    "engine/layers/mixers/attention.py __init__": "its arguments are what differs between families",
    "kernels/sampling/sampling_triton.py draw_triton": "it makes the arguments of two kernels",
}


@cache
def product_files() -> tuple[Path, ...]:
    scripts = sorted(path.relative_to(ROOT) for path in (ROOT / "scripts").rglob("*.py"))
    return (*(file for layer in LAYERS for file in package_files(ROOT, layer)), *scripts)


def test_files_are_short() -> None:
    lines = {str(file): (ROOT / file).read_bytes().count(b"\n") for file in product_files()}
    long = {name for name, count in lines.items() if count > MOST_LINES}
    assert long == set(LONG_FILES), "split it where a seam is, or say why not"


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions in a module, class or function."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        yield from functions(child)


def test_functions_are_short() -> None:
    long = {
        f"{file} {function.name}"
        for file in product_files()
        for function in functions(syntax_tree(ROOT / file))
        if (function.end_lineno or 0) - function.lineno >= MOST_OF_FUNCTION
        and not any("triton" in ast.unparse(each) for each in function.decorator_list)
    }
    assert long == set(LONG_FUNCTIONS), "split it where a seam is, or say why not"
