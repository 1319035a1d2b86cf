"""`batchgen … --dry-run`: what a job would send to the model and how it would run, without it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchgen.config.constraint_config import NoConstraintConfig
from batchgen.config.job_config import COMMON_COLUMNS, JobConfig, SamplingConfig
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from batchgen.engine.constraint.constraint import Constraint
    from batchgen.jobs.checked_rows import CheckedRows
    from batchgen.jobs.job_parts import JobParts
    from batchgen.resolve.opened_job import OpenedJob

SHOWN_ROWS = 3
COUNTED_ROWS = 1000
"""The prompts of so many rows are made and counted."""
LONGEST_PROMPT = 2000
"""Of a prompt of more characters the beginning and the end are shown."""
LONGEST_VALUE = 200
SHOWN_IDS = 200
"""Without a tokenizer so many token ids of a prompt are shown."""


@dataclass
class _Seen:
    """What was found out about the first rows.

    Attributes:
        lengths: tokens of each prompt.
        cut: how many prompts were cut to leave room for the answer.
        errors: how many rows have an error of which type, and the first message of each.
        rows: how many rows were looked at.
        signs: whether a shown prompt has signs for characters that one does not see.
    """

    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    signs: bool = False


def show(config: JobConfig) -> int:
    """Print the first prompts of a job as the model would read them, and what decides the answers.

    Of the model only its configuration and its tokenizer are read, and nothing is written.

    Returns:
        The exit code: 3 if one of the first COUNTED_ROWS rows would get an error instead of an
        answer before it reaches the model, else 0.

    Raises:
        ConfigError: the job would be refused. If that is for what the output folder holds, it is
            raised after all is printed.
    """
    model, data = config.model.path, config.dataset.path or config.dataset.kind
    print(f"batchgen: reading model {model} and data set {data} …", file=sys.stderr, flush=True)
    from batchgen.jobs.checked_rows import check_rows  # these take seconds: hence the line above
    from batchgen.jobs.job_parts import parts_of
    from batchgen.launchers.launch import check_launcher, described
    from batchgen.planning.folder_state import folder_state
    from batchgen.resolve.opened_job import open_job

    check_launcher(config, here=True)
    opened = open_job(config)
    with closing(parts_of(opened, config, {})) as parts:
        rows = check_rows(config, parts)
        try:
            folder, refusal = folder_state(config, opened).text, None
        except ConfigError as error:  # the prompts are worth a look all the same
            folder, refusal = f"{config.output.dir}: refused", error
        seen = _show_rows(config, opened, rows)
    if seen.signs:
        print("(␉ is a tab, · a space at the end of a line, other signs are control characters)\n")
    lines = {
        "prompts": _counts(config, opened, seen),
        "model": _model(config, opened),
        "strategy": _strategy(config, opened),
        "sampling": _sampling(config),
        "constraint": _constraint(config),
        "data set": _dataset(config, parts),
        "columns": ", ".join(_extra_columns(config)) or "those that every job has",
        **({"launcher": who} if (who := described(config)) is not None else {}),
        "output": folder,
    }
    for name, value in lines.items():
        print(f"{name:<10}  {value}")
    if refusal is not None:
        raise refusal
    print("Nothing was run: this was --dry-run.")
    return 3 if seen.errors else 0


def _show_rows(config: JobConfig, opened: OpenedJob, rows: CheckedRows) -> _Seen:
    """Print the first rows, and count the prompts of more."""
    from batchgen.engine.base.outputs import RequestError

    own = not isinstance(config.constraint, NoConstraintConfig) and config.params.constraint is None
    room = opened.max_model_len - config.sampling.max_new_tokens
    seen = _Seen()
    for row in islice(opened.source.rows(), COUNTED_ROWS):
        seen.rows += 1
        title = f"row {row.index}" + ("" if row.id == str(row.index) else f" ({row.id})")
        try:
            opened.source.passthrough(row)
            ids = rows.prompt(row)
            constraint = rows.constraints.of(row)
        except RequestError as error:
            seen.errors[error.type] += 1
            seen.messages.setdefault(error.type, str(error))
            if row.index < SHOWN_ROWS:
                print(f"{title}: no prompt, but the error {error.type}: {error}\n")
            continue
        seen.lengths.append(len(ids))
        whole = len(opened.prompt.token_ids(row)) if len(ids) == room else len(ids)
        seen.cut += whole > room
        if row.index < SHOWN_ROWS:
            cut = f", cut from {whole:,}" if whole > room else ""
            print(f"{title}: {len(ids):,} tokens{cut}")
            shown = shown_prompt(ids, opened.model.tokenizer)
            print(shown)
            seen.signs = seen.signs or not _SIGNS.isdisjoint(shown)
            if own:
                print(f"constraint  {_shown_constraint(constraint)}")
            print()
    return seen


def shown_prompt(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A prompt as the model reads it, with its special tokens, behind a bar at the left.

    A line break of the prompt is a line break here. Other characters that one does not see have
    signs of their own (␉ is a tab, · a space at the end of a line), so a backslash is a backslash.
    """
    if tokenizer is None:
        shown = " ".join(map(str, ids[:SHOWN_IDS]))
        return f"│ {shown}{' …' if len(ids) > SHOWN_IDS else ''}"
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    parts = [text]
    if len(text) > LONGEST_PROMPT:
        half = LONGEST_PROMPT // 2
        parts = [text[:half], text[-half:]]
    blocks = ["\n".join(f"│ {_visible(line)}" for line in part.split("\n")) for part in parts]
    left_out = f"\n⋮ {len(text) - LONGEST_PROMPT:,} characters more\n"
    return left_out.join(blocks)


