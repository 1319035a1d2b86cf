"""Prints the plan of a job as lines of at most 80 columns, for `batchgen plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from batchgen.jobs.forecast.range import Range
from batchgen.jobs.launchers.launch import launcher_text
from batchgen.jobs.planning.outline_text import Entries, outline_entries, printed
from batchgen.util.duration import duration
from batchgen.util.text.text_table import size_text

if TYPE_CHECKING:
    from batchgen.jobs.planning.job_plan import Plan


def plan_text(plan: Plan) -> str:
    """Return the whole plan as text: the lines of a dry run, then memory, disk, time, errors and
    warnings."""
    return printed(plan, _entries(plan))


def _entries(plan: Plan) -> Entries:
    engine, disk = plan.engine, plan.disk
    dtype = str(engine.sizes.dtype).removeprefix("torch.")
    yield from outline_entries(plan, f"{dtype}, weights {engine.weights_text}")
    yield "memory", _memory(plan)
    if disk is not None:
        low, likely, bound = (size_text(size) for size in disk.output)
        yield "disk", f"{low} to {bound}, likely {likely} of shards; {size_text(disk.free)} free"
    if plan.forecast is not None and plan.answers:
        yield from _time(plan)
    yield from (("ERROR", text) for text in plan.errors)
    yield from (("warning", text) for text in plan.warnings)


def _memory(plan: Plan) -> str:
    engine, memory = plan.engine, plan.memory
    text = f"{size_text(engine.token_bytes)} of cache for a token"
    if engine.window_bytes:
        text += f", {size_text(engine.window_bytes)} for the last {engine.window:,} tokens of a row"
    if engine.row_bytes:
        text += f", {size_text(engine.row_bytes)} of state for a row"
    if memory is None:
        return text
    if engine.window_bytes:
        what = "both" if engine.token_bytes else "windows"
        text += f", {size_text(memory.kv_cache)} for {what}"
    elif engine.token_bytes:
        text += f", {size_text(memory.kv_cache)} for {memory.kv_tokens:,} tokens"
    if (ranks := plan.config.engine.tensor_parallel) > 1:
        text += f", on each of {ranks} {'GPUs' if memory.total else 'ranks'}"
    return f"{text}: {plan.at_once:,} rows at once (most: {engine.settings.max_num_seqs:,})"


def _time(plan: Plan) -> Entries:
    expected, hours = plan.forecast, plan.device_hours
    assert expected is not None and hours is not None
    yield "", ""
    yield "", f"{'low':>14}{'likely':>14}{'bound':>14}"
    if cached := expected.prompt_tokens - expected.computed_tokens:
        text = f"{expected.computed_tokens:,} tokens to compute, about {cached:,} from the cache"
        yield "prefixes", text
    yield "tokens", _columns(expected.generated_tokens, lambda tokens: f"{tokens:,.0f}")
    yield "time", _columns(expected.seconds, lambda seconds: duration(seconds, 0))
    if plan.memory is not None and plan.memory.total is not None:
        yield "GPU hours", _columns(hours, lambda value: f"{value:,.3g}")
    if plan.price is not None:
        yield "price", _columns(plan.price, lambda value: f"{value:,.2f}")
    if plan.outlook:
        yield "budget", "\n".join(item.text for item in plan.outlook)
    assumed = [*expected.assumptions]
    if launcher_text(plan.config) is not None:
        assumed.append("one worker computes all rows")
    assumed.append(f"{duration(expected.start_s, 0)} until the first step (likely)")
    yield "assumed", "; ".join(assumed)


def _columns(value: Range, text: Callable[[float], str]) -> str:
    return "".join(f"{text(figure):>14}" for figure in value)
