"""Converts the errors of libraries that read data into messages for users. Callers catch
READ_ERRORS and raise `unreadable_table`."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HfHubHTTPError

from batchgen.inputs.tables.table_formats import first_bad_line, reason, root_cause, table_format
from batchgen.util.errors import ConfigError

READ_ERRORS = (
    DatasetsError,
    HfHubHTTPError,
    pa.ArrowException,
    ValueError,
    OverflowError,  # a date after the year 9999
    TypeError,
    KeyError,
    AttributeError,
    OSError,
    EOFError,
    RuntimeError,
    StopIteration,
)
"""What datasets and the libraries below it (pyarrow, pandas, fsspec) raise for data that they
cannot read. A StopIteration means that a file has no rows."""


def unreadable_table(error: BaseException, files: Sequence[Path]) -> ConfigError:
    """Return an error that names the file and what is wrong with it, and for JSON lines the
    line."""
    cause, cache = root_cause(error), str(datasets.config.HF_DATASETS_CACHE)
    if isinstance(cause, ConfigError):  # raised by our own readers, and wrapped by datasets
        return ConfigError(str(cause))
    if isinstance(cause, OSError) and (
        cause.errno in (errno.ENOSPC, errno.EDQUOT) or str(cause.filename).startswith(cache)
    ):
        return ConfigError(
            f"dataset.path: datasets cannot write its cache {cache}: {cause.strerror}: set "
            "HF_DATASETS_CACHE to another folder, or use dataset.streaming=true"
        )
    for file in files:
        if table_format(file) == "json" and (where := first_bad_line(file)):
            return ConfigError(f"dataset.path: {where}")
        if file.is_file() and file.stat().st_size == 0:
            return ConfigError(f"dataset.path: {file} is empty")
    if isinstance(cause, StopIteration):
        return ConfigError(f"dataset.path: {files[0]} has no rows")
    named = str(files[0]) if len(files) == 1 else f"{len(files)} files, {files[0]} …"
    hint = ": give every row the same keys and types" if table_format(files[0]) == "json" else ""
    return ConfigError(f"dataset.path: datasets cannot read {named}: {reason(error)}{hint}")
