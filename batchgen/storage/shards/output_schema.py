"""The Arrow schema of the output, which is known before the first token, and rows in that form."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from batchgen.config.groups.job_config import PARSED
from batchgen.engine.interface.outputs import (
    Begun,
    OutputColumn,
    RequestError,
    RequestOutput,
    RowCount,
)
from batchgen.storage.shards.enough import (
    ENOUGH_COLUMNS,
    FAILED,
    NUM_SAMPLES,
    NUM_VALID,
    OUTCOME,
    VALID,
    Enough,
)
from batchgen.storage.shards.image_column import PROMPT_IMAGES
from batchgen.storage.shards.parsed_column import ParsedColumn
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import AS_GIVEN

SCHEMA_VERSION = "1"

TEXT = "text"
_BEFORE = (
    ("row_id", pa.string(), "the row's dataset.id_column, or its position"),
    ("row_index", pa.int64(), "position of the row in the dataset, from 0"),
    ("sample_index", pa.int32(), "which of the sampling.n samples of the row, from 0"),
)
_AFTER = (
    (TEXT, pa.string(), "the generated text, cut before a stop string; null on error"),
    ("token_ids", pa.list_(pa.int32()), "every generated token, with the one that ended the row"),
    ("prompt_token_ids", pa.list_(pa.int32()), "the prompt as the model saw it; null on error"),
    ("finish_reason", pa.string(), "stop, length, constraint_conflict or error"),
    ("stop", pa.string(), "the stop string, or the text of the stop id, that ended the row"),
    (
        "error",
        pa.struct([("type", pa.string()), ("message", pa.string())]),
        "why the row has no answer; null if it has one",
    ),
    ("num_prompt_tokens", pa.int32(), "length of the prompt; null if the row failed before it"),
    ("num_generated_tokens", pa.int32(), "length of token_ids"),
)
PROMPT_TOKEN_IDS = "prompt_token_ids"
ANSWER_TOKEN_IDS = "answer_token_ids"
_ANSWER = (
    ANSWER_TOKEN_IDS,
    pa.list_(pa.int32()),
    "the given answer, each of whose tokens is scored; null on error",
)
_OF_ANSWERS = {
    TEXT: "empty, as nothing is generated; null on error",
    "finish_reason": "scored or error",
}
"""What columns mean where answers are scored."""
_OF_READ_ROWS = _OF_ANSWERS | {"finish_reason": "read or error"}
"""What columns mean where rows are only read."""
_OF_CHANNELS = {
    TEXT: "the final channel, cut before a stop string; null on error, and if there is none",
    "finish_reason": "stop (in the final channel), tool_call, no_answer (it ended elsewhere), "
    "length, constraint_conflict or error",
}
"""What columns mean where rows have channels."""
REASONING, CHANNEL = "reasoning", "channel"
"""Columns that `SplitOutput.columns` may have."""
SATISFIED = "constraint_satisfied"
_SATISFIED = (
    SATISFIED,
    pa.bool_(),
    "whether what was generated is complete under the row's constraint; null if it has none or "
    "the row failed",
)


REPLAY_EXACT = "replay_exact"
_REPLAY_EXACT = (
    REPLAY_EXACT,
    pa.bool_(),
    "whether each token was scored given what was unmasked before its step: false if it is not "
    "known what stood behind the answer in its last block, or if a constraint took part in the "
    "distribution; null if the row failed",
)


IMAGE_FIELDS = (
    ("path", pa.string()),
    ("digest", pa.string()),
    ("width", pa.int32()),
    ("height", pa.int32()),
    ("tokens", pa.int32()),
)
_IMAGES = (
    PROMPT_IMAGES,
    pa.list_(pa.struct(IMAGE_FIELDS)),
    "the images of the prompt: what the row names each, a digest of its file, and the size in "
    "pixels and tokens at which the model read it; null if the row failed before",
)


class SplitOutput(NamedTuple):
    """An output whose text is the answer alone, and the values of the columns of what it said
    besides; TEXT is among them, and None, if there is no answer."""

    output: RequestOutput
    columns: Mapping[str, Any] = {}


class FinishedRow(NamedTuple):
    """One sample of one row that is finished, with the `fields` that are copied from the data set.
    A row that never reached the engine has an `error` instead of an `output`. `valid` is whether it
    fulfils `sampling.until.where`. `extra` are the columns of `SplitOutput`. `images` are what the
    output says of those of the prompt, None where they are not known. `begun_tokens` is how many of
    its tokens earlier attempts had generated."""

    row_id: str
    row_index: int
    sample_index: int
    fields: Mapping[str, Any]
    output: RequestOutput | None = None
    error: RequestError | None = None
    extra: Mapping[str, Any] = {}
    key: bytes | None = None  # `reuse.row_key`, in jobs that keep keys
    is_copied: bool = False  # from an older job, instead of being computed
    valid: bool | None = None
    images: Sequence[Mapping[str, Any]] | None = None
    begun_tokens: int = 0

    @property
    def finish_reason(self) -> str:
        return "error" if self.output is None else self.output.finish_reason

    @property
    def failure(self) -> RequestError | None:
        """Why the row has no answer, None if it has one."""
        return self.error if self.output is None else self.output.error


@dataclass(frozen=True)
class OutputSchema:
    """The columns of the output.

    Attributes:
        arrow: the schema of journals and shards. The metadata of a field says what it means.
        passthrough: names of the columns that are copied from the data set.
        columns: the per-token columns, in their order.
        counts: names of the strategy's counts, which are columns too.
        text_column: the name of the column of generated text.
        beside: names of the columns of what rows say beside their text.
        enough: when a row has enough samples; None if all rows have the same number.
    """

    arrow: pa.Schema
    passthrough: tuple[str, ...]
    columns: tuple[OutputColumn, ...]
    counts: tuple[str, ...]
    parsed: ParsedColumn | None
    text_column: str = TEXT
    extra: tuple[str, ...] = ()
    enough: Enough | None = None

    @staticmethod
    def build(
        passthrough: pa.Schema,
        columns: Sequence[OutputColumn],
        counts: Sequence[RowCount],
        prompt_token_ids: bool,
        *,
        constrained: bool = False,
        extra: Sequence[pa.Field] = (),
        parsed: ParsedColumn | None = None,
        text_column: str = TEXT,
        answers: bool = False,
        replays: bool = False,
        images: bool = False,
        enough: Enough | None = None,
        is_read: bool = False,
    ) -> "OutputSchema":
        """The schema of a job.

        Args:
            prompt_token_ids: whether to write the prompts.
            extra: the columns of what rows say beside their text, such as thoughts.
            constrained: whether a column says which rows satisfy their constraint.
            answers: whether rows have given answers, which are scored.
            replays: whether these are trajectories.
            images: whether rows may have images.
            enough: when a row has enough samples; None if all rows have the same number.
            is_read: whether rows are only read.

        Raises:
            ConfigError: a column of the data set has the name of a column that batchgen writes, or
                `text_column` is the name of another such column.
        """
        before = [described_field(*column) for column in _BEFORE]
        has_channels = any(column.name == CHANNEL for column in extra)
        own = _OF_ANSWERS if answers else _OF_CHANNELS if has_channels else {}
        after = _answer_fields(_OF_READ_ROWS if is_read else own, text_column, prompt_token_ids)
        asked = (
            (_SATISFIED, constrained),
            (_ANSWER, answers),
            (_REPLAY_EXACT, replays),
            (_IMAGES, images),
        )
        more = [described_field(*column) for column, wanted in asked if wanted]
        if parsed is not None:
            more.append(described_field(PARSED, parsed.type, parsed.meaning))
        more += [] if enough is None else [described_field(*column) for column in ENOUGH_COLUMNS]
        not_run = "; null if the row failed before its first"
        more += [
            described_field(count.name, pa.int32(), count.meaning + not_run) for count in counts
        ]
        more += [_column_field(column) for column in columns]
        # Also columns that this job leaves out: a name shall mean the same in every output.
        taken = {name for name, *_ in _BEFORE + _AFTER} | {SATISFIED, PARSED}
        taken |= {field.name for field in (*extra, *more)}
        taken.remove(TEXT)
        _check_clashes(passthrough.names, taken, text_column)
        # The metadata of the whole input schema is dropped: it describes the input's columns alone.
        meaning = {"meaning": AS_GIVEN.decode()}
        given = [f.with_metadata(meaning | _strings(f.metadata)) for f in passthrough]
        metadata = {b"batchgen.schema": SCHEMA_VERSION.encode()}
        metadata |= {} if enough is None else enough.metadata
        after[1:1] = extra
        schema = pa.schema(before + given + after + more, metadata=metadata)
        return OutputSchema(
            schema,
            tuple(passthrough.names),
            tuple(columns),
            tuple(count.name for count in counts),
            parsed,
            text_column,
            tuple(column.name for column in extra),
            enough,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes that one generated token takes in all per-token columns together."""
        return 4 + sum(
            column.dtype.itemsize * int(np.prod(column.tail_shape))
            for column in self.columns
            if column.scope != "row"
        )

    def encode(self, rows: Sequence[FinishedRow]) -> pa.RecordBatch:
        """The rows as one Arrow batch, each column made as one array."""
        outputs = [row.output for row in rows]
        values: dict[str, Any] = {
            "row_id": [row.row_id for row in rows],
            "row_index": [row.row_index for row in rows],
            "sample_index": [row.sample_index for row in rows],
            self.text_column: [
                row.extra.get(TEXT, o.text) if o and o.finish_reason != "error" else None
                for row, o in zip(rows, outputs, strict=True)
            ],
            "finish_reason": [row.finish_reason for row in rows],
            "stop": [o.stop if o else None for o in outputs],
            "error": [_error(row.failure) for row in rows],
            "num_prompt_tokens": [len(o.prompt_token_ids) if o else None for o in outputs],
            "num_generated_tokens": [len(o.token_ids) if o else 0 for o in outputs],
            "token_ids": id_lists([o.token_ids if o else [] for o in outputs]),
        }
        for name in self.extra:
            values[name] = [row.extra.get(name) for row in rows]
        for name in self.passthrough:
            values[name] = [row.fields[name] for row in rows]
        for name in self.counts:
            values[name] = [o.counts[name] if o else None for o in outputs]
        for column in self.columns:
            make = _row_values if column.scope == "row" else column_lists
            values[column.name] = make(column, outputs)
        if SATISFIED in self.arrow.names:
            values[SATISFIED] = [
                o.constraint_satisfied if o and o.finish_reason != "error" else None
                for o in outputs
            ]
        if ANSWER_TOKEN_IDS in self.arrow.names:
            values[ANSWER_TOKEN_IDS] = [o.answer_token_ids if o else None for o in outputs]
        if REPLAY_EXACT in self.arrow.names:
            values[REPLAY_EXACT] = [
                o.replay_exact if o and o.finish_reason != "error" else None for o in outputs
            ]
        if PROMPT_IMAGES in self.arrow.names:
            values[PROMPT_IMAGES] = [row.images for row in rows]
        if self.parsed is not None:
            values[PARSED] = self.parsed.array(outputs)
        if self.enough is not None:
            values[VALID] = [row.valid for row in rows]
            values[OUTCOME] = [None if row.output else FAILED for row in rows]
            values[NUM_VALID] = values[NUM_SAMPLES] = [None] * len(rows)
        if PROMPT_TOKEN_IDS in self.arrow.names:
            values[PROMPT_TOKEN_IDS] = [o.prompt_token_ids if o else None for o in outputs]
        arrays = [
            value if isinstance(value := values[f.name], pa.Array) else pa.array(value, f.type)
            for f in self.arrow
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)


