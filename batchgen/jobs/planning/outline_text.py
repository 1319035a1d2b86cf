"""Prints what a job reads and sends to the model, as lines of at most 80 columns.

A dry run and a plan share these lines: `outline_entries` makes them, and `printed` lays them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from batchgen.config.groups.constraint_config import NoConstraintConfig
from batchgen.config.groups.model_sampling import OFF, sampling_text, sampling_values
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.inputs.dataset.source import funnel_line
from batchgen.jobs.forecast.scan import SHOWN, Scan
from batchgen.jobs.launchers.launch import launcher_text
from batchgen.jobs.planning.outline import Outline
from batchgen.jobs.resolve.job_model import model_sampling
from batchgen.util.shorten import beginning, short_name, wrapped
from batchgen.util.text.text_table import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WIDTH = 80  # columns of a line
_NAME = 11  # columns of an entry's name
_LONGEST_VALUE = 200  # characters
LONGEST_PROMPT = 2000
"""The characters above which only the beginning and the end of a prompt are shown."""
_SHOWN_IDS = 200
"""The token ids of a prompt that are shown where there is no tokenizer."""
_REPEATED = re.compile(r"(<\|\w+\|>)\1{3,}", re.ASCII)
"""A special token that is repeated, as that of an image is, once for each token of the image."""
_PICTURE = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "␡"}
"""The sign that Unicode has for each control character."""
SIGNS = {"·", *_PICTURE.values()}
Entries = Iterable[tuple[str, str]]
"""Pairs of a name and a text, which may have several lines."""


def shown_prompts(outline: Outline) -> Iterator[tuple[str, str]]:
    """The title and the text of the first prompts."""
    for row, request in outline.scan.sample[:SHOWN]:
        name = "" if row.id == str(row.index) else f" ({row.id})"
        text = shown_prompt(request.prompt, outline.opened.model.tokenizer)
        yield f"row {row.index}{name}: {len(request.prompt):,} tokens", text


def outline_entries(outline: Outline, model: str) -> Entries:
    """The lines that a plan and a dry run share; `model` describes the weights."""
    config, opened, scan = outline.config, outline.opened, outline.scan
    yield "questions", _questions(outline)
    if opened.source.funnel:
        yield "steps", funnel_line(opened.source.funnel)
    yield "prompts", _prompts(outline)
    if scan.bad:
        yield "bad rows", "\n".join(_bad(scan))
    revision = "" if config.model.revision is None else f" at {config.model.revision}"
    if config.model.kv_cache_dtype == "fp8":
        model += ", keys and values in FP8"
    yield (
        "model",
        f"{short_name(config.model.path)}{revision}: {opened.model.config.architecture}, {model}, "
        f"at most {opened.max_model_len:,} tokens a row",
    )
    yield "strategy", ", ".join([opened.strategy.name, *_settings(config.strategy.options)])
    yield "sampling", _sampling(outline)
    if not isinstance(config.constraint, NoConstraintConfig):
        row_text = f"of each row in the column {asdict(config.constraint).get('column')!r}"
        job_constraint = config.params.constraint
        text = (
            row_text if job_constraint is None else beginning(job_constraint.text, _LONGEST_VALUE)
        )
        yield "constraint", f"{config.constraint.kind} {text}"
    if config.output.columns:
        yield "columns", ", ".join(config.output.columns)
    if (who := launcher_text(config)) is not None:
        yield "launcher", who
    yield "output", outline.folder.text


def printed(outline: Outline, entries: Entries) -> str:
    """The first prompts, followed by the entries, in lines of 80 columns."""
    lines: list[str] = []
    for title, prompt in shown_prompts(outline):
        lines += [title, *_narrow(prompt), ""]
    if not SIGNS.isdisjoint("".join(lines)):
        lines += ["(␉ is a tab, · a space at the end of a line, other signs are control", 
                  "characters)", ""]  # fmt: skip
    for name, text in entries:
        parts = [line for part in text.split("\n") for line in wrapped(part, _WIDTH - _NAME - 2)]
        names = [name] + [""] * (len(parts) - 1)
        lines += [f"{n:<{_NAME}}  {part}".rstrip() for n, part in zip(names, parts, strict=True)]
    return "\n".join(lines)


def length_figures(lengths: np.ndarray) -> Mapping[str, float] | None:
    """Median, 99th percentile, largest, mean and sum of lengths; None if there are none."""
    if not len(lengths):
        return None
    p50, p99 = np.percentile(lengths, [50, 99], method="higher")
    return {
        "p50": int(p50),
        "p99": int(p99),
        "max": int(lengths.max()),
        "mean": round(float(lengths.mean()), 1),
        "sum": int(lengths.sum()),
    }


def _questions(outline: Outline) -> str:
    scan, samples = outline.scan, outline.samples
    number = "a stream" if scan.num_rows is None else f"{scan.num_rows:,}"
    answers = ("" if samples.known_by is None else "likely ") + counted(outline.answers, "answer")
    text = f"{number} of {outline.config.dataset.shown}, {answers} to compute"
    if outline.folder.done:
        text += f" ({outline.folder.done:,} are there)"
    if outline.reuse is not None:
        text += f"\n{outline.reuse.text}"
    if samples.known_by is not None:
        text += f"\n{samples.known_by}"
    if scan.looked_at != scan.num_rows:
        which = "the first" if scan.num_rows is None else "a random sample of"
        text += f"\nlooked at {which} {scan.looked_at:,} rows; counts are of those"
    return text


def _prompts(outline: Outline) -> str:
    scan, room = outline.scan, outline.room
    figures = length_figures(scan.lengths)
    if figures is None:
        return f"none (room for {room:,} tokens)"
    text = (
        f"{figures['mean']:,.1f} tokens on average, p50 {figures['p50']:,}, p99 "
        f"{figures['p99']:,}, max {figures['max']:,} (room for {room:,})"
    )
    if scan.num_rows == scan.looked_at:
        text += f"; {figures['sum']:,} in all"
    if full := outline.full:
        text += f"\n{full:,} fill their room (prompt.too_long cuts longer ones)"
    if scan.image_tokens:
        share = scan.image_tokens / figures["sum"]
        text += f"\nimages have {share:.1%} of these tokens, counted by the headers of their files"
    return text


def _bad(scan: Scan) -> Iterator[str]:
    for type, bad in scan.bad.items():
        rows = ", ".join(str(i) if id == str(i) else f"{i} ({id})" for i, id in bad.rows)
        more = ", …" if bad.count > len(bad.rows) else ""
        yield f"{bad.count:,} with {type}: rows {rows}{more}\n{beginning(bad.message, 200)}"


def _sampling(outline: Outline) -> str:
    """The values that differ from their defaults, and those that matter for every job."""
    sampling = asdict(outline.config.sampling)
    values = sampling_values(sampling, model_sampling(outline.opened.model.path))
    defaults = {f.name: f.default for f in fields(SamplingConfig)} | {"max_new_tokens": None}
    defaults |= {"seed": None, "n": 1 if sampling["until"] is not None else None}
    chosen = {n: v for n, v in sampling.items() if n not in OFF and v != defaults[n]}
    return ", ".join([sampling_text(values), *_settings(chosen)])


def _settings(values: Mapping[str, Any]) -> Iterator[str]:
    """The values as `name=value`."""
    for name, value in values.items():
        plain = list(value) if isinstance(value, tuple) else value
        text = repr(plain) if isinstance(plain, str) else str(plain)
        yield f"{name}={beginning(text, _LONGEST_VALUE)}"


def _narrow(prompt: str) -> Iterator[str]:
    """The lines of a shown prompt, wrapped; each part keeps the bar of its line."""
    for line in prompt.split("\n"):
        bar, text = (line[:2], line[2:]) if line.startswith("│ ") else ("", line)
        for part in wrapped(text, _WIDTH - 2) or [""]:
            yield (bar + part).rstrip()


def shown_prompt(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A prompt as the model reads it, with its special tokens, after a bar at the left of each
    line.

    Characters that cannot be seen are replaced by signs: ␉ is a tab, · a space at the end of a
    line. There are no escapes, so a backslash is a backslash.
    """
    if tokenizer is None:
        id_text = " ".join(map(str, ids[:_SHOWN_IDS]))
        return f"│ {id_text}{' …' if len(ids) > _SHOWN_IDS else ''}"
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    text = _REPEATED.sub(lambda run: f"{run[1]} × {len(run[0]) // len(run[1])}", text)
    parts = [text]
    if len(text) > LONGEST_PROMPT:
        half = LONGEST_PROMPT // 2
        parts = [text[:half], text[-half:]]
    blocks = ["\n".join(f"│ {_visible(line)}" for line in part.split("\n")) for part in parts]
    left_out = f"\n⋮ {len(text) - LONGEST_PROMPT:,} characters more\n"
    return left_out.join(blocks)


def _visible(line: str) -> str:
    """A line of text with signs for characters that cannot be seen."""
    bare = line.rstrip(" ")
    line = bare + "·" * (len(line) - len(bare))
    return "".join(_PICTURE.get(c, c if c.isprintable() else f"<U+{ord(c):04X}>") for c in line)
