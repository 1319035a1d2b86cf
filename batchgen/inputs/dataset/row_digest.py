"""Digests of the rows of a data set. They show whether rows were only added to it.

The manifest keeps them, so that a job can be resumed with a data set that has grown.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BLOCK = 1000
"""A digest ends after every such number of rows. Digests depend on it."""


class Tables(Protocol):
    """A source of rows, such as `RowSource`, that can also give them as Arrow tables."""

    @property
    def num_ready(self) -> int | None:
        """How many rows are there; None for a stream."""
        ...

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """The rows before `stop` in tables of `size` rows, of which the last one may have fewer."""
        ...


def rows_digest(source: Tables, stop: int) -> list[str] | None:
    """Digests over the content of the rows from the first one on; None for a stream.

    Digest k, of 32 hex digits, is over the rows before `min(1000 * (k + 1), stop)`. Two lists for
    the same `stop` are equal if and only if all those rows are; else the first digest that differs
    tells the thousand in which the first changed row lies. Where only rows were added, all digests
    but the last one are also the first ones of the longer list.

    Names, order and types of the columns count, and all values. Where the rows lie, in how many
    files and in which format plays no part, as long as it gives the same types.
    """
    known = source.num_ready
    if known is None:
        return None
    assert stop <= known
    digest, digests = blake2b(digest_size=16), list[str]()
    for table in source.tables(stop, BLOCK):
        for name, column in zip(table.column_names, table.columns, strict=True):
            _add_bytes(digest, f"{name}\0{column.type}\0".encode())
            _add_array(digest, pa.concat_arrays(column.chunks))
        digests.append(digest.hexdigest())
    return digests


def array_digest(array: pa.Array, size: int = 16) -> bytes:
    """The digest of an array's values and nulls to the bit; NaN is equal to itself. Of two arrays
    of one type it is equal if and only if all values are."""
    digest = blake2b(digest_size=size)
    _add_array(digest, array)
    return digest.digest()


def _add_array(digest: blake2b, array: pa.Array) -> None:
    """Add the length of an array, where its nulls are, and its values, without what lies under
    nulls."""
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
    else:  # what is rare: decimals, maps
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
    """Add the values of an array of numbers or times, none of which is null."""
    if len(array):
        size = array.type.bit_width // 8
        start = array.offset * size
        digest.update(memoryview(array.buffers()[1])[start : start + len(array) * size])


def _joined(array: pa.Array) -> bytes | memoryview:
    """The bytes of all values of an array of large_binary, one after the other."""
    if not len(array):
        return b""
    ends = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, 8 * array.offset)
    return memoryview(array.buffers()[2] or b"")[ends[0] : ends[-1]]


def _add_bytes(digest: blake2b, data: bytes | memoryview) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
