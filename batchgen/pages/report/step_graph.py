"""Draws the steps of a pipeline as a graph, from top to bottom: a box for each step and each export
(a set of files that the pipeline writes from the rows of a step), and a line from each box to every
box whose rows it reads, its parents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchgen.pages.report.charts import Chart
from batchgen.pages.report.funnel import StepCounts
from batchgen.pages.report.pipeline_facts import PipelineFacts
from batchgen.pages.report.svg import WIDTH, drawing, svg_tag, text
from batchgen.util.shorten import both_ends
from batchgen.util.text.text_table import counted

_HEIGHT, _BELOW, _BESIDE = 48.0, 30.0, 12.0
"""The height of a box, and the space below it and beside it, in SVG units."""
_MOST_WIDTH = 200.0
"""The maximum width of a box, in SVG units."""
_CHARACTER = 6.9
"""The width of a character in SVG units, at most."""


class _Label(NamedTuple):
    """What a box says."""

    name: str
    extent: str  # the second line: how many rows
    kind: str  # its CSS class: `step` or `set`


@dataclass(frozen=True)
class _Box:
    """A box with its upper left corner and its width."""

    label: _Label
    x: float
    y: float
    width: float

    @property
    def center(self) -> float:
        return self.x + self.width / 2


def step_graph(facts: PipelineFacts) -> Chart:
    """Return the graph of a pipeline."""
    parents: dict[str, Sequence[str]] = dict(facts.parents)
    labels = {step.name: _Label(step.name, _counts(step), "step") for step in facts.steps}
    for export in facts.sets:
        if export.step in facts.parents:
            parents[f"export/{export.name}"] = [export.step]
            labels[f"export/{export.name}"] = _Label(export.name, export.extent, "set")
    boxes = _placed(parents, labels)
    height = max((box.y + _HEIGHT for box in boxes.values()), default=0.0) + 4
    parts = []
    for name, box in boxes.items():
        for parent in parents[name]:
            # A curve from the bottom of the parent to the top of the box.
            x1, y1 = boxes[parent].center, boxes[parent].y + _HEIGHT
            x2, y2 = box.center, box.y
            bend = (y2 - y1) / 2
            path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} "
            parts.append(svg_tag("path", d=f"{path}{x2:.1f} {y2:.1f}", class_="edge"))
    for box in boxes.values():
        shape = {"x": box.x, "y": box.y, "width": box.width, "height": _HEIGHT, "rx": 6}
        parts.append(svg_tag("rect", class_=f"box {box.label.kind}", **shape))
        characters = max(int((box.width - 12) / _CHARACTER), 4)
        name, extent = (both_ends(t, characters) for t in (box.label.name, box.label.extent))
        parts.append(text(name, box.center, box.y + 20, class_="label", anchor="middle"))
        parts.append(text(extent, box.center, box.y + 37, class_="tick", anchor="middle"))
    description = "; ".join(
        f"{label.name}: {label.extent}"
        + (f", of {', '.join(parents[name])}" if parents[name] else "")
        for name, label in labels.items()
    )
    svg = drawing(parts, label=f"Steps: {description}", height=height)
    return Chart("How rows go", note="", svg=svg)


def _placed(parents: Mapping[str, Sequence[str]], labels: Mapping[str, _Label]) -> dict[str, _Box]:
    """Return the box of each label. A box is one row of boxes below the lowest of its parents."""
    depths: dict[str, int] = {}  # the number of the row of boxes
    for name in labels:  # parents come first
        depths[name] = 1 + max((depths[parent] for parent in parents[name]), default=-1)
    boxes: dict[str, _Box] = {}
    for depth in range(max(depths.values(), default=-1) + 1):
        row = [name for name, at in depths.items() if at == depth]
        row.sort(key=lambda name: _middle([boxes[parent] for parent in parents[name]]))
        spaces = _BESIDE * (len(row) - 1)
        width = min((WIDTH - spaces) / len(row), _MOST_WIDTH)
        start = (WIDTH - width * len(row) - spaces) / 2
        for index, name in enumerate(row):
            x, y = start + index * (width + _BESIDE), 2 + depth * (_HEIGHT + _BELOW)
            boxes[name] = _Box(labels[name], x, y, width)
    return boxes


def _middle(parents: Sequence[_Box]) -> float:
    """Return the mean x of a box's parents, or 0. Boxes in this order have few lines that cross."""
    return sum(box.x for box in parents) / max(len(parents), 1)


def _counts(step: StepCounts) -> str:
    """Return `60 rows → 200 answers`, or the state of a step that has no answers yet."""
    if step.rows is None or not step.is_begun:
        return step.state
    return f"{counted(step.rows, 'row')} → {counted(step.kept, 'answer')}"
