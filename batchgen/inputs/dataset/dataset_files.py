"""Loads the data set at `dataset.path`: local files and folders, or a data set on the hub.

`row_source.open_dataset` calls `load_split` and reads rows from the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets import Dataset, DatasetBuilder, DatasetDict, IterableDataset
from huggingface_hub import DatasetCard

from batchgen.config.groups.dataset_config import AUTO, STDIN, DatasetConfig, is_usual
from batchgen.inputs.dataset.dataset_paths import check_formats, find_files, local_path
from batchgen.inputs.tables.json_tables import JsonColumns
from batchgen.inputs.tables.local_files import check_reading, local_rows
from batchgen.inputs.tables.read_errors import READ_ERRORS, unreadable_table
from batchgen.inputs.tables.stdin_table import called_stdin, spooled_stdin
from batchgen.inputs.tables.table_formats import SUPPORTED, TEXT_FORMATS, reason, table_format
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import content_digests, fingerprint_text

_READING_VERSION = 2
"""Increased when a new version of batchgen reads different rows from the same files."""
_CACHE_VERSION = "rows-5"
"""Changed when a new version of batchgen stores rows in the cache in a different format."""
_LOGGERS = ("datasets", "huggingface_hub")
"""The loggers of datasets and of the library that downloads for it."""
_FILE_KEYS = {"config_name", "data_files", "data_dir", "default"}
"""Keys of a configuration in a README.md that only say which files contain its rows."""
DEMO = Path(__file__).parents[2] / "data" / "demo.jsonl"
"""The data set of the demo job."""


@dataclass(frozen=True)
class LoadedDataset:
    """All rows of one split.

    Attributes:
        data: the rows, memory-mapped or as a stream.
        fingerprint: a text that differs if the content of any row differs.
        files: the local files that the rows are read from; empty for the hub and for saved data
            sets.
        json: the columns of the rows, if `data` holds each row as JSON text; else None.
    """

    data: Dataset | IterableDataset
    fingerprint: str
    files: tuple[Path, ...] = ()
    json: JsonColumns | None = None


def load_split(config: DatasetConfig) -> LoadedDataset:
    """Load the split that the configuration names.

    Unless they are streamed, local files are converted once to Arrow files in the cache of
    datasets. The cache folder is named after their content, so that a changed file is never read
    from an old cache.

    Raises:
        ConfigError: the path, the split or the data cannot be used.
    """
    with quiet():
        if config.kind == "hub":
            return _load_hub(config)
        if config.path == STDIN:
            with called_stdin(file := spooled_stdin(_cache_dir("stdin"))):
                return _load_files([file], config, _pick_split(["train"], config))
        path = DEMO if config.kind == "demo" else local_path(str(config.path))
        if path.is_dir():
            if config.name is None and (path / "dataset_dict.json").is_file():
                split = _pick_split(_saved_splits(path), config)
                return _load_saved(path / split, split, config)
            if config.name is None and (path / "state.json").is_file():
                return _load_saved(path, _pick_split(["train"], config), config)
            return _load_folder(path, config)
        if config.name is not None:
            raise ConfigError(f"dataset.name is for hub data sets and folders, {path} is neither")
        return _load_files(find_files(path), config, _pick_split(["train"], config))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and log messages of `datasets` inside the context, because batchgen
    reports the errors itself."""
    bars = datasets.are_progress_bars_disabled()
    handlers = [handler for name in (None, *_LOGGERS) for handler in getLogger(name).handlers]

    def is_of_others(record: LogRecord) -> bool:
        return not record.name.startswith(_LOGGERS)

    # Setting the level of a logger would take a hundred times as long, and a stream enters this
    # context for each batch.
    for handler in handlers:
        handler.addFilter(is_of_others)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_others)
        if not bars:
            datasets.enable_progress_bars()


