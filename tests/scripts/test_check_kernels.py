"""check_kernels counts the launches of all kernels, wherever their modules lie."""

import ast
from pathlib import Path

from check_kernels import KERNELS, launched_kernels


def launching_files() -> set[Path]:
    """The files under kernels/ in which something is called as `name[...](...)`."""
    return {
        path
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }


def test_kernels_are_found_in_every_file_that_launches_some() -> None:
    found = list(launched_kernels())
    files = {
        KERNELS.joinpath(*module.__name__.split(".")[2:]).with_suffix(".py") for module, _ in found
    }
    assert files == launching_files()
    names = {f"{module.__name__}.{name}" for module, name in found}
    assert "batchgen.kernels.attention.decode._decode_kernel" in names
    assert len(names) == len(found)
