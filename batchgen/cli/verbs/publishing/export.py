"""`batchgen export OUT`: the rows of a job as files for other programs, in constant memory."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.cli.job_outcome import column_list, verb
from batchgen.cli.verb_table import Parser
from batchgen.folder.open_folder import open_job
from batchgen.publish.finished_rows import is_set, open_rows
from batchgen.publish.row_values import rows_where
from batchgen.publish.trainers.export_files import text_file
from batchgen.publish.trainers.trainer_export import export_for
from batchgen.publish.trainers.trainer_rows import FORMATS, Asked
from batchgen.texts.row_json import row_reader
from batchgen.texts.row_writers import WRITERS, spreadsheet
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path
from batchgen.util.shorten import some_names

_ABOUT = """\
Write the rows of a job, or of a set that `select` made, in their order. Without --to and --where
the job may still run; then the rows that are finished are written.

jsonl  an object per row, with all columns unless --columns names some
csv    a header and a line per row; lists and other nested values are JSON in their cells, a missing
       value is an empty cell. Spreadsheets run texts that begin with = + - or @ as formulas: for
       these, --quote-formulas puts an apostrophe before such a text, which they do not show
txt    the generated text alone, or the one column that --columns names: a row per line, newlines
       as \\n

With --to, complete jobs become what trainers read, as JSON lines or, by the name of --out, as
Parquet or as a folder with shards and a card. Rows with an error are left out, and counted.

sft     messages, or prompt and completion of a plain text; tools, if the prompts had some
dpo     prompt, chosen, rejected, score_chosen, score_rejected: of each input row up to --pairs
        pairs of answers of which --by says that one is better, by --gap at least
kto     prompt, completion, label (--label: an expression)
grpo    prompt, answer, pass_rate, row_id: a row for each input row; pass_rate is the mean of --by
prm     prompt, completions, labels: one text and whether it is right for each step
openai  the result lines of an OpenAI batch: id, custom_id, response, error
kd      messages, logprobs, target_token_ids: the likeliest tokens at each token of an answer, which
        was scored (prompt.answer) or generated; needs output.columns=[top_logprobs]
kd-v1   messages, logprobs with entries {token: token_id:N, logprob}
kd-packed  token ids, and their likeliest tokens in few bytes: ids of as many bits as they need,
        log-probabilities of 16 bits, the probability of the rest; trainer_files.py of
        the examples reads them
rl      token_ids, mask, logprobs, temperatures, reward (--by, or mark), and routed_experts as
        bytes with their shape; needs output.columns=[prompt_token_ids,logprobs]

The prompt is what the job's configuration says, made again of the columns of the row, and the
answer is the generated text. --messages gives other messages, a template for each.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    given = _parser().parse_args(arguments)
    path = None if given.file is None else user_path(given.file, "--out")
    if given.to is not None:
        return _for_trainers(given, path)
    for name in (*_STRINGS, *_NUMBERS, "across"):
        if name != "where" and getattr(given, name) not in (None, False):
            raise ConfigError(f"export --{name} needs --to, which says what it is for")
    return _as_text(given, path)


_STRINGS = {
    "where": ("EXPR", "which rows: an expression over their columns and grades"),
    "messages": ("YAML", "messages with their templates; the last, the assistant's, is the answer"),
    "reasoning": ("COLUMN", "the column that becomes reasoning_content of the answer"),
    "by": ("COLUMN", "dpo: what is better; grpo: what is right, rl: the reward (default: mark)"),
    "label": ("EXPR", "kto: which answers are good"),
    "answer": ("COLUMN", "grpo: what is right (default: target)"),
    "steps": ("COLUMN", "prm: the list of steps (default: steps)"),
    "labels": ("COLUMN", "prm: the list of which steps are right (default: labels)"),
}
_NUMBERS: dict[str, tuple[type, str, str]] = {
    "gap": (float, "G", "dpo: by how much answers of a pair differ at least"),
    "pairs": (int, "K", "dpo: how many pairs a row gives at most (default: 1)"),
}


def _parser() -> Parser:
    parser = Parser("export", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir, or the folder of a set")
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
    parser.add_argument("--to", choices=FORMATS, help="what trainers read, see above")
    for name, (metavar, help) in _STRINGS.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=help)
    for name, (kind, metavar, help) in _NUMBERS.items():
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, help=help)
    parser.add_argument(
        "--across", action="store_true",
        help="dpo: pairs of answers that other jobs gave to one row; see `dataset=job`",
    )  # fmt: skip
    return parser


def _for_trainers(given: Namespace, path: Path | None) -> int:
    for name in ("format", "columns", "quote_formulas"):
        if getattr(given, name):
            raise ConfigError(
                f"export --{name.replace('_', '-')} is not for --to {given.to}, whose columns are "
                "those that trainers read; --out says by its name whether they are Parquet"
            )
    options = {name: getattr(given, name) for name in (*_STRINGS, *_NUMBERS)}
    asked = Asked(to=given.to, across=given.across, **options)
    done = export_for(open_rows(given.out), asked, path)
    if not done.made:
        print(f"{given.file} has these rows already.", file=sys.stderr)
        return 0
    left_out = "".join(f"; {count:,} left out {why}" for why, count in done.left_out.items())
    if path is not None or left_out:
        print(f"{done.rows:,} rows in {given.file or 'all'}{left_out}", file=sys.stderr)
    return 0


def _as_text(given: Namespace, path: Path | None) -> int:
    """Write the columns of the rows as they are."""
    form = given.format or _format_of(path)
    if given.quote_formulas and form != "csv":
        raise ConfigError(f"export --quote-formulas is for CSV, and the format is {form}")
    source = _columns_of(given, form)
    if form == "txt" and len(source.schema) != 1:
        raise ConfigError("export --format txt writes one column: name one in --columns")
    with text_file(path) as file:
        write = (spreadsheet if given.quote_formulas else WRITERS[form])(file, source.schema.names)
        count = 0
        for row in source.rows:
            write(row)
            count += 1
    if path is not None:
        print(f"{count:,} rows in {given.file}", file=sys.stderr)
    return 0


class _Source(NamedTuple):
    """The rows to write, with the columns of a schema."""

    schema: pa.Schema
    rows: Iterator[Mapping[str, Any]]


def _columns_of(given: Namespace, form: str) -> _Source:
    """The rows of a job that may still run, or those of which an expression is true."""
    if given.where is not None or is_set(given.out):
        rows = open_rows(given.out)
        names = given.columns or ([rows.text_column] if form == "txt" else rows.schema.names)
        if unknown := [name for name in names if name not in rows.schema.names]:
            raise ConfigError(
                f"the rows of {given.out} have no column {unknown[0]!r}: choose among "
                f"{some_names(rows.schema.names, unknown[0])}"
            )
        schema = pa.schema([rows.schema.field(name) for name in names])
        return _Source(schema, rows_where(rows, given.where, names))
    reader = open_job(given.out)
    columns = given.columns or ([reader.text_column] if form == "txt" else None)
    schema = reader.fields(columns)
    if schema is None:
        shown = reader.storage.shown
        raise ConfigError(f"no row of {shown} is finished yet: there is nothing to export")
    return _Source(schema, map(row_reader(schema), reader.rows(schema.names)))


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
