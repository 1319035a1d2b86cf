"""A model with a tokenizer and a file of rows, for the tests of jobs."""

import copy
import functools
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

import hydra
import pytest
from omegaconf import OmegaConf

from batchgen.jobs.forecast import devices


@pytest.fixture(scope="session", autouse=True)
def work_done_once() -> Iterator[None]:
    """What hundreds of jobs would do again with the same result is done once by all tests: Hydra
    reads the files of conf/ and puts choices together, and a forecast measures the speed of this
    CPU. Nothing waits for the disk, as no machine fails here."""
    compose, made = hydra.compose, {}
    load, read = OmegaConf.load, {}

    def loaded(file: str | Path | IO[str]) -> Any:
        if isinstance(file, str | Path):
            return load(file)
        if (text := file.read()) not in read:
            read[text] = load(io.StringIO(text))
        return copy.deepcopy(read[text])

    def composed(name: str, overrides: list[str], **options: Any) -> Any:
        if any(override.startswith("hydra") for override in overrides):
            return compose(name, overrides=overrides, **options)
        if (key := (*overrides, *options)) not in made:
            made[key] = compose(name, overrides=overrides, **options)
            OmegaConf.set_readonly(made[key], True)
        return made[key]

    measured = functools.cache(devices.measured_cpu)
    with (
        mock.patch.object(hydra, "compose", composed),
        mock.patch.object(OmegaConf, "load", loaded),
        mock.patch.object(devices, "measured_cpu", measured),
        mock.patch.object(os, "fsync", int),
    ):
        yield


@pytest.fixture(scope="session")
def model(tiny_model: Callable[..., Path]) -> Path:
    """A folder with weights, configuration and a tokenizer of bytes."""
    from tests.support.jobs.real_job import VOCAB, save_tokenizer

    folder = tiny_model("llama", **VOCAB)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def vl_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads images."""
    from tests.support.jobs.image_job import save_model

    return save_model(tmp_path_factory.mktemp("vl"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file with the ROWS of real_job."""
    from tests.support.jobs.real_job import ROWS

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder is the test's own, and so is the cache of datasets."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".cache"))
