"""The Arrow schema of the output, and the conversion of finished rows into Arrow.

The schema of a job (`OutputSchema`) is known before the first token. Journals and shards have it.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES
from batchgen.storage.shards.enough import (
    FAILED,
    NUM_SAMPLES,
    NUM_VALID,
    OUTCOME,
    VALID,
    Enough,
)
from batchgen.storage.shards.output_fields import (
    ANSWER_TOKEN_IDS,
    PROMPT_TOKEN_IDS,
    REPLAY_EXACT,
    SATISFIED,
    SCHEMA_VERSION,
    TEXT,
    answer_fields,
    changed_meanings,
    check_clashes,
    chosen_fields,
    column_field,
    copied_fields,
    count_field,
    fields_before,
)
from batchgen.storage.shards.parsed_column import ParsedColumn


class SplitOutput(NamedTuple):
    """An output whose text is only the answer.

    Attributes:
        output: the output.
        columns: the values of the columns for its other texts, such as the reasoning. If there is
            no answer, TEXT is among them, with None.
    """

    output: RequestOutput
    columns: Mapping[str, Any] = {}


class FinishedRow(NamedTuple):
    """One finished sample of one row.

    Attributes:
        row_id, row_index: the row.
        sample_index: the number of the sample.
        fields: the columns that are copied from the data set.
        output: the output of the engine; None if the row never reached the engine.
        error: why it did not reach the engine.
        extra: the `columns` of `SplitOutput`.
        key: the key by which later jobs find the row (`reuse/row_key.py`); None if the job keeps no
            keys.
        is_copied: whether the row was copied from an older job instead of being computed.
        valid: whether the sample fulfils `sampling.until.where`.
        images: the column of the prompt's images; None if they are not known.
        begun_tokens: the number of its tokens that earlier attempts had generated.
    """

    row_id: str
    row_index: int
    sample_index: int
    fields: Mapping[str, Any]
    output: RequestOutput | None = None
    error: RequestError | None = None
    extra: Mapping[str, Any] = {}
    key: bytes | None = None
    is_copied: bool = False
    valid: bool | None = None
    images: Sequence[Mapping[str, Any]] | None = None
    begun_tokens: int = 0

    @property
    def finish_reason(self) -> str:
        return "error" if self.output is None else self.output.finish_reason

    @property
    def failure(self) -> RequestError | None:
        """Why the row has no answer; None if it has one."""
        return self.error if self.output is None else self.output.error


@dataclass(frozen=True)
class OutputSchema:
    """The columns of a job's output.

    Attributes:
        arrow: the schema of journals and shards. The metadata of a field has its meaning.
        passthrough: names of the columns that are copied from the data set.
        columns: the per-token columns, in their order.
        counts: names of the strategy's counts, which are columns too.
        parsed: the column of parsed JSON; None without it.
        text_column: the name of the column of generated text.
        extra: names of the columns of texts besides the answer.
        enough: the rule by which a row has enough samples, which adds `ENOUGH_COLUMNS`; None if all
            rows have the same number.
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
        """Build the schema of a job.

        Args:
            passthrough: the columns that are copied from the data set.
            columns, counts: those that the engine returns, and the counts of the strategy.
            prompt_token_ids: whether to write the prompts.
            constrained: whether a column says which rows satisfy their constraint.
            extra: the columns of texts besides the answer, such as the reasoning.
            answers, replays: whether rows have given answers to score, and these are trajectories.
            images: whether rows may have images.
            is_read: whether rows are only read: nothing is generated, as for embeddings.

        Raises:
            ConfigError: a column has the name of another column that batchgen writes.
        """
        meanings = changed_meanings(answers, is_read, extra)
        after = answer_fields(text_column, prompt_token_ids, meanings)
        more = chosen_fields(
            constrained=constrained,
            answers=answers,
            replays=replays,
            images=images,
            parsed=parsed,
            has_enough=enough is not None,
        )
        more += [count_field(count) for count in counts]
        more += [column_field(column) for column in columns]
        check_clashes(passthrough.names, [*extra, *more], text_column)
        metadata = {b"batchgen.schema": SCHEMA_VERSION.encode()}
        metadata |= {} if enough is None else enough.metadata
        after[1:1] = extra  # other texts come after the text, which is the first
        fields = fields_before() + copied_fields(passthrough) + after + more
        schema = pa.schema(fields, metadata=metadata)
        return OutputSchema(
            arrow=schema,
            passthrough=tuple(passthrough.names),
            columns=tuple(columns),
            counts=tuple(count.name for count in counts),
            parsed=parsed,
            text_column=text_column,
            extra=tuple(column.name for column in extra),
            enough=enough,
        )

    @property
    def token_bytes(self) -> int:
        """The bytes of one generated token in all per-token columns together."""
        return 4 + sum(
            column.dtype.itemsize * int(np.prod(column.tail_shape))
            for column in self.columns
            if column.scope != "row"
        )

    @cached_property
    def _types(self) -> Mapping[str, pa.DataType]:
        """The type of each column. Asked for them, the schema makes new objects every time."""
        return {field.name: field.type for field in self.arrow}

    def encode(self, rows: Sequence[FinishedRow]) -> pa.RecordBatch:
        """Convert rows into one Arrow batch, one array for each column."""
        outputs, types = [row.output for row in rows], self._types
        values: dict[str, Any] = {
            "row_id": [row.row_id for row in rows],
            "row_index": [row.row_index for row in rows],
            "sample_index": [row.sample_index for row in rows],
            # `extra` has TEXT only for an output without an answer, whose text is None then. Its
            # key is TEXT, whatever name the job gives to the column.
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
        if SATISFIED in types:
            values[SATISFIED] = [
                o.constraint_satisfied if o and o.finish_reason != "error" else None
                for o in outputs
            ]
        if ANSWER_TOKEN_IDS in types:
            values[ANSWER_TOKEN_IDS] = [o.answer_token_ids if o else None for o in outputs]
        if REPLAY_EXACT in types:
            values[REPLAY_EXACT] = [
                o.replay_exact if o and o.finish_reason != "error" else None for o in outputs
            ]
        if PROMPT_IMAGES in types:
            values[PROMPT_IMAGES] = [row.images for row in rows]
        if self.parsed is not None:
            values[PARSED] = self.parsed.array(outputs)
        if self.enough is not None:
            values[VALID] = [row.valid for row in rows]
            # These three follow from all samples of a row, and are filled when the shard is
            # published. Only a row that never reached the engine is known to have failed before.
            values[OUTCOME] = [None if row.output else FAILED for row in rows]
            values[NUM_VALID] = values[NUM_SAMPLES] = [None] * len(rows)
        if PROMPT_TOKEN_IDS in types:
            values[PROMPT_TOKEN_IDS] = [o.prompt_token_ids if o else None for o in outputs]
        arrays = [
            value if isinstance(value := values[name], pa.Array) else pa.array(value, kind)
            for name, kind in types.items()
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)


def _error(error: RequestError | None) -> dict[str, str] | None:
    return None if error is None else {"type": error.type, "message": str(error)}


def _list_array(lengths: list[int], values: pa.Array) -> pa.Array:
    """An array of lists of these lengths, whose values follow one another in `values`."""
    offsets = array("i", accumulate(lengths, initial=0))
    # The same as ListArray.from_arrays, in a seventh of its time.
    return pa.Array.from_buffers(
        pa.list_(values.type), len(lengths), [None, pa.py_buffer(offsets)], children=[values]
    )


def id_lists(lists: list[list[int]]) -> pa.Array:
    """A column of lists of token ids."""
    values = array("i")  # reads a list in a tenth of NumPy's time
    for ids in lists:
        values.fromlist(ids)
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return _list_array([len(ids) for ids in lists], flat)


def _row_values(column: OutputColumn, outputs: Sequence[RequestOutput | None]) -> pa.Array:
    """A column of row scope: a list of a fixed size for each row, null on an error."""
    (size,) = column.tail_shape
    failed = [o is None or o.finish_reason == "error" for o in outputs]
    values = np.zeros((len(outputs), size), column.dtype)
    for index, output in enumerate(outputs):
        if output is not None and not failed[index]:
            values[index] = output.columns[column.name]
    mask = pa.array(failed, pa.bool_())
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), size, mask=mask)


def column_lists(column: OutputColumn, outputs: Sequence[RequestOutput | Begun | None]) -> pa.Array:
    """A per-token column: a list of [num_tokens, *tail] values for each row, empty on an error."""
    no_tokens = np.empty((0, *column.tail_shape), column.dtype)
    arrays = [o.columns[column.name] if o else no_tokens for o in outputs]
    flat = np.concatenate(arrays) if arrays else no_tokens
    assert flat.shape[1:] == column.tail_shape, f"{column.name} has shape {flat.shape}"
    items = pa.array(np.ascontiguousarray(flat, column.dtype).reshape(-1))
    for size in reversed(column.tail_shape):
        items = pa.FixedSizeListArray.from_arrays(items, size)
    return _list_array([len(values) for values in arrays], items)
