"""What importing modules of the engine loads: a job pays for nothing that it does not use."""

import subprocess
import sys

import pytest


def loaded(*names: str) -> set[str]:
    """The top-level modules that are loaded after a new process has imported modules of engine/."""
    modules = ", ".join(f"batchgen.engine.{name}" for name in names)
    code = f"import sys, {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.thorough
def test_constraints_load_neither_xgrammar_nor_transformers() -> None:
    room = ("compiler", "constraint", "matcher", "vocabulary")
    found = loaded(*(f"constraint.{name}" for name in room), "rows.guide", "rows.compile_queue")
    assert "batchgen" in found
    assert not found & {"xgrammar", "transformers", "jsonschema"}


@pytest.mark.thorough
def test_the_engine_loads_no_library_of_checkpoints() -> None:
    found = loaded("llm_engine", "loading.loader", "models.model_registry")
    assert not found & {"transformers", "tokenizers", "gguf", "safetensors", "xgrammar"}