def _load_files(files: Sequence[Path], config: DatasetConfig, split: str) -> LoadedDataset:
    """Load local files of one format as one split."""
    kind = check_formats(files)
    check_reading(config, kind)
    fingerprint = _content_fingerprint(split, files, kind, config)
    try:
        # The quote character `"` has the fingerprint of `auto`, which refuses some files that can
        # be read with it. So it has a folder of its own.
        quotes = [] if config.quote_char in (None, AUTO) else ["quoted"]
        cache = _cache_dir(fingerprint, _CACHE_VERSION, *quotes)
        local = local_rows(kind, files, config, split, cache)
        if local.is_mixed:  # some column has values of several types, without a common one
            fingerprint = fingerprint_text(fingerprint, "each value is what its row says")
        data = _read(local.builder, config)[split]
        return LoadedDataset(data, fingerprint, tuple(files), local.json)
    except ConfigError:
        raise
    except READ_ERRORS as error:
        raise unreadable_table(error, files) from None


def _load_folder(folder: Path, config: DatasetConfig) -> LoadedDataset:
    """Load a folder as `datasets` does: file names or README.md define its splits."""
    if folder.resolve() == Path("/"):
        raise ConfigError(
            "dataset.path=/ is the root of all files of this machine: give the file or folder with "
            "the rows"
        )
    try:
        files = sorted(f for f in folder.rglob("*") if f.is_file() and table_format(f) is not None)
    except OSError as error:
        raise ConfigError(f"dataset.path: cannot read {error.filename}: {error.strerror}") from None
    files = [f for f in files if not any(p.startswith(".") for p in f.relative_to(folder).parts)]
    if not files:
        raise ConfigError(f"dataset.path: folder {folder} has no files of {SUPPORTED}")
    declared = _declared(folder)
    # Next to files of another format, .txt files are notes and not data.
    files = [f for f in files if table_format(f) != "txt"] or files
    if declared == "nothing":
        check_formats(files)
    try:
        path = str(folder.absolute())
        used = datasets.load_dataset_builder(path, config.name).config.data_files
        split = _pick_split(list(map(str, used)), config)
        chosen = [Path(name) for name in used[split]]
        if declared == "nothing":
            _check_all_used(files, [Path(name) for names in used.values() for name in names])
        # Text files without declared types are read like those of any other path.
        is_text = declared == "only files" and table_format(chosen[0]) in TEXT_FORMATS
        if declared == "nothing" or is_text:
            return _load_files(chosen, config, split)
        check_reading(config, "declared by its README.md")
        fingerprint = _content_fingerprint(split, chosen, "declared", config)
        cache = str(_cache_dir(fingerprint))
        builder = datasets.load_dataset_builder(path, config.name, cache_dir=cache)
        return LoadedDataset(_read(builder, config)[split], fingerprint, tuple(chosen))
    except ConfigError:
        raise
    except READ_ERRORS as error:
        raise unreadable_table(error, files) from None


def _declared(folder: Path) -> Literal["nothing", "only files", "more"]:
    """Return what the README.md of a folder declares about its rows: nothing, only which files
    contain them, or also types or options for reading."""
    readme = folder / "README.md"
    try:
        card = DatasetCard.load(readme).data.to_dict() if readme.is_file() else {}
    except ValueError as error:
        raise ConfigError(
            f"dataset.path: the YAML of {readme} has an error: {reason(error)}"
        ) from None
    configs = card.get("configs") or []
    keys = {key for config in configs for key in config}
    if not configs:
        return "nothing"
    return "more" if keys - _FILE_KEYS or "dataset_info" in card else "only files"


def _check_all_used(files: Sequence[Path], used: Sequence[Path]) -> None:
    """Raise ConfigError if `datasets` would ignore a file: if some file names contain the name of a
    split, it ignores all files without one."""
    used_files = {file.resolve() for file in used}
    left_out = [file for file in files if file.resolve() not in used_files]
    if left_out:
        raise ConfigError(
            f"dataset.path: {left_out[0]} belongs to no split, though other files are named like "
            "splits (train, test, …): name the files you mean with a glob"
        )


