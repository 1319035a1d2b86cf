"""A folder in which tests of data sets run."""

from pathlib import Path

import datasets
import pytest


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder is the test's own, and so is the cache of datasets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))
