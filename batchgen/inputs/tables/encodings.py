"""Reads text files of any encoding: converts them to UTF-8, and finds bytes that break the
encoding."""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Iterator
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path

from batchgen.util.errors import ConfigError
from batchgen.util.temporary import temporary_name

_CHUNK = 1 << 20


def open_bytes(file: Path) -> GzipFile | BufferedReader:
    """The content of a file, of a .gz file what it was before it was compressed."""
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def is_utf8(encoding: str | None) -> bool:
    """Whether text in the encoding can be read as UTF-8; None is UTF-8."""
    return encoding is None or codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")


def as_utf8(file: Path, encoding: str, folder: Path, number: int) -> Path:
    """Rewrite a text file as UTF-8, uncompressed, into a folder; `number` makes the new name.

    Raises:
        ConfigError: a byte does not belong to the encoding.
        OSError: a file cannot be read or written.
    """
    suffix = Path(file.name.removesuffix(".gz")).suffix
    new = folder / f"utf8-{number:05}{suffix}"
    if not new.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = temporary_name(new)
        with part.open("wb") as out:
            for text in _decoded(file, encoding):
                out.write(text.encode())
        part.replace(new)
    return new


def check_encoding(file: Path, encoding: str | None) -> None:
    """Look for the first byte of a text file that does not belong to its encoding."""
    for _ in _decoded(file, encoding or "utf-8"):
        pass


def _decoded(file: Path, encoding: str) -> Iterator[str]:
    """The text of a file, in pieces."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line, start, at_end = 1, 0, False  # start: where in the file the next piece begins
    with open_bytes(file) as data:
        while not at_end:
            chunk = data.read(_CHUNK)
            at_end = not chunk
            kept = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, at_end)
            except UnicodeDecodeError as error:
                before = error.object[: error.start].decode(encoding, "ignore")
                raise ConfigError(
                    f"dataset.path: {file}, line {line + before.count(chr(10))}: not {encoding}: "
                    f"{error.reason} at byte {start - kept + error.start} of the file: set "
                    "dataset.encoding to the encoding that the file has, such as latin-1 or utf-16"
                ) from None
            yield text
            line += text.count("\n")
            start += len(chunk)