def _check_clashes(columns: Sequence[str], taken: Collection[str], text_column: str) -> None:
    """Refuse columns of the data set that have the name of a column that batchgen writes."""
    if text_column in taken:
        raise ConfigError(
            f"output.text_column={text_column} is the name of another column that batchgen writes: "
            "choose another name"
        )
    names = {*taken, text_column}
    clashes = [name for name in columns if name in names]
    if not clashes:
        return
    listed = ", ".join(map(repr, clashes))
    what = f"dataset columns {listed} have the names of columns that batchgen writes: "
    if clashes == [text_column]:
        what = (
            f"dataset column {listed} has the name of the column of generated text: write that one "
            "under another name, such as output.text_column=answer, or "
        )
    kept = ",".join(name for name in columns if name not in names)
    advice = f"leave yours out of the output with 'dataset.columns=[{kept}]'; prompts can still "
    raise ConfigError(what + advice + "use them")


def described_field(name: str, type: pa.DataType, meaning: str) -> pa.Field:
    """A column of the output that says what it means."""
    return pa.field(name, type, metadata={"meaning": meaning})


def _strings(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (metadata or {}).items()}


def _answer_fields(
    meanings: Mapping[str, str], text_column: str, prompt_token_ids: bool
) -> list[pa.Field]:
    """Return the fields that every answer has; `meanings` replaces the usual ones by name."""
    return [
        described_field(text_column if name == TEXT else name, type, meanings.get(name, meaning))
        for name, type, meaning in _AFTER
        if prompt_token_ids or name != PROMPT_TOKEN_IDS
    ]


