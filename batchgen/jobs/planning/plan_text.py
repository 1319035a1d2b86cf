"""Prints a plan as lines of at most 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchgen.inputs.dataset.source import Row, funnel_line
from batchgen.jobs.forecast.forecast import Range
from batchgen.jobs.forecast.scan import Scan
from batchgen.jobs.launchers.launch import launcher_text
from batchgen.jobs.planning.job_plan import Constraints, Plan, length_figures
from batchgen.util.duration import duration
from batchgen.util.shorten import beginning, wrapped
from batchgen.util.text.text_table import counted, size_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WIDTH = 80
_NAME = 11
_ROWS_OF_TYPE = 5
LONGEST_PROMPT = 2000
"""A longer prompt, in characters, is shown by its beginning and its end."""
_SHOWN_IDS = 200
"""Token ids that are shown of a prompt without a tokenizer."""


def plan_text(plan: Plan) -> str:
    """The whole text of a plan."""
    lines: list[str] = []
    for title, prompt in plan.prompts:
        lines += [title, *_narrow(prompt), ""]
    for name, text in _entries(plan):
        lines += _entry(name, text)
    for name, texts in (("ERROR", plan.errors), ("warning", plan.warnings)):
        for text in texts:
            lines += _entry(name, text)
    return "\n".join(lines)


def _entries(plan: Plan) -> Iterator[tuple[str, str]]:
    """The name and the text of each part; a text may have several lines."""
    yield "questions", _rows(plan)
    if plan.funnel:
        yield "steps", funnel_line(plan.funnel)
    yield "prompts", _prompts(plan.scan, plan.room)
    if plan.scan.longest:
        longest = (f"{id} ({tokens:,})" for _, id, tokens in plan.scan.longest)
        yield "longest", ", ".join(longest)
    if plan.scan.bad:
        yield "bad rows", "\n".join(_bad(plan.scan))
    if plan.constraints is not None:
        yield "constraints", _constraints(plan.constraints)
    yield "model", _model(plan)
    yield "memory", _memory(plan)
    if (who := launcher_text(plan.config)) is not None:
        yield "launcher", f"{who}; the time below is that of one worker alone, several share it"
    yield "output", plan.folder
    if plan.disk is not None:
        disk = plan.disk
        yield (
            "disk",
            f"{_three(disk.output, size_text)} of shards, {size_text(disk.journal.likely)} of "
            f"journal at a time; {size_text(disk.free)} free",
        )
    if plan.forecast is not None and plan.answers:
        yield from _time(plan)


def _rows(plan: Plan) -> str:
    scan = plan.scan
    if scan.num_rows is None:
        text = f"a stream; the figures are of its first {counted(scan.looked_at, 'row')}"
    else:
        text = f"{scan.num_rows:,}"
    likely = "" if plan.samples.known_by is None else "likely "
    text += f" of {plan.data}, {likely}{counted(plan.answers, 'answer')} to compute"
    if plan.done:
        text += f" ({plan.done:,} are there)"
    if plan.reuse is not None:
        text += f"\n{plan.reuse.text}"
    if plan.samples.known_by is not None:
        text += f"\n{plan.samples.known_by}"
    if scan.num_rows is not None and scan.looked_at < scan.num_rows:
        text += f"\nlooked at a random sample of {scan.looked_at:,} rows; counts are of those"
    return text


def _prompts(scan: Scan, room: int) -> str:
    figures = length_figures(scan.lengths)
    if figures is None:
        return f"none (room for {room:,} tokens)"
    text = (
        f"{figures['mean']:,.1f} tokens on average, p50 {figures['p50']:,}, p99 "
        f"{figures['p99']:,}, max {figures['max']:,} (room for {room:,})"
    )
    if scan.num_rows == scan.looked_at:
        text += f"; {figures['sum']:,} in all"
    return text + image_share(scan)


def image_share(scan: Scan) -> str:
    """A line with the share of prompt tokens that are images; empty if there are none."""
    if not scan.image_tokens:
        return ""
    share = scan.image_tokens / max(int(scan.lengths.sum()), 1)
    return f"\nimages are {share:.1%} of these tokens, counted from the headers of their files"


def _bad(scan: Scan) -> Iterator[str]:
    for type, bad in scan.bad.items():
        examples = bad.rows[:_ROWS_OF_TYPE]
        rows = ", ".join(str(i) if id == str(i) else f"{i} ({id})" for i, id in examples)
        more = ", …" if bad.count > len(examples) else ""
        yield f"{bad.count:,} with {type}: rows {rows}{more}\n{beginning(bad.message, 200)}"


def _constraints(constraints: Constraints) -> str:
    text = f"{constraints.distinct:,} different"
    if constraints.compiled:
        text += (
            f", {constraints.compiled:,} compiled, the slowest in "
            f"{duration(constraints.slowest_s, 2)}: {beginning(constraints.slowest, 100)}"
        )
    return text


def _model(plan: Plan) -> str:
    config = plan.config
    sizes = plan.engine.sizes
    dtype = str(sizes.dtype).removeprefix("torch.")
    if sizes.weight_dtype != sizes.dtype:
        dtype += " with weights in FP8"
    elif sizes.expert_bytes < sizes.dtype.itemsize and sizes.dense_bytes == sizes.dtype.itemsize:
        dtype += " with experts in MXFP4"
    if config.model.kv_cache_dtype == "fp8":
        dtype += ", keys and values in FP8"
    name = config.model.path.rpartition("/")[2]
    return f"{name}: {plan.model}, {dtype}, weights {plan.engine.weights_text}"


def _memory(plan: Plan) -> str:
    engine, memory = plan.engine, plan.memory
    text = f"{size_text(engine.token_bytes)} of cache for a token"
    if engine.window_bytes:
        text += f", {size_text(engine.window_bytes)} for the last {engine.window:,} tokens of a row"
    if engine.row_bytes:
        text += f", {size_text(engine.row_bytes)} of state for a row"
    if memory is None:
        return text
    if engine.token_bytes:
        text += f", {size_text(memory.kv_cache)} for {memory.kv_tokens:,} tokens"
    if memory.window_cache:
        text += f", {size_text(memory.window_cache)} for windows"
    if (ranks := plan.config.engine.tensor_parallel) > 1:
        text += f", on each of {ranks} {'GPUs' if memory.total else 'ranks'}"
    return f"{text}: {plan.at_once:,} rows at once (most: {engine.settings.max_num_seqs:,})"


def _time(plan: Plan) -> Iterator[tuple[str, str]]:
    expected, hours = plan.forecast, plan.gpu_hours
    assert expected is not None
    yield "", ""
    yield "", f"{'low':>14}{'likely':>14}{'bound':>14}"
    yield "tokens", _columns(expected.generated, lambda tokens: f"{tokens:,.0f}")
    yield "time", _columns(expected.seconds, lambda seconds: duration(seconds, 0))
    if hours is not None:
        yield "GPU hours", _columns(hours, lambda value: f"{value:,.3g}")
    if plan.price is not None:
        yield "price", _columns(plan.price, lambda value: f"{value:,.2f}")
    if plan.outlook:
        yield "budget", "\n".join(one.text for one in plan.outlook)
    yield (
        "assumed",
        "; ".join(expected.assumptions)
        + f"; {duration(expected.start_s, 0)} until the first step (likely)",
    )


def _columns(value: Range, format_value: object) -> str:
    assert callable(format_value)
    return "".join(f"{format_value(one):>14}" for one in (value.low, value.likely, value.bound))


def _three(value: Range, format_value: object) -> str:
    assert callable(format_value)
    low, likely, bound = (format_value(one) for one in (value.low, value.likely, value.bound))
    return likely if low == bound else f"{low} to {bound}, likely {likely}"


def _entry(name: str, text: str) -> list[str]:
    """An entry: the name on the left, the lines of the text on the right."""
    lines = [line for part in text.split("\n") for line in wrapped(part, WIDTH - _NAME - 2)]
    names = [name] + [""] * (len(lines) - 1)
    return [f"{n:<{_NAME}}  {line}".rstrip() for n, line in zip(names, lines, strict=True)]


def _narrow(prompt: str) -> Iterator[str]:
    """The lines of a shown prompt, each with its bar."""
    for line in prompt.split("\n"):
        bar, text = (line[:2], line[2:]) if line.startswith("│ ") else ("", line)
        for part in wrapped(text, WIDTH - 2) or [""]:
            yield (bar + part).rstrip()


def row_title(row: Row) -> str:
    return f"row {row.index}" + ("" if row.id == str(row.index) else f" ({row.id})")


_REPEATED = re.compile(r"(<\|\w+\|>)\1{3,}", re.ASCII)
"""The token of an image, which stands there as often as the image has tokens."""


def shown_prompt(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A prompt as the model reads it, with its special tokens, behind a bar at the left.

    Characters that one does not see have signs (␉ is a tab, · a space at the end of a line), so a
    backslash is a backslash; a line break is one.
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
    """A line of text with signs for characters that are not seen."""
    bare = line.rstrip(" ")
    line = bare + "·" * (len(line) - len(bare))
    return "".join(_PICTURE.get(c, c if c.isprintable() else f"<U+{ord(c):04X}>") for c in line)


_PICTURE = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "␡"}
"""The sign that Unicode has for each control character."""
SIGNS = {"·", *_PICTURE.values()}
