"""Computes digests of a data set's rows, which show whether the data set has changed or only grown.

The manifest stores them, so that a job can be resumed with a data set that has grown.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BLOCK = 1000
"""The number of rows after which a new digest is recorded. Stored digests depend on it."""


class Tables(Protocol):
    """A source of rows, such as `RowSource`, that can return them as Arrow tables."""

    @property
    def num_ready(self) -> int | None:
        """The number of rows that can be read; None for a stream."""
        ...

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """Yield the rows before `stop` in tables of `size` rows; the last table may have fewer."""
        ...


def rows_digest(source: Tables, stop: int) -> list[str] | None:
    """Return digests of the first `stop` rows; None for a stream.

    Digest k, of 32 hex digits, covers the rows before `min(1000 * (k + 1), stop)`. Two lists for
    the same `stop` are equal if and only if all these rows are equal. Otherwise the first different
    digest shows which thousand contains the first changed row. If rows were only added, all old
    digests except the last are a prefix of the new list.

    The digests cover names, order and types of the columns, and all values. Location, number and
    format of the files do not matter if the types are the same.
    """
    num_ready = source.num_ready
    if num_ready is None:
        return None
    assert stop <= num_ready
    digest, digests = blake2b(digest_size=16), list[str]()
    for table in source.tables(stop, BLOCK):
        for name, column in zip(table.column_names, table.columns, strict=True):
            _add_bytes(digest, f"{name}\0{column.type}\0".encode())
            _add_array(digest, pa.concat_arrays(column.chunks))
        digests.append(digest.hexdigest())
    return digests


def array_digest(array: pa.Array, size: int = 16) -> bytes:
    """Return the digest of an array's values and nulls, `size` bytes. Digests of two arrays of one
    type are equal if and only if all values are equal bit for bit; NaN equals itself."""
    digest = blake2b(digest_size=size)
    _add_array(digest, array)
    return digest.digest()


def _add_array(digest: blake2b, array: pa.Array) -> None:
    """Add an array to a digest: its length, the positions of nulls, and its values except those
    under nulls."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    digest.update(len(array).to_bytes(8, "little") + array.null_count.to_bytes(8, "little"))
    if array.null_count:
        digest.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
        if not pa.types.is_struct(kind):
            array = array.drop_null()
    if pa.types.is_struct(kind):
        for child in array.flatten():  # a child is null where its struct is
            _add_array(digest, child)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _add_values(digest, pc.list_value_length(array))
        _add_array(digest, array.flatten())
    elif pa.types.is_fixed_size_list(kind):
        _add_array(digest, array.flatten())
    elif pa.types.is_dictionary(kind):
        _add_array(digest, array.dictionary_decode())
    elif _is_text_or_binary(kind):
        _add_values(digest, pc.binary_length(array))
        _add_bytes(digest, _joined(array.cast(pa.large_binary())))
    elif pa.types.is_boolean(kind):
        _add_values(digest, array.cast(pa.uint8()))
    elif pa.types.is_primitive(kind):
        _add_values(digest, array)
    else:  # rare types: decimals, maps
        _add_bytes(digest, repr(array.to_pylist()).encode("utf-8", "surrogatepass"))


def _is_text_or_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _add_values(digest: blake2b, array: pa.Array) -> None:
    """Add the values of an array of numbers or times without nulls."""
    if len(array):
        size = array.type.bit_width // 8
        start = array.offset * size
        digest.update(memoryview(array.buffers()[1])[start : start + len(array) * size])


def _joined(array: pa.Array) -> bytes | memoryview:
    """Return the concatenated bytes of all values of a large_binary array."""
    if not len(array):
        return b""
    ends = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, 8 * array.offset)
    return memoryview(array.buffers()[2] or b"")[ends[0] : ends[-1]]


def _add_bytes(digest: blake2b, data: bytes | memoryview) -> None:
    """Add bytes, after their length."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
