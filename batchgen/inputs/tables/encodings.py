"""Reads text files in any encoding: converts them to UTF-8, and finds bytes that are invalid in the
encoding. The readers of JSON, CSV and text use it."""

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
"""The bytes that are read at a time."""


def open_bytes(file: Path) -> GzipFile | BufferedReader:
    """Open a file to read its bytes, decompressed if its name ends in .gz."""
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def is_utf8(encoding: str | None) -> bool:
    """Return whether text in the encoding can be read as UTF-8. None stands for UTF-8."""
    return encoding is None or codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")


def as_utf8(file: Path, encoding: str, folder: Path, number: int) -> Path:
    """Write a text file to a folder as UTF-8, uncompressed, and return the new file. An existing
    one is reused.

    Args:
        number: part of the new file's name.

    Raises:
        ConfigError: a byte is invalid in the encoding.
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
    """Raise ConfigError, with the position, if a byte of a text file is invalid in its encoding."""
    for _ in _decoded(file, encoding or "utf-8"):
        pass


def _decoded(file: Path, encoding: str) -> Iterator[str]:
    """Yield the text of a file, in pieces. Raises ConfigError, with the position, for an invalid
    byte."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line, start, at_end = 1, 0, False  # start: the offset of the next chunk in the file
    with open_bytes(file) as data:
        while not at_end:
            chunk = data.read(_CHUNK)
            at_end = not chunk
            kept = len(decoder.getstate()[0])  # bytes of an unfinished character, decoded next
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
