"""`batchgen export OUT`: the rows of a job as JSON lines or CSV, in constant memory."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from batchgen.cli.job_outcome import column_list, verb
from batchgen.cli.verb_table import Parser
from batchgen.folder.open_folder import open_job
from batchgen.folder.read_job import JobFolderReader
from batchgen.texts.row_json import row_reader
from batchgen.texts.row_writers import WRITERS, WriteRow, spreadsheet
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import user_path

_ABOUT = """\
Write the finished rows of a job, in the order of the data set, as JSON lines or CSV. The job may
still run; then the rows that are finished are written.

jsonl  an object per row, with all columns unless --columns names some
csv    a header and a line per row; lists and other nested values are JSON in their cells, a missing
       value is an empty cell. Spreadsheets run texts that begin with = + - or @ as formulas: for
       these, --quote-formulas puts an apostrophe before such a text, which they do not show
txt    the generated text alone, or the one column that --columns names: a row per line, newlines
       as \\n
"""


@verb
def main(arguments: Sequence[str]) -> int:
    parser = Parser("export", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument(
        "--format", choices=[*WRITERS], help="default: by the file's name, or jsonl"
    )
    parser.add_argument("--columns", metavar="A,B", type=column_list, help="default: all")
    parser.add_argument(
        "--out", dest="file", metavar="FILE",
        help="a new file, compressed if its name ends in .gz; default: standard output",
    )  # fmt: skip
    parser.add_argument(
        "--quote-formulas", action="store_true", help="in CSV for spreadsheets, see above"
    )
    given = parser.parse_args(arguments)
    reader = open_job(given.out)
    path = None if given.file is None else user_path(given.file, "--out")
    form = given.format or _format_of(path)
    columns = given.columns or ([reader.text_column] if form == "txt" else None)
    if given.quote_formulas and form != "csv":
        raise ConfigError(f"export --quote-formulas is for CSV, and the format is {form}")
    if form == "txt" and columns is not None and len(columns) != 1:
        raise ConfigError("export --format txt writes one column: name one in --columns")
    schema = reader.fields(columns)
    if schema is None:
        shown = reader.storage.shown
        raise ConfigError(f"no row of {shown} is finished yet: there is nothing to export")
    with _opened(path) as file:
        writer = spreadsheet if given.quote_formulas else WRITERS[form]
        count = _write(reader, schema, writer, file)
    if path is not None:
        print(f"{count:,} rows in {given.file}", file=sys.stderr)
    return 0


def _write(
    reader: JobFolderReader,
    schema: pa.Schema,
    writer: Callable[[TextIO, Sequence[str]], WriteRow],
    file: TextIO,
) -> int:
    """Write all rows and return their number."""
    read = row_reader(schema)
    write = writer(file, schema.names)
    count = 0
    for row in reader.rows(schema.names):
        write(read(row))
        count += 1
    return count


def _format_of(path: Path | None) -> str:
    """The format that a file's name says; JSON lines for standard output."""
    if path is None:
        return "jsonl"
    suffix = Path(path.name.removesuffix(".gz")).suffix
    name = {".json": "jsonl"}.get(suffix, suffix.removeprefix("."))
    if name not in WRITERS:
        raise ConfigError(
            f"--out {path.name}: its name does not say the format: add --format jsonl, csv or txt"
        )
    return name


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    """The new file to write to, or standard output. A file is removed if its end is not written."""
    if path is None:
        yield sys.stdout
        return
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        file = opener(path, "xt", encoding="utf-8", newline="")
    except FileExistsError:
        raise ConfigError(
            f"--out {path} is there already: choose another name, or delete it first"
        ) from None
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from None
    try:
        with file:
            yield file
    except OSError as error:
        path.unlink(missing_ok=True)
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
