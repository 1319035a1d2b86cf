"""Draws the diagrams of the design pages as SVG: the groups of batchgen, a row's way through a job,
and a step of the engine.

`scripts/docs/reference.py` writes them to docs/images with the other generated pages. Their colours
follow the reader's choice of light or dark. All coordinates and sizes are pixels, from the top left
corner; `kind` is a CSS class of `STYLE`.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

STYLE = """
text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#1f2430}
.name{font-weight:600}.small{font-size:11.5px;fill:#4d5566}.page{fill:#ffffff}
.box{stroke:#7a86a0;fill:#eef2fa}.engine{stroke:#4f8a6b;fill:#e6f4ec}
.device{stroke:#b07a2e;fill:#fbf0dd}.line{stroke:#5b6478;stroke-width:1.5;fill:none}
.tip{fill:#5b6478}
@media (prefers-color-scheme:dark){text{fill:#e6e9f0}.small{fill:#b3bccd}.page{fill:#1e2129}
.box{stroke:#7d8bab;fill:#2b3242}.engine{stroke:#6fb38e;fill:#22382d}
.device{stroke:#d09a4b;fill:#3d311c}.line{stroke:#aab4c8}.tip{fill:#aab4c8}}
"""
# A layer's folder, and what it has.
LAYERS = (
    ("strategies", "one folder per decoding paradigm"),
    ("engine", "token ids in, tokens out: scheduling, caches, models"),
    ("kernels", "Triton kernels, each beside its PyTorch reference"),
)
ROW_WAY = (
    (
        "box",
        ("Data set", "row, id, columns"),
        ("Row steps", "which rows there are"),
        ("Prompt", "token ids, constraint"),
        ("Request", "one per sample, with a seed"),
    ),
    (
        "engine",
        ("Scheduler", "picks the rows of a step"),
        ("Forward", "one batch on the device"),
        ("Strategy", "decides which tokens stand"),
        ("Running batch", "commits, cuts at the stop"),
    ),
    (
        "box",
        ("FinishedRow", "tokens and columns"),
        ("Journal", "synced every ten seconds"),
        ("Shard", "a complete Parquet file"),
        ("Grades, report", "when all shards are there"),
    ),
)
"""The three lines of the diagram of a row's way. Each has the CSS class of its boxes (see `STYLE`),
and then the title and caption of each box."""


def svg(title: str, width: int, height: int, parts: list[str]) -> str:
    """Return an SVG image that consists of the elements `parts` on a background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n' + "\n".join(parts) + "\n"
        "</svg>\n"
    )


def box(x: int, y: int, width: int, height: int, kind: str = "box") -> str:
    """Return a rectangle with its top left corner at (x, y)."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'


def label(x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> str:
    """Return text with its baseline at y, which begins at x or has its `anchor` there."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def arrow(*points: tuple[int, int]) -> str:
    """Return a line through points in pixels, with an arrowhead at its end. Its last piece must be
    horizontal or vertical."""
    (x, y), (end_x, end_y) = points[-2:]
    if x == end_x:
        side = 6 if end_y > y else -6
        tip = f"{end_x - 4},{end_y - side} {end_x + 4},{end_y - side} {end_x},{end_y}"
    else:
        side = 6 if end_x > x else -6
        tip = f"{end_x - side},{end_y - 4} {end_x - side},{end_y + 4} {end_x},{end_y}"
    line = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="line" points="{line}"/><polygon class="tip" points="{tip}"/>'


def groups_svg(overview: str) -> str:
    """Draw the groups of batchgen above the three layers that they import. `overview` is the text
    of docs/design/overview.md, whose table lists the groups."""
    table = overview.partition("## Groups and rooms")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
    parts = [label(24, 26, "batchgen", "name")]
    y = 38
    for kind, lines in (("box", rows), ("engine", LAYERS)):
        for name, subject in lines:
            parts += [
                box(24, y, 620, 28, kind),
                label(36, y + 19, name, "name"),
                label(140, y + 19, subject, "small"),
            ]
            y += 34
        y += 20
    parts += [arrow((664, 44), (664, y - 32)), label(676, (y + 10) // 2, "imports", "small")]
    return svg("The groups of batchgen, top to bottom, and the layers below", 740, y - 12, parts)


def row_svg() -> str:
    """Draw the way of a row in three lines of boxes: the job, the engine, the job again."""
    width, height, gap = 176, 50, 24
    parts = []
    for line, (kind, *stations) in enumerate(ROW_WAY):
        y = 24 + line * 112
        for index, (name, caption) in enumerate(stations):
            x = 24 + index * (width + gap)
            parts += [
                box(x, y, width, height, kind),
                label(x + width // 2, y + 21, name, "name", "middle"),
                label(x + width // 2, y + 39, caption, "small", "middle"),
            ]
            if index:
                parts.append(arrow((x - gap, y + 25), (x, y + 25)))
        if line:
            right, left, middle = 24 + 3 * (width + gap) + 132, 24 + 44, y - 22
            parts.append(arrow((right, y - 62), (right, middle), (left, middle), (left, y)))
    # The engine's boxes are a loop: an arrow leads from the last one back to the first.
    last, first = 24 + 3 * (width + gap) + 44, 24 + 132
    parts += [
        arrow((last, 186), (last, 206), (first, 206), (first, 186)),
        label(412, 201, "each step", "small", "middle"),
    ]
    return svg("A row's way from the data set to a shard", 24 + 4 * (width + gap), 322, parts)


def step_svg() -> str:
    """Draw a timeline: the host launches step t+1 while the device runs step t."""
    period, left = 250, 76
    names = ("t", "t+1", "t+2", "t+3")
    parts = [label(16, 51, "host", "name"), label(16, 131, "device", "name")]
    for index in range(3):
        x = left + index * period
        jobs = [("plan", names[index + 1]), ("launch", names[index + 1])]
        if index:
            jobs = [("read", names[index - 1]), ("commit", names[index - 1]), *jobs]
            parts.append(arrow((x, 112), (x, 90), (x + 16, 90), (x + 16, 66)))
        for place, (job, step) in enumerate(jobs, start=4 - len(jobs)):
            at = x + 6 + place * 58
            parts += [
                box(at, 28, 54, 38),
                label(at + 27, 44, job, "small", "middle"),
                label(at + 27, 59, step, "small", "middle"),
            ]
        parts += [
            box(x + 1, 112, period - 2, 32, "device"),
            label(x + period // 2, 132, f"forward {names[index]}", "", "middle"),
        ]
        if index < 2:
            parts.append(
                arrow((x + 207, 66), (x + 207, 98), (x + period + 8, 98), (x + period + 8, 112))
            )
    return svg("The host launches a step before it reads the one before", 850, 160, parts)


def diagrams(overview: Path, images: Path) -> dict[Path, str]:
    """Return the path in the folder `images` and the text of each diagram. `overview` is the path
    of docs/design/overview.md."""
    return {
        images / "groups.svg": groups_svg(overview.read_text(encoding="utf-8")),
        images / "row.svg": row_svg(),
        images / "step.svg": step_svg(),
    }