def _saved_splits(folder: Path) -> list[str]:
    """Return the names of the splits that `save_to_disk` wrote into a folder."""
    file = folder / "dataset_dict.json"
    try:
        return [str(split) for split in json.loads(file.read_text(encoding="utf-8"))["splits"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"dataset.path: {file} is damaged: {reason(error)}") from None


def _load_saved(folder: Path, split: str, config: DatasetConfig) -> LoadedDataset:
    """Load a split that `save_to_disk` of datasets wrote, memory-mapped."""
    check_reading(config, "saved by datasets")
    try:
        data = datasets.load_from_disk(str(folder))
        assert not isinstance(data, DatasetDict)
        names = [entry["filename"] for entry in data.cache_files]
        fingerprint = _content_fingerprint(split, [Path(name) for name in names], "saved", config)
    except READ_ERRORS as error:
        raise unreadable_table(error, [folder]) from None
    return LoadedDataset(data.to_iterable_dataset() if config.streaming else data, fingerprint)


def _load_hub(config: DatasetConfig) -> LoadedDataset:
    """Load a data set from the hub."""
    try:
        builder = datasets.load_dataset_builder(config.path, config.name, revision=config.revision)
        if builder.info.splits:
            _pick_split(list(builder.info.splits), config)  # before anything is downloaded
        splits = _read(builder, config)
        split = _pick_split(list(map(str, splits)), config)
    except ConfigError:
        raise
    except READ_ERRORS as error:
        raise ConfigError(_not_loaded(config, reason(error))) from None
    # The builder's hash is the commit of the repository, even if the data comes from the cache.
    parts = ("hub", str(config.path), builder.config.name, split, str(builder.hash))
    return LoadedDataset(splits[split], fingerprint_text(*parts))


def _not_loaded(config: DatasetConfig, why: str) -> str:
    """Return the error message for a data set of the hub that cannot be loaded, with advice."""
    name = str(config.path)
    start = f"dataset.path: cannot load {name}"
    if Path(name).exists():
        return f"{start} from the hub: a file here has that name: read it with dataset=files"
    return (
        f"{start}: {why} (a gated data set needs `hf auth login`; read a copy on this machine "
        "with dataset=files dataset.path=FOLDER)"
    )


def _read(builder: DatasetBuilder, config: DatasetConfig) -> dict[str, Any]:
    """Return all splits of a builder by name, as streams or memory-mapped data sets."""
    if config.streaming:
        return dict(builder.as_streaming_dataset())
    builder.download_and_prepare()
    if builder.info.splits and not sum(info.num_examples for info in builder.info.splits.values()):
        raise ConfigError(f"dataset.path: {config.path} has no rows")
    return dict(builder.as_dataset())


def _pick_split(splits: Sequence[str], config: DatasetConfig) -> str:
    """Return the split that the configuration names, or the only one. Raises ConfigError if there
    is no such split, or several to choose from."""
    names = ", ".join(map(str, splits))
    if config.split is None:
        if len(splits) == 1:
            return splits[0]
        raise ConfigError(f"dataset.split: {config.path} has several splits, choose among {names}")
    if config.split not in splits and list(splits) == ["train"] and config.kind == "files":
        raise ConfigError(
            f"dataset.split={config.split}: {config.path} has no splits: leave dataset.split out, "
            "and name the file with the rows that you mean"
        )
    if config.split not in splits:
        raise ConfigError(f"dataset.split: {config.path} has no {config.split!r}, only {names}")
    return config.split


def _content_fingerprint(
    split: str, files: Sequence[Path], kind: str, config: DatasetConfig
) -> str:
    """Return the fingerprint of a split: the content of its files in order, and how they are read.
    The files' location does not matter."""
    reading = {key: value for key, value in config.reading.items() if not is_usual(key, value)}
    how = json.dumps([_READING_VERSION, kind, reading], sort_keys=True)
    try:
        return fingerprint_text(split, how, *content_digests(files))
    except OSError as error:
        raise ConfigError(f"dataset.path: cannot read {error.filename}: {error.strerror}") from None


def _cache_dir(*names: str) -> Path:
    """Return a folder in the cache of datasets."""
    return Path(datasets.config.HF_DATASETS_CACHE).joinpath("batchgen", *names)
