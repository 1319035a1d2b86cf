"""batchgen → strategies → engine → kernels: what a layer may import; no import circles."""

import tomllib
from pathlib import Path

import pytest

from tests.support.imports import (
    LAYERS,
    import_circles,
    import_graph,
    names_imported_by,
    package_files,
)

ROOT = Path(__file__).parents[1]
JOB_ONLY = {"datasets", "pyarrow", "hydra", "omegaconf", "tqdm", "jinja2", "ray"}
KERNELS_MAY = {"torch", "triton", "batchgen"}


def sources(layer: str) -> list[Path]:
    return [ROOT / file for file in package_files(ROOT, layer)]


imports = names_imported_by


def layer_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] != "batchgen":
        return ""
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "batchgen"


@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_imports_leftwards(layer: str) -> None:
    files = sources(layer)
    assert files
    for path in files:
        for module in imports(path):
            target = layer_of(module)
            if target:
                assert LAYERS.index(target) <= LAYERS.index(layer), f"{path} imports {module}"


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_lower_layers_do_without_the_libraries_of_the_job(layer: str) -> None:
    for path in sources(layer):
        for module in imports(path):
            assert module.split(".")[0] not in JOB_ONLY, f"{path} imports {module}"


def test_kernels_need_torch_and_triton_only() -> None:
    stdlib = __import__("sys").stdlib_module_names
    for path in sources("kernels"):
        for module in imports(path):
            top = module.split(".")[0]
            assert top in KERNELS_MAY or top in stdlib, f"{path} imports {module}"


def test_no_modules_import_each_other() -> None:
    """Imports inside functions count too: they hide a circle, and do not undo it."""
    assert import_circles(import_graph(ROOT)) == []


PLANTED = {
    "engine/first.py": "from batchgen.engine.room import second",
    "engine/room/second.py": "def late():\n    import batchgen.engine.third",
    "engine/third.py": "from batchgen.engine.first import anything",
    "engine/alone.py": "from batchgen.engine.first import anything",
    "kernels/typed.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from batchgen.kernels.other import Name\n"
    ),
    "kernels/other.py": "import batchgen.kernels.typed",
}


def test_import_circles_are_found(tmp_path: Path) -> None:
    """An import inside a function closes the planted circle; one for types alone closes none."""
    for name, text in PLANTED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = import_graph(tmp_path, types=False)
    names = ("engine/first.py", "engine/room/second.py", "engine/third.py")
    assert import_circles(graph) == [[Path(name) for name in names]]
    assert graph[Path("engine/alone.py")] == {Path("engine/first.py")}
    assert graph[Path("kernels/typed.py")] == set()
    assert graph[Path("kernels/other.py")] == {Path("kernels/typed.py")}


def test_linked_folders_are_not_packages_of_their_own() -> None:
    """A top-level package `kernels` would shadow HuggingFace's, which transformers imports."""
    for layer in LAYERS[:-1]:
        assert not list((ROOT / layer).rglob("__init__.py"))
        assert (ROOT / "batchgen" / layer).is_symlink()
    assert (ROOT / "conf" / "__init__.py").is_file()


def test_ruff_bans_the_bare_names() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lint = config["tool"]["ruff"]["lint"]
    assert "TID251" in lint["select"]
    assert set(lint["flake8-tidy-imports"]["banned-api"]) == {*LAYERS[:-1], "conf"}
