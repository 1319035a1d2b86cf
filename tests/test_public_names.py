"""Names of the product: each public one stands for one thing, and says what that is.

A public class or function has a name that no other one has. The Triton implementation of a
reference ends in `_triton`. `main` is how a module is run, as a verb or as a process, and `begin`
how a tracker and a program in the sandbox start.

Participles and other words that carry neither type nor subject name no parameter, field or local
variable: `given` is a path, a mapping or a row, and its name should say which. Those in `KEPT` are
keys that users type, or texts that files of earlier versions hold.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.imports import LAYERS, package_files, syntax_tree

ROOT = Path(__file__).parents[1]
VAGUE_LOCALS = frozenset(
    "found given made asked told shown own least most beside behind place places".split()
)
VAGUE = VAGUE_LOCALS | {"known"}
KEPT = {
    "Enough.most": "a key in the metadata of shards",
    "UntilConfig.most": "the key sampling.until.most",
    "Balance.most": "a key of a row step",
    "Cross.most": "a key of a row step",
    "Explode.most": "a key of a row step",
    "Majority.own": "an option of a post step",
    "SampleFilter.least": "a key of the viewer's URLs",
    "SampleFilter.most": "a key of the viewer's URLs",
}


def public_names() -> dict[str, list[str]]:
    """Where each public class and function at the top of a module of the product stands."""
    files = defaultdict(list)
    for package in LAYERS:
        for file in package_files(ROOT, package):
            for node in syntax_tree(ROOT / file).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    if not node.name.startswith("_"):
                        files[node.name].append(str(file))
    return files


def vague_names(tree: ast.AST, owner: str = "") -> Iterator[tuple[int, str]]:
    """The line and the name, with its function or class, of each vague parameter and field."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", owner)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            of = node.args
            for one in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg):
                if one is not None and one.arg in VAGUE:
                    yield one.lineno, f"{name}({one.arg})"
        elif isinstance(tree, ast.ClassDef) and isinstance(node, ast.AnnAssign):
            if isinstance(node.target, ast.Name) and node.target.id in VAGUE:
                yield node.lineno, f"{owner}.{node.target.id}"
        yield from vague_names(node, name if isinstance(name, str) else owner)


def vague_locals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of each vague local variable."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    if node.id in VAGUE_LOCALS:
                        yield node.lineno, node.id


def test_no_two_things_share_a_name() -> None:
    names = public_names()
    del names["main"], names["begin"]
    assert {name: files for name, files in names.items() if len(files) > 1} == {}


def test_parameters_and_fields_say_what_they_are() -> None:
    wrong = []
    for package in LAYERS:
        for file in package_files(ROOT, package):
            tree = syntax_tree(ROOT / file)
            wrong += [f"{file}:{line} {name}" for line, name in vague_names(tree)]
    assert [text for text in wrong if text.rpartition(" ")[2] not in KEPT] == []


def test_local_variables_say_what_they_hold() -> None:
    wrong = []
    for package in LAYERS:
        for file in package_files(ROOT, package):
            wrong += [
                f"{file}:{line} {name}" for line, name in vague_locals(syntax_tree(ROOT / file))
            ]
    assert wrong == []


def test_vague_names_are_found() -> None:
    text = "class A:\n    given: int\n    def f(self, *, most=1): return lambda found: found\n"
    names = [name for _, name in vague_names(ast.parse(text))]
    assert names == ["A.given", "f(most)", "f(found)"]
    text = "def f(x):\n    own = x\n    for place in own: pass\n    return [x for x, most in own]\n"
    assert [name for _, name in vague_locals(ast.parse(text))] == ["own", "place", "most"]
