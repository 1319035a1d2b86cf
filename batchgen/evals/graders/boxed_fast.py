r"""A fast path of `Extract`: finds the boxed answer of simple texts, for a whole Arrow array at
once.

Most texts of a model that was asked for a boxed number contain `\boxed{18}` and no other command.
The box is found by comparing bytes, in a fraction of the time that reading each text takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_COMMAND = b"\\boxed{"
_LONGEST = 32
"""The most characters in a box that is found here."""
_LAST_SPACE = ord(" ")
"""The last ASCII character that is white space; all above it are not."""


class LoneBoxes(NamedTuple):
    """The content of the only box of each simple text among N texts.

    Attributes:
        present: [N] bool, whether the text is simple.
        first, last: [N] int32, the content is the characters from `first` up to, not including,
            `last`; 0 for texts that are not simple. All characters are ASCII, so they are bytes.
    """

    present: npt.NDArray[np.bool_]
    first: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]

    @classmethod
    def none(cls, count: int) -> LoneBoxes:
        """The result for `count` texts of which none is simple."""
        return cls(np.zeros(count, bool), *np.zeros((2, count), np.int32))

    @property
    def others(self) -> list[int]:
        """The indices of the texts that are not simple."""
        indices: list[int] = np.flatnonzero(~self.present).tolist()
        return indices


def lone_boxes(texts: pa.StringArray, without: str = "") -> LoneBoxes:
    r"""Find the ASCII texts [N] whose only backslash begins `\boxed{…}`, and the content of the
    box.

    A text is not simple if it has one of the characters in `without`, or if its box is empty or
    longer than 32 characters, contains a brace, begins or ends with white space, or has no end.
    """
    data, begins, ends = _bytes(texts)
    slashes = np.flatnonzero(data == _COMMAND[0])
    slash, count = _within(slashes, begins, ends)
    rows = np.flatnonzero(count == 1)  # the texts with one backslash
    start = slashes[slash[rows]] + len(_COMMAND)
    is_inside = start < ends[rows]
    rows, start = rows[is_inside], start[is_inside]
    # [rows, 33]: the bytes after the command, without going beyond the end of all bytes.
    follows = start[:, None] + np.arange(_LONGEST + 1)
    content = data[np.minimum(follows, len(data) - 1)]
    is_simple = np.ones(len(rows), bool)
    # A text is simple if the whole command is there, its closing brace is within the text, and its
    # content is allowed.
    for distance, byte in enumerate(_COMMAND[::-1], 1):
        is_simple &= data[start - distance] == byte
    closing = content == ord("}")
    length = np.where(closing.any(1), closing.argmax(1), len(data))
    end = np.minimum(start + length, len(data))
    is_simple &= (end < ends[rows]) & (length > 0)
    is_simple &= ~((content == ord("{")) & (np.arange(_LONGEST + 1) < length[:, None])).any(1)
    is_simple &= (content[:, 0] > _LAST_SPACE) & (data[end - 1] > _LAST_SPACE)
    # Compare with the refused characters that occur at all, and with bytes that are not ASCII.
    whole = data.tobytes()
    refused = [data == ord(char) for char in without if char.isascii() and char.encode() in whole]
    for is_refused in refused if whole.isascii() else [*refused, data > 127]:
        _, number = _within(np.flatnonzero(is_refused), begins, ends)
        is_simple &= number[rows] == 0
    rows, start, end = rows[is_simple], start[is_simple], end[is_simple]
    result = LoneBoxes.none(len(texts))
    result.present[rows] = True
    result.first[rows] = start - begins[rows]
    result.last[rows] = end - begins[rows]
    return result


def parts_of(
    texts: pa.StringArray, first: npt.NDArray[np.int32], last: npt.NDArray[np.int32]
) -> pa.StringArray:
    """Cut a part out of each text [N], from byte `first` up to, not including, `last`."""
    data, begins, _ = _bytes(texts)
    lengths = last - first
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    source = np.repeat(begins + first - offsets[:-1], lengths) + np.arange(offsets[-1])
    parts = np.ascontiguousarray(data[source])
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(parts))


def _bytes(
    texts: pa.StringArray,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The bytes of all texts one after the other, and the indices [N], [N] at which each text
    begins and ends in them."""
    _, offsets_buffer, data_buffer = texts.buffers()
    if not len(texts) or data_buffer is None:
        nowhere = np.zeros(len(texts), np.int64)
        return np.zeros(0, np.uint8), nowhere, nowhere
    offsets = np.frombuffer(offsets_buffer, np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets[:-1] - offsets[0], offsets[1:] - offsets[0]


def _within(
    indices: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count the ascending byte `indices` in each text. Returns, for each text, how many come before
    it, and how many are in it."""
    before = np.searchsorted(indices, begins)
    return before, np.searchsorted(indices, ends) - before
