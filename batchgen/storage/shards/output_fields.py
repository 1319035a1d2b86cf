"""The fields of the output: their names, types and meanings. `output_schema.py` puts them
together."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from batchgen.config.groups.job_config import PARSED
from batchgen.engine.interface.outputs import OutputColumn, RowCount
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES
from batchgen.storage.shards.enough import ENOUGH_COLUMNS
from batchgen.storage.shards.parsed_column import ParsedColumn
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import AS_GIVEN

SCHEMA_VERSION = "1"
TEXT = "text"
# (name, type, meaning) of the columns before and after those of the data set.
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
    "the answer whose tokens are scored; null on error",
)
_OF_ANSWERS = {
    TEXT: "empty, as nothing is generated; null on error",
    "finish_reason": "scored or error",
}
"""The meanings of columns in jobs that score given answers."""
_OF_READ_ROWS = _OF_ANSWERS | {"finish_reason": "read or error"}
"""The meanings of columns in jobs whose rows are only read, for embeddings or classes."""
_OF_CHANNELS = {
    TEXT: "the final channel, cut before a stop string; null on error, and if there is none",
    "finish_reason": "stop (in the final channel), tool_call, no_answer (it ended elsewhere), "
    "length, constraint_conflict or error",
}
"""The meanings of columns in jobs whose answers have channels: parts such as the reasoning and the
final text."""
REASONING, CHANNEL = "reasoning", "channel"
"""Names of columns in `SplitOutput.columns`."""
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
    "whether each token was scored with exactly the tokens that were unmasked before its step: "
    "false if the tokens after the answer in its last block are unknown, or if a constraint "
    "restricted the distribution; null if the row failed",
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


def described_field(name: str, type: pa.DataType, meaning: str) -> pa.Field:
    """A column of the output with its meaning in its metadata."""
    return pa.field(name, type, metadata={"meaning": meaning})


def fields_before() -> list[pa.Field]:
    """The fields that identify an answer."""
    return [described_field(*column) for column in _BEFORE]


def changed_meanings(answers: bool, is_read: bool, extra: Sequence[pa.Field]) -> Mapping[str, str]:
    """The meanings, by name, of columns that differ from their meaning in most jobs; see
    `OutputSchema.build`."""
    if is_read:
        return _OF_READ_ROWS
    if answers:
        return _OF_ANSWERS
    return _OF_CHANNELS if any(column.name == CHANNEL for column in extra) else {}


def answer_fields(
    text_column: str, prompt_token_ids: bool, meanings: Mapping[str, str]
) -> list[pa.Field]:
    """The fields that every answer has. `meanings` replaces usual meanings by name."""
    return [
        described_field(text_column if name == TEXT else name, type, meanings.get(name, meaning))
        for name, type, meaning in _AFTER
        if prompt_token_ids or name != PROMPT_TOKEN_IDS
    ]


def chosen_fields(
    *,
    constrained: bool,
    answers: bool,
    replays: bool,
    images: bool,
    parsed: ParsedColumn | None,
    has_enough: bool,
) -> list[pa.Field]:
    """The fields that only some jobs have; see `OutputSchema.build` for the arguments."""
    chosen = (
        (_SATISFIED, constrained),
        (_ANSWER, answers),
        (_REPLAY_EXACT, replays),
        (_IMAGES, images),
    )
    fields = [described_field(*column) for column, wanted in chosen if wanted]
    if parsed is not None:
        fields.append(described_field(PARSED, parsed.type, parsed.meaning))
    return fields + [described_field(*column) for column in ENOUGH_COLUMNS if has_enough]


def count_field(count: RowCount) -> pa.Field:
    """The field of one of the strategy's counts."""
    meaning = count.meaning + "; null if the row failed before its first"
    return described_field(count.name, pa.int32(), meaning)


def copied_fields(schema: pa.Schema) -> list[pa.Field]:
    """The fields that are copied from the data set. The metadata of the whole schema is dropped,
    because it describes only the columns of the input."""
    meaning = {"meaning": AS_GIVEN.decode()}
    return [field.with_metadata(meaning | _strings(field.metadata)) for field in schema]


def _strings(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (metadata or {}).items()}


def column_field(column: OutputColumn) -> pa.Field:
    """The field of a column with a value per token, or with one value per row."""
    type = pa.from_numpy_dtype(column.dtype)
    for size in reversed(column.tail_shape):
        type = pa.list_(type, size)
    entries = {
        "output": "one entry per generated token",
        "edits": "one entry per replaced token: position in token_ids, step, old and new id",
        "tail": "one entry per token of the last step that was cut off at the end of the row",
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


def check_clashes(columns: Sequence[str], fields: Sequence[pa.Field], text_column: str) -> None:
    """Check that no column of the data set has the name of a column that batchgen writes. `fields`
    are the optional columns of this job.

    Raises:
        ConfigError: names clash, or `text_column` is the name of another column that batchgen
            writes.
    """
    # Optional columns that this job leaves out count too: a name means the same in every output.
    taken = {name for name, *_ in _BEFORE + _AFTER} | {SATISFIED, PARSED}
    taken |= {field.name for field in fields}
    taken.remove(TEXT)
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