def _column_field(column: OutputColumn) -> pa.Field:
    type = pa.from_numpy_dtype(column.dtype)
    for size in reversed(column.tail_shape):
        type = pa.list_(type, size)
    entries = {
        "output": "one entry per generated token",
        "edits": "one entry per replaced token: place in token_ids, step, old and new id",
        "tail": "one entry per token that the end of the row cut off its last step",
        "context": "one entry per token that went through the model",
        "answer": "one entry per token of the answer",
        "choice": "one entry per choice of the row's constraint",
        "row": "what was pooled from the row's hidden states; null on error",
    }[column.scope]
    of_row = column.scope == "row"
    shape = column.tail_shape if of_row else ("num_tokens", *column.tail_shape)
    metadata = {
        "meaning": f"{column.name}: {entries}",
        "scope": column.scope,
        "dtype": str(column.dtype),
        "shape": str([*shape]).replace("'", ""),
    } | dict(column.metadata)
    return pa.field(column.name, type if of_row else pa.list_(type), metadata=metadata)


def _error(error: RequestError | None) -> dict[str, str] | None:
    return None if error is None else {"type": error.type, "message": str(error)}


def _list_array(lengths: list[int], values: pa.Array) -> pa.Array:
    """Lists of these lengths, which have the values one after the other."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    # What ListArray.from_arrays makes, in a seventh of its time.
    return pa.Array.from_buffers(
        pa.list_(values.type), len(lengths), [None, pa.py_buffer(offsets)], children=[values]
    )


def id_lists(lists: list[list[int]]) -> pa.Array:
    """A column of lists of token ids."""
    values = array("i")  # it takes a list in a tenth of the time that NumPy takes
    for ids in lists:
        values.fromlist(ids)
    flat = np.frombuffer(values, np.int32) if values else np.empty(0, np.int32)
    return _list_array([len(ids) for ids in lists], pa.array(flat))


def _row_values(column: OutputColumn, outputs: Sequence[RequestOutput | None]) -> pa.Array:
    """A column of row scope: for each row a list of a fixed size, null on an error."""
    (size,) = column.tail_shape
    failed = [o is None or o.finish_reason == "error" for o in outputs]
    values = np.zeros((len(outputs), size), column.dtype)
    for place, output in enumerate(outputs):
        if output is not None and not failed[place]:
            values[place] = output.columns[column.name]
    mask = pa.array(failed, pa.bool_())
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), size, mask=mask)


def column_lists(column: OutputColumn, outputs: Sequence[RequestOutput | Begun | None]) -> pa.Array:
    """A per-token column: for each row a list of [num_tokens, *tail] values, empty on an error."""
    given = [o.columns[column.name] if o else None for o in outputs]
    present = [values for values in given if values is not None]
    for each in present:
        assert each.shape[1:] == column.tail_shape, f"{column.name} has shape {each.shape}"
    flat = np.concatenate([a.reshape(-1) for a in present]) if present else np.empty(0)
    values = pa.array(np.ascontiguousarray(flat, column.dtype))
    for size in reversed(column.tail_shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return _list_array([0 if each is None else len(each) for each in given], values)
