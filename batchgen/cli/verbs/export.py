"""The verb `batchgen export OUT`: writes the rows of a job, or of a set (rows that `select` has
chosen), as files for other programs, in constant memory."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from batchgen.cli.job_outcome import column_list, verb
from batchgen.cli.verb_table import VerbParser
from batchgen.pipelines.publish.finished_rows import open_rows
from batchgen.pipelines.publish.trainers.text_export import export_text
from batchgen.pipelines.publish.trainers.trainer_export import export_for
from batchgen.pipelines.publish.trainers.trainer_rows import FORMATS, ExportRequest
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path
from batchgen.util.text.row_writers import WRITERS

_ABOUT = """\
Write the rows of a job, or of a set made by `select`, in order. Without --to and --where the job
may still be running; then its finished rows are written.

jsonl  an object per row, with all columns unless --columns names some
csv    a header and a line per row; lists and other nested values are JSON in their cells, a missing
       value is an empty cell. Spreadsheets run texts that begin with = + - or @ as formulas: for
       these, --quote-formulas puts an apostrophe before such a text, which they do not show
txt    the generated text alone, or the one column that --columns names: a row per line, newlines
       as \\n

With --to, complete jobs become files that trainers read: JSON lines or, by the name of --out,
Parquet or a folder with shards and a card. Rows with an error are left out, and counted.

sft     messages, or prompt and completion of a plain text; tools, if the prompts had some
dpo     prompt, chosen, rejected, score_chosen, score_rejected: of each input row up to --pairs
        pairs of answers, the first better than the second by --by, and by at least --gap
kto     prompt, completion, label (--label: an expression)
grpo    prompt, answer, pass_rate, row_id: a row for each input row; pass_rate is the mean of --by
prm     prompt, completions, labels: a text and a label for each step of a solution
openai  the result lines of an OpenAI batch: id, custom_id, response, error
kd      messages, logprobs, target_token_ids: the likeliest tokens at each token of an answer, which
        was scored (prompt.answer) or generated; needs output.columns=[top_logprobs]
kd-v1   messages, logprobs with entries {token: token_id:N, logprob}
kd-packed  token ids, and the likeliest tokens at each in few bytes: ids with only the bits they
        need, 16-bit log-probabilities, and the probability of all other tokens;
        examples/trainer_files.py reads them
rl      token_ids, mask, logprobs, temperatures, reward (--by, or mark), and routed_experts as
        bytes with their shape; needs output.columns=[prompt_token_ids,logprobs]
trace_rl  of block diffusion: prompt, response, prompt_token_ids, token_ids and step_map to the end
        of the last block, stop_length, mask, logprobs, reward (--by, or mark); needs output.columns
        =[prompt_token_ids,logprobs,step_map,tail_token_ids,tail_step_map]

The prompt is rendered again from the job's configuration and the columns of the row, and the
answer is the generated text. --messages writes other messages, with one template for each.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb. Returns 0; mistakes raise ConfigError."""
    args = _parser().parse_args(arguments)
    path = None if args.file is None else user_path(args.file, "--out")
    if args.to is not None:
        return _for_trainers(args, path)
    for name in (*_STRINGS, *_NUMBERS, "across"):
        if name != "where" and getattr(args, name) not in (None, False):
            raise ConfigError(f"export --{name} needs --to, which says what it is for")
    return _as_text(args, path)


_STRINGS = {
    "where": ("EXPR", "which rows: an expression over their columns and grades"),
    "messages": ("YAML", "messages with their templates; the last, the assistant's, is the answer"),
    "reasoning": ("COLUMN", "the column that becomes reasoning_content of the answer"),
    "by": (
        "COLUMN",
        "dpo: what is better; grpo: what is right, rl, trace_rl: the reward (default: mark)",
    ),
    "label": ("EXPR", "kto: which answers are good"),
    "answer": ("COLUMN", "grpo: what is right (default: target)"),
    "steps": ("COLUMN", "prm: the list of steps (default: steps)"),
    "labels": ("COLUMN", "prm: the list of which steps are right (default: labels)"),
}
"""The text options of --to: name → placeholder and help."""
_NUMBERS: dict[str, tuple[type, str, str]] = {
    "gap": (float, "G", "dpo: by how much answers of a pair differ at least"),
    "pairs": (int, "K", "dpo: how many pairs a row gives at most (default: 1)"),
}
"""The numeric options of --to: name → type, placeholder and help."""


def _parser() -> VerbParser:
    parser = VerbParser("export", _ABOUT)
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
        "--quote-formulas", action="store_true", help="for CSV in spreadsheets, see above"
    )
    parser.add_argument("--to", choices=FORMATS, help="a format for trainers, see above")
    for name, (metavar, help) in _STRINGS.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=help)
    for name, (kind, metavar, help) in _NUMBERS.items():
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, help=help)
    parser.add_argument(
        "--across", action="store_true",
        help="dpo: pair the answers of several jobs to the same row; see `dataset=job`",
    )  # fmt: skip
    return parser


def _for_trainers(arguments: Namespace, path: Path | None) -> int:
    """Write a file that trainers read (--to)."""
    for name in ("format", "columns", "quote_formulas"):
        if getattr(arguments, name):
            raise ConfigError(
                f"export --{name.replace('_', '-')} is not for --to {arguments.to}, whose columns "
                "are those that trainers read; --out says by its name whether they are Parquet"
            )
    options = {name: getattr(arguments, name) for name in (*_STRINGS, *_NUMBERS)}
    request = ExportRequest(to=arguments.to, across=arguments.across, **options)
    result = export_for(open_rows(arguments.out), request, path)
    if not result.is_new:
        print(f"{arguments.file} already has these rows.", file=sys.stderr)
        return 0
    left_out = "".join(f"; {count:,} left out {why}" for why, count in result.left_out.items())
    if path is not None or left_out:
        print(f"{result.rows:,} rows in {arguments.file or 'all'}{left_out}", file=sys.stderr)
    return 0


def _as_text(options: Namespace, path: Path | None) -> int:
    """Write the rows' columns as they are, as JSON lines, CSV or text."""
    count = export_text(
        options.out,
        path,
        form=options.format,
        columns=options.columns,
        where=options.where,
        quote=options.quote_formulas,
    )
    if path is not None:
        print(f"{count:,} rows in {options.file}", file=sys.stderr)
    return 0
