"""`batchgen … --dry-run`: prints the first prompts of a job and a short plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchgen.config.groups.constraint_config import NoConstraintConfig
from batchgen.config.groups.job_config import COMMON_COLUMNS, JobConfig
from batchgen.config.groups.model_sampling import OFF, sampling_text, sampling_values
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.util.shorten import beginning
from batchgen.util.text.text_table import counted

if TYPE_CHECKING:
    from batchgen.engine.constraint.constraint import Constraint
    from batchgen.inputs.dataset.source import Source
    from batchgen.jobs.forecast.samples_per_row import MeasuredSamples
    from batchgen.jobs.forecast.scan import Reading, Scan
    from batchgen.jobs.resolve.opened_job import OpenedJob

_SHOWN_ROWS = 3
_COUNTED_ROWS = 1000
_LONGEST_VALUE = 200


def show(config: JobConfig) -> int:
    """Print the first prompts of a job as the model would read them, and what decides the answers.

    No weights are read and nothing is written. Returns the exit code: 3 if one of the first
    _COUNTED_ROWS rows would get an error before it reaches the model, else 0.

    Raises:
        ConfigError: the job would be refused. If that is for what the output folder holds, it is
            raised after all is printed.
    """
    model, data = config.model.path, config.dataset.shown
    print(f"batchgen: reading model {model} and data set {data} …", file=sys.stderr, flush=True)
    from batchgen.jobs.resolve.early_checks import check_early

    check_early(config, folder=False)
    from batchgen.jobs.launchers.launch import (
        check_launcher,  # these take seconds: hence the line above
    )
    from batchgen.jobs.planning.planner import opened_rows, output_folder

    launcher = check_launcher(config, here=True)
    with opened_rows(config) as (opened, reading):
        folder, refusal = output_folder(config, opened)
        scan = _show_rows(config, opened, reading)
        lines = {
            "prompts": _prompts(scan, reading.room),
            "model": _model(config, opened),
            "strategy": ", ".join([opened.strategy.name, *_settings(config.strategy.options)]),
            "sampling": _sampling(config, opened),
            "constraint": _constraint(config),
            "data set": _dataset(config, opened.source.num_rows, folder.measured),
            **_funnel(opened.source),
            "columns": ", ".join(_extra_columns(config)) or "the default ones",
            **({} if launcher is None else {"launcher": launcher.described()}),
            **_reuse(config, opened, scan),
            "output": folder.text,
        }
    for name, value in lines.items():
        print(f"{name:<10}  {value}")
    if refusal is not None:
        raise refusal
    print("Nothing was run: this was --dry-run.")
    return 3 if scan.bad else 0


def _show_rows(config: JobConfig, opened: OpenedJob, reading: Reading) -> Scan:
    """Print the first rows, and look at more."""
    from batchgen.engine.interface.outputs import RequestError
    from batchgen.jobs.forecast.scan import Scanner
    from batchgen.jobs.planning.plan_text import SIGNS, row_title, shown_prompt

    is_shown = (
        not isinstance(config.constraint, NoConstraintConfig) and config.params.constraint is None
    )
    scanner, signs = Scanner(reading), False
    for row in islice(opened.source.rows(), _COUNTED_ROWS):
        read = scanner.look(row)
        if not isinstance(read, RequestError):
            scanner.found.sample.append(read)
        if row.index >= _SHOWN_ROWS:
            continue
        if isinstance(read, RequestError):
            print(f"{row_title(row)}: no prompt, but the error {read.type}: {read}\n")
            continue
        cut = f", cut from {read.whole:,}" if read.whole > len(read.ids) else ""
        print(f"{row_title(row)}: {len(read.ids):,} tokens{cut}")
        prompt_text = shown_prompt(read.ids, opened.model.tokenizer)
        print(prompt_text)
        signs = signs or not SIGNS.isdisjoint(prompt_text)
        if is_shown:
            print(f"constraint  {_shown_constraint(read.params.constraint)}")
        print()
    if signs:
        print("(␉ is a tab, · a space at the end of a line, other signs are control characters)\n")
    return scanner.finished()


def _prompts(scan: Scan, room: int) -> str:
    """The lengths of the prompts, and how many rows have none."""
    from batchgen.jobs.planning.plan_text import image_share

    parts = []
    if len(lengths := scan.lengths):
        shortest, longest, mean = lengths.min(), lengths.max(), lengths.mean()
        parts.append(f"{shortest:,} to {longest:,} tokens, {mean:,.1f} on average,")
    parts.append(f"in the first {counted(scan.looked_at, 'row')}")
    too_long = scan.bad.get("prompt_too_long")
    text = (
        f"{' '.join(parts)}; {too_long.count if too_long else 'none'} too long (room for {room:,})"
    )
    if scan.looked_at and scan.looked_at == sum(bad.count for bad in scan.bad.values()):
        text = f"none {parts[-1]} can be made"
        text += f"; {too_long.count} too long (room for {room:,})" if too_long else ""
    if scan.cut:
        text += f"; {scan.cut:,} cut to that"
    text += image_share(scan).replace("\n", f"\n{'':<10}  ")
    for type, bad in scan.bad.items():
        text += f"\n{'':<10}  {bad.count:,} with {type}: {_short(bad.message)}"
    return text


def _model(config: JobConfig, opened: OpenedJob) -> str:
    model, group = opened.model, config.model
    revision = "" if group.revision is None else f" at {group.revision}"
    dtype = str(opened.dtype).removeprefix("torch.")
    if (weights := model.weights_text(opened.dtype, config.engine.device)) is not None:
        dtype += f" with weights in {weights}"
    if group.kv_cache_dtype == "fp8":
        dtype += ", keys and values in FP8"
    return (
        f"{group.path}{revision}: {model.config.architecture}, {dtype}, at most "
        f"{opened.max_model_len:,} tokens a row"
    )


def _sampling(config: JobConfig, opened: OpenedJob) -> str:
    """The values that differ from their defaults, and those that matter for every job."""
    from batchgen.jobs.resolve.job_model import model_sampling  # it loads torch

    sampling = asdict(config.sampling)
    of_model = sampling_values(sampling, model_sampling(opened.model.path))
    sampling = {key: value for key, value in sampling.items() if key not in OFF}
    always = ("max_new_tokens", "n", "seed")
    defaults = {f.name: f.default for f in fields(SamplingConfig)}
    if config.sampling.until is not None:
        del sampling["n"]
    chosen = {n: v for n, v in sampling.items() if n in always or v != defaults[n]}
    return ", ".join([sampling_text(of_model), *_settings(chosen)])


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


def _dataset(config: JobConfig, number: int | None, measured: MeasuredSamples) -> str:
    group = config.dataset
    where = group.shown
    from batchgen.jobs.forecast.samples_per_row import samples_per_row

    samples = samples_per_row(config.sampling, measured)
    rows = "a stream of rows" if number is None else counted(number, "question")
    if samples.known_by is not None:
        return f"{where}: {rows}, {samples.known_by}"
    if number is None:
        return f"{where}: {rows}, {config.sampling.n} answers each"
    return f"{where}: {rows}, {counted(number * config.sampling.n, 'answer')}"


def _funnel(source: Source) -> dict[str, str]:
    """The number of rows that each filter leaves."""
    from batchgen.inputs.dataset.source import funnel_line

    return {"steps": funnel_line(source.funnel)} if source.funnel else {}


def _reuse(config: JobConfig, opened: OpenedJob, scan: Scan) -> dict[str, str]:
    """How many answers are copied instead of being computed."""
    from batchgen.jobs.planning.planned_reuse import planned_reuse

    reuse = planned_reuse(config, opened, scan)
    return {} if reuse is None else {"reuse": reuse.text}


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
    return beginning(text, _LONGEST_VALUE)
