"""Parquet files of which every byte is checked when it is read: shards, and the files in `grades`.

The pages of a Parquet file have checksums, but its footer and the headers of its pages have none.
Therefore `seal` adds checksums between the last row group and the footer, where Parquet allows
extra bytes and other readers skip them: `uint32 crc32` of each column chunk, row group by row
group, then `uint32 crc32` of the footer, and `_MARK`; all of it little endian. Files of older
versions are not sealed; the checksums of their pages are checked, if they have any.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from io import SEEK_END, RawIOBase
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.storage.leases.patience import patiently
from batchgen.storage.stores.range_file import RangeFile
from batchgen.util.errors import JobError

Source = Path | RawIOBase
"""A file: a path, or a file object whose `str` is its URL (`Storage.parquet`)."""
_MARK = b"\xb6sums\x01\r\n"
_END = struct.Struct("<I4s")  # follows the footer: the footer's length, and b"PAR1"
_SUM_BYTES = 4  # of a checksum
_AT_ONCE = 2**20  # bytes that are digested at a time
_MOST_AT_END = 64 * 2**10  # bytes at the end of a file, which pyarrow reads first


class DamagedFile(JobError):
    """A file of a job differs from what was written, or lacks rows."""


class CheckedFile:
    """An open Parquet file. What is read from it is exactly what was written.

    All methods raise `DamagedFile`, which names the damaged row group, or `JobError` if the file
    cannot be read.

    Attributes:
        schema: the columns.
        metadata: the content of the footer.
    """

    schema: pa.Schema
    metadata: pq.FileMetaData

    def __init__(self, source: Source) -> None:
        self._source = source
        with _damage_reported(source):
            self._bytes = _Bytes(source)
            try:
                end_of_sums = self._check_footer()
                self._file = pq.ParquetFile(
                    self._bytes, page_checksum_verification=end_of_sums is None
                )
                self.schema, self.metadata = self._file.schema_arrow, self._file.metadata
                self._sums = None if end_of_sums is None else self._read_sums(end_of_sums)
            except BaseException:
                self._bytes.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._bytes.close()

    def batches(
        self,
        size: int,
        columns: Sequence[str] | None = None,
        groups: Iterable[int] | None = None,
        *,
        use_threads: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of some row groups, or of all if `groups` is None, at most `size` at a
        time."""
        names = None if columns is None else list(columns)
        for group in range(self.metadata.num_row_groups) if groups is None else groups:
            with _damage_reported(self._source, group):
                self._check(group, names)
                batches = self._file.iter_batches(size, [group], names, use_threads=use_threads)
            while True:
                with _damage_reported(self._source, group):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield batch

    def read(
        self, columns: Sequence[str] | None = None, groups: Iterable[int] | None = None
    ) -> pa.Table:
        """The rows of some row groups, or of all if `groups` is None."""
        names = None if columns is None else list(columns)
        tables = []
        for group in range(self.metadata.num_row_groups) if groups is None else groups:
            with _damage_reported(self._source, group):
                self._check(group, names)
                tables.append(self._file.read_row_group(group, names))
        with _damage_reported(self._source):
            return pa.concat_tables(tables or [self._file.read_row_groups([], names)])

    def verify(self) -> None:
        """Check every byte of the rows."""
        for group in range(self.metadata.num_row_groups):
            with _damage_reported(self._source, group):
                self._check(group, None)
                if self._sums is None:
                    self._file.read_row_group(group)

    @property
    def name(self) -> str:
        """The path or URL of the file."""
        return str(self._source)

    def known_digest(self) -> str | None:
        """The `content_digest`, if it is known without reading the whole file; otherwise None."""
        return None if self._sums is None else self.content_digest()

    def content_digest(self) -> str:
        """A digest of the file's content, 32 hex digits: of the checksums of its chunks, or of all
        its bytes if it is not sealed."""
        digest = blake2b(str(self.metadata.num_rows).encode(), digest_size=16)
        if self._sums is not None:
            digest.update(b"".join(self._sums))
            return digest.hexdigest()
        with _damage_reported(self._source):
            for start in range(0, self._bytes.size, _AT_ONCE):
                digest.update(self._bytes.pread(start, min(_AT_ONCE, self._bytes.size - start)))
        return digest.hexdigest()

    def _check_footer(self) -> int | None:
        """The offset of the end of the chunks' checksums; None if the file was not sealed."""
        size, at_end = self._bytes.size, self._bytes.at_end
        if len(at_end) < _END.size or not at_end.endswith(b"PAR1"):
            return None  # not a Parquet file, which pyarrow reports
        length, _ = _END.unpack(at_end[-_END.size :])
        end_of_sums: int = size - _END.size - length - len(_MARK) - _SUM_BYTES
        if end_of_sums >= 0:
            # The footer's checksum, _MARK, and the footer with _END.
            content = self._bytes.pread(end_of_sums, size - end_of_sums)
            footer_sum, rest = content[:_SUM_BYTES], content[_SUM_BYTES:]
            if rest.startswith(_MARK):
                if footer_sum == _sum(rest.removeprefix(_MARK)):
                    return end_of_sums
                raise damaged(self._source, "its footer differs from what was written")
        if _MARK in at_end:
            raise damaged(self._source, "the length of its footer differs from what was written")
        return None

    def _read_sums(self, end: int) -> list[bytes]:
        """The checksums of the chunks, which end at the offset `end`."""
        count = self.metadata.num_row_groups * self.metadata.num_columns
        content = self._bytes.pread(end - _SUM_BYTES * count, _SUM_BYTES * count)
        starts = range(0, _SUM_BYTES * count, _SUM_BYTES)
        return [content[start : start + _SUM_BYTES] for start in starts]

    def _check(self, group: int, columns: Sequence[str] | None) -> None:
        """Read the chunks of some columns and compare them with their checksums. They are kept for
        pyarrow, which reads them next."""
        self._bytes.held.clear()
        if self._sums is None:
            return
        meta = self.metadata.row_group(group)
        wanted = None if columns is None else set(columns)
        for number in range(meta.num_columns):
            chunk = meta.column(number)
            name = chunk.path_in_schema
            around = accumulate(name.split("."), "{}.{}".format)  # the column and its parents
            if wanted is None or not wanted.isdisjoint(around):
                start, length = _byte_range(chunk)
                content = self._bytes.held[start] = self._bytes.pread(start, length)
                if _sum(content) != self._sums[group * meta.num_columns + number]:
                    why = f"row group {group}: column {name} differs from what was written"
                    raise damaged(self._source, why)


