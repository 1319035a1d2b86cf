"""Draws the steps of a pipeline as a graph: a box for each step and export, lines to what it
reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen.pages.report.charts import Chart
from batchgen.pages.report.funnel import StepCounts
from batchgen.pages.report.pipeline_facts import PipelineFacts
from batchgen.pages.report.svg import WIDTH, drawing, svg_tag, text
from batchgen.util.shorten import both_ends
from batchgen.util.text.text_table import counted

_BOX, _GAP, _SIDE = 48.0, 30.0, 12.0
"""Height of a box, and the room below it and beside it."""
_CHARACTER = 6.9
"""Width of a character, with some room."""


@dataclass(frozen=True)
class _Box:
    """A step or a set: two lines of text, its class, and where it stands."""

    name: str
    lines: tuple[str, str]
    kind: str
    x: float
    y: float
    width: float


def step_graph(facts: PipelineFacts) -> Chart:
    """What each step reads and makes, from the top to the bottom."""
    parents: dict[str, Sequence[str]] = dict(facts.parents)
    lines = {step.name: (step.name, _counts(step), "step") for step in facts.steps}
    for one in facts.sets:
        if one.step in facts.parents:
            parents[f"export/{one.name}"] = [one.step]
            lines[f"export/{one.name}"] = (one.name, one.extent, "set")
    boxes = _placed(parents, lines)
    height = max((box.y + _BOX for box in boxes.values()), default=0.0) + 4
    parts = []
    for name, box in boxes.items():
        for parent in parents[name]:
            above = boxes[parent]
            x1, y1, x2, y2 = above.x + above.width / 2, above.y + _BOX, box.x + box.width / 2, box.y
            bend = (y2 - y1) / 2
            path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} "
            parts.append(svg_tag("path", d=f"{path}{x2:.1f} {y2:.1f}", class_="edge"))
    for box in boxes.values():
        shape = {"x": box.x, "y": box.y, "width": box.width, "height": _BOX, "rx": 6}
        parts.append(svg_tag("rect", class_=f"box {box.kind}", **shape))
        for index, line in enumerate(box.lines):
            label = both_ends(line, max(int((box.width - 12) / _CHARACTER), 4))
            at = box.x + box.width / 2, box.y + 20 + 17 * index
            parts.append(text(label, *at, "label" if index == 0 else "tick", "middle"))
    description = "; ".join(
        f"{first}: {second}" + (f", of {', '.join(parents[name])}" if parents[name] else "")
        for name, (first, second, _) in lines.items()
    )
    return Chart("How rows go", "", drawing(parts, f"Steps: {description}", height))


def _placed(
    parents: Mapping[str, Sequence[str]], lines: Mapping[str, tuple[str, str, str]]
) -> dict[str, _Box]:
    """The boxes: each in a row below all that it reads, those of one row side by side."""
    depths: dict[str, int] = {}
    for name in lines:  # parents come first
        depths[name] = 1 + max((depths[parent] for parent in parents[name]), default=-1)
    boxes: dict[str, _Box] = {}
    for depth in range(max(depths.values(), default=-1) + 1):
        row = [name for name, at in depths.items() if at == depth]
        row.sort(key=lambda name: _middle([boxes[parent] for parent in parents[name]]))
        width = min((WIDTH - _SIDE * (len(row) - 1)) / len(row), 200.0)
        start = (WIDTH - width * len(row) - _SIDE * (len(row) - 1)) / 2
        for index, name in enumerate(row):
            first, second, kind = lines[name]
            x, y = start + index * (width + _SIDE), 2 + depth * (_BOX + _GAP)
            boxes[name] = _Box(name, (first, second), kind, x, y, width)
    return boxes


def _middle(parents: Sequence[_Box]) -> float:
    """Where a box stands best, so that few lines cross; 0 for one that reads none."""
    return sum(box.x for box in parents) / max(len(parents), 1)


def _counts(step: StepCounts) -> str:
    """`60 rows → 200 answers`, or the state of a step without any."""
    if step.rows is None or not step.is_begun:
        return step.state
    return f"{counted(step.rows, 'row')} → {counted(step.kept, 'answer')}"
