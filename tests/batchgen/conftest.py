"""A model with a tokenizer and a file of rows, for the tests of jobs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tiny_model: Callable[..., Path]) -> Path:
    """A folder with weights, configuration and a tokenizer of bytes."""
    from real_job import VOCAB, save_tokenizer

    folder = tiny_model("llama", **VOCAB)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file with the ROWS of real_job."""
    from real_job import ROWS

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path