def _visible(line: str) -> str:
    """A line of text with signs for characters that are not seen."""
    bare = line.rstrip(" ")
    line = bare + "·" * (len(line) - len(bare))
    return "".join(_PICTURE.get(c, c if c.isprintable() else f"<U+{ord(c):04X}>") for c in line)


_PICTURE = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "␡"}
"""The sign that Unicode has for each control character."""
_SIGNS = {"·", *_PICTURE.values()}


def _counts(config: JobConfig, opened: OpenedJob, seen: _Seen) -> str:
    """The lengths of the prompts, and how many rows have none."""
    found = []
    if lengths := seen.lengths:
        mean = sum(lengths) / len(lengths)
        found.append(f"{min(lengths):,} to {max(lengths):,} tokens, {mean:,.1f} on average,")
    found.append(f"in the first {seen.rows:,} row{'s' * (seen.rows != 1)}")
    room = opened.max_model_len - config.sampling.max_new_tokens
    too_long = seen.errors["prompt_too_long"]
    text = " ".join(found) + f"; {too_long or 'none'} too long (room for {room:,})"
    if seen.cut:
        text += f"; {seen.cut:,} cut to that"
    for type, number in seen.errors.items():
        text += f"\n{'':<10}  {number:,} with {type}: {_short(seen.messages[type])}"
    return text


def _model(config: JobConfig, opened: OpenedJob) -> str:
    model, group = opened.model, config.model
    revision = "" if group.revision is None else f" at {group.revision}"
    dtype = str(opened.dtype).removeprefix("torch.")
    if (weights := model.weights_text(config.engine.device)) is not None:
        dtype += f" with weights in {weights}"
    return (
        f"{group.path}{revision}: {model.config.architecture}, {dtype}, at most "
        f"{opened.max_model_len:,} tokens a row"
    )


def _strategy(config: JobConfig, opened: OpenedJob) -> str:
    return ", ".join([opened.strategy.name, *_settings(config.strategy.options)])


def _sampling(config: JobConfig) -> str:
    """The values that are not their defaults, and those that every job is asked about."""
    sampling = asdict(config.sampling)
    always = ("temperature", "max_new_tokens", "n", "seed")
    defaults = {f.name: f.default for f in fields(SamplingConfig)}
    chosen = {n: v for n, v in sampling.items() if n in always or v != defaults[n]}
    return ", ".join(_settings(chosen))


def _constraint(config: JobConfig) -> str:
    group = config.constraint
    if isinstance(group, NoConstraintConfig):
        return "none"
    if (constraint := config.params.constraint) is not None:
        return _shown_constraint(constraint)
    values = asdict(group)
    return f"{group.kind}, of each row in the column {values['column']!r}"


def _shown_constraint(constraint: Constraint | None) -> str:
    if constraint is None:
        return "none"
    after = f" after {constraint.start_after!r}" if constraint.start_after else ""
    return f"{constraint.kind}{after} {_short(constraint.text)}".rstrip()


def _dataset(config: JobConfig, parts: JobParts) -> str:
    group, number = config.dataset, parts.source.num_rows
    where = group.path or group.kind
    if number is None:
        return f"{where}: a stream of rows, {config.sampling.n} answers each"
    answers = number * config.sampling.n
    return f"{where}: {number:,} row{'s' * (number != 1)}, {answers:,} answer{'s' * (answers != 1)}"


def _extra_columns(config: JobConfig) -> Iterator[str]:
    for name in config.output.columns:
        is_top = name == "top_logprobs" and name in COMMON_COLUMNS
        yield f"{name} of {config.output.top_logprobs}" if is_top else name


def _settings(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name}={_short(repr(value) if isinstance(value, str) else str(_plain(value)))}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_VALUE else line[: LONGEST_VALUE - 1] + "…"