def read_schema(source: Source) -> pa.Schema:
    """Read the schema of a file, with the metadata that was written with it."""
    with CheckedFile(source) as file:
        return file.schema


def seal(path: Path) -> None:
    """Add the checksums to a Parquet file that was just written."""
    meta = pq.read_metadata(path)
    groups = [meta.row_group(group) for group in range(meta.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(meta.num_columns)]
    with path.open("r+b", buffering=0) as file:
        sums = [_sum(_pread(file, *_byte_range(chunk))) for chunk in chunks]
        start = path.stat().st_size - _END.size - meta.serialized_size
        footer = _pread(file, start, meta.serialized_size + _END.size)
        file.seek(start)
        file.write(b"".join([*sums, _sum(footer), _MARK, footer]))


def damaged(source: Source, why: str) -> DamagedFile:
    """The error for a shard, or a file of grades, that is damaged; `why` says how."""
    folder, name = str(source).rpartition("/")[::2]
    job = folder.removesuffix("/grades")
    if job != folder:
        return DamagedFile(
            f"the grades {source} are damaged ({why}): delete {name} there and run "
            f"`batchgen grade {job}`, which makes them again"
        )
    return DamagedFile(
        f"the published shard {source} is damaged ({why}): delete it and run the same command, "
        "which computes its rows again"
    )


def unreadable_file(source: Source, error: OSError) -> JobError:
    """The error for a file that the system cannot read, although it may be intact."""
    return JobError(
        f"cannot read {source}: {error.strerror or error}. The file itself may be intact: check "
        "the disk or the file server, and run the same command again"
    )


class _Bytes(RangeFile):
    """The bytes of a file, as pyarrow reads them. Chunks that were just checked come from memory.

    Attributes:
        held: offset → the chunk that was read there.
        size: the bytes of the file.
        at_end: its last bytes.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file: Any = None
        self.held: dict[int, bytes] = {}
        self.size, self.at_end = patiently(self._read_end)
        self._end = self.size - len(self.at_end)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def length(self) -> int:
        return self.size

    def pread(self, start: int, length: int) -> bytes:
        """Read bytes of the file. The bytes at its end are read from the file only once."""
        if (held := self.held.get(start)) is not None and len(held) == length:
            return held
        if start >= self._end:
            return self.at_end[start - self._end :][:length]
        return patiently(lambda: self._read(start, length))

    def _read_end(self) -> tuple[int, bytes]:
        """The size of the file, and its last bytes."""
        self._read(0, 0)  # opens the file
        size = self._file.seek(0, SEEK_END)
        start = max(0, size - _MOST_AT_END)
        return size, self._read(start, size - start)

    def _read(self, start: int, length: int) -> bytes:
        if self._file is None:
            source = self._source
            self._file = source.open("rb", buffering=0) if isinstance(source, Path) else source
        try:
            return _pread(self._file, start, length)
        except OSError:
            self._file = None  # opened again next time, in case a file server lost the handle
            raise


def _pread(file: Any, start: int, length: int) -> bytes:
    """Read bytes of a file; fewer only at its end."""
    file.seek(start)
    content: bytes = file.read(length)
    while len(content) < length and (more := file.read(length - len(content))):
        content += more
    return content


def _byte_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """The offset of a column chunk, and its bytes."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        start = min(start, chunk.dictionary_page_offset)
    return start, chunk.total_compressed_size


def _sum(content: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(content))


@contextmanager
def _damage_reported(source: Source, group: int | None = None) -> Iterator[None]:
    """A context in which errors name the file and the row group."""
    where = "" if group is None else f"row group {group}: "
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise unreadable_file(source, error) from error
        raise damaged(source, f"{where}{error}") from error
    except MemoryError as error:
        raise JobError(f"not enough memory to read {source} ({where}{error})") from error
    except (pa.ArrowException, ValueError) as error:
        raise damaged(source, f"{where}{error}") from error
