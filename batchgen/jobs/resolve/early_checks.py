"""Finds common mistakes in a job before torch and the libraries for data are loaded.

Everything is checked again, more exactly, when the job is opened. Checks that take longer than a
moment are left out here. The command calls `check_early` first.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.groups.dataset_config import STDIN
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.prompt_config import ChatPromptConfig, TextPromptConfig
from batchgen.inputs.dataset.dataset_paths import find_files, local_path
from batchgen.inputs.tables.table_formats import table_format
from batchgen.storage.leases.job_files import refuse_links
from batchgen.storage.stores.manifest import DifferentJob, Manifest, flat
from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME
from batchgen.util.paths import is_url
from batchgen.util.shorten import some_names
from batchgen.util.templates.row_templates import RowTemplate

_MOST_BYTES = 8 * 2**20
"""The bytes of a file above which its columns are not read here."""
_COMPARED = ("model", "prompt", "sampling", "constraint")
"""The groups of keys that are compared with the manifest in the output folder."""
_LATER = ("prompt.date", "sampling.stream", "sampling.until")
"""Keys of these groups that are not compared: the manifest has values that are computed later."""


def check_early(config: JobConfig, *, folder: bool) -> None:
    """Refuse mistakes that are found at once.

    Raises:
        ConfigError: a model, a data file or the package of a tracker is missing; a template names a
            column that the file does not have; or, with `folder`, the output folder has rows of a
            job with other keys.
    """
    _check_trackers(config)
    _check_model(config)
    _check_data(config)
    if folder and not config.output.overwrite and not is_url(config.output.dir):
        check_folder(config, Path(config.output.dir))


def _check_trackers(config: JobConfig) -> None:
    for name in config.progress.report_to:
        if name != "json" and find_spec(name) is None:
            raise ConfigError(
                f"progress.report_to={name} needs the package {name}, which is not installed: "
                f"pip install 'batchgen[{name}]'"
            )


def _check_model(config: JobConfig) -> None:
    path = config.model.path
    if not path.startswith(PACKAGE_SCHEME) and path.count("/") == 1 and path[0] not in "/.~":
        return  # it may be OWNER/NAME on the hub
    from batchgen.inputs.model.model_source import resolve_model

    resolve_model(path, config.model.revision, weights=False)


def _check_data(config: JobConfig) -> None:
    data = config.dataset
    if data.kind != "files" or data.path == STDIN:
        return
    path = local_path(str(data.path))
    if path.is_dir():
        return
    files = find_files(path)
    # Row steps and renames change the columns, and several files may have different ones.
    if len(files) > 1 or config.rows or data.rename or data.reading:
        return
    if (names := _columns(files[0])) is None:
        return
    if (column := data.id_column) is not None and column.partition(".")[0] not in names:
        known = some_names(names, column)
        raise ConfigError(f"dataset.id_column: no column {column!r}: choose among {known}")
    for key, template in _templates(config):
        RowTemplate(key, template, names)


def _templates(config: JobConfig) -> list[tuple[str, str]]:
    """The templates of the job's prompt by their keys."""
    prompt, templates = config.prompt, []
    if isinstance(prompt, TextPromptConfig):
        templates.append(("prompt.text", prompt.text))
    elif isinstance(prompt, ChatPromptConfig):
        by_template = prompt.messages is None and prompt.messages_column is None
        templates += [("prompt.user", prompt.user)] if by_template else []
        templates.append(("prompt.system", prompt.system))
    return [(key, template) for key, template in templates if template is not None]


def _columns(file: Path) -> list[str] | None:
    """The columns of a file; None if reading them would take long or the file is not plain."""
    try:
        if file.stat().st_size > _MOST_BYTES or file.suffix == ".gz":
            return None
        if table_format(file) == "csv":
            with file.open(encoding="utf-8-sig", newline="") as lines:
                header = next(csv.reader(lines), [])
            is_plain = all(name == name.strip() and name.isprintable() and name for name in header)
            return header if len(header) > 1 and is_plain else None
        if file.suffix != ".jsonl":
            return None
        names: dict[str, None] = {}
        with file.open(encoding="utf-8-sig") as lines:
            for line in lines:
                if line.strip():
                    row: Mapping[str, Any] = json.loads(line)
                    names |= dict.fromkeys(row.keys())
        return list(names) or None
    except (OSError, ValueError, AttributeError, RecursionError, csv.Error):
        return None


def check_folder(config: JobConfig, folder: Path) -> None:
    """Check an output folder on this machine.

    Raises:
        ConfigError: the folder has rows of a job with other keys, or has a link where a file should
            be.
    """
    if folder.is_dir():
        refuse_links(folder)
    try:
        if next((folder / "data").glob("part-*.parquet"), None) is None:
            return  # without shards there are at most rows in journals, which are checked later
        manifest = Manifest.read(folder / "manifest.json")
        old = flat(
            {name: manifest.identity[name] for name in _COMPARED if name in manifest.identity}
        )
    except (OSError, ConfigError, LookupError, TypeError, AttributeError):
        return
    identity = Manifest.build(config_identity(config), {}).identity
    new = flat({name: identity[name] for name in _COMPARED if name in identity})
    lines = [
        f"{key}: {old.get(key, '(not set)')} → {new.get(key, '(not set)')}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not key.startswith(_LATER)
    ]
    if lines:
        raise DifferentJob(str(config.output.dir), lines)
