"""Draw the order in which the tokens of a job's rows were generated, from its Parquet files.

    batchgen +experiment=nano_sdar
    python scripts/plot_step_map.py outputs/nano_sdar --rows 4 --out step_map.png

The job must have written the column step_map: strategy=dllm (the denoise step that unmasked each
token) or strategy=ar_spec (the forward that committed it). Needs matplotlib: pip install -e .[plot]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from step_map_data import Histogram, Line, PlotError, StepMaps, TracedRow, load_tokenizer, read_job

from batchgen.util.paths import short_user_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

WIDTH = 13.0  # of the picture; all lengths here are in inches
MARGIN = 0.35
CELL_HEIGHT = 0.42
LINE_PITCH = 0.54
TITLE = 0.42  # above the lines of a row
HEADER = 1.0
FOOTER = 3.1
BORDER = 0.09  # between blocks
MOST_LINES = 6
LONGEST_TEXT = 8
INK, FAINT, PROMPT, BAR, MEAN = "#1c1c28", "#6a6a78", "#e4e4ea", "#3b7a9e", "#d1495b"


def cell_width(rows: list[TracedRow]) -> float:
    """Choose the width of a cell: it fits the text of nine tokens in ten, and every step number."""
    lengths = sorted(len(text) for row in rows for text in row.texts)
    longest = lengths[int(0.9 * (len(lengths) - 1))]
    digits = len(str(max(max(row.steps) for row in rows)))
    return 0.1 + 0.09 * max(1, min(longest, LONGEST_TEXT), digits - 1)


def tokens_per_line(width: float, block_length: int | None) -> int:
    """Return how many cells fit into a line: whole blocks, unless one block alone is wider."""
    length = block_length or 1
    borders = BORDER if block_length else 0.0
    blocks = int((WIDTH - 2 * MARGIN) / (length * width + borders))
    return blocks * length or int((WIDTH - 2 * MARGIN) / width)


def draw(maps: StepMaps, histogram: Histogram, rows: list[TracedRow]) -> Figure:
    """Draw a band of cells for each row, and below them the histogram and an explanation.

    Raises:
        PlotError: if matplotlib is not installed.
    """
    try:
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PlotError(
            f"plot_step_map.py needs {error.name}, which is not installed: "
            "run pip install -e '.[plot]'"
        ) from None
    from matplotlib import colormaps

    width = cell_width(rows)
    per_line = tokens_per_line(width, maps.block_length)
    bands = [row.lines(per_line, MOST_LINES) for row in rows]
    height = HEADER + sum(TITLE + LINE_PITCH * len(band) for band in bands) + FOOTER
    figure = Figure(figsize=(WIDTH, height), dpi=110, facecolor="white")
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set_axis_off()
    canvas.set(xlim=(0, WIDTH), ylim=(height, 0))
    last_step = max(max(line.steps) for band in bands for line in band if line.steps)
    colors = colormaps["viridis"], Normalize(1, max(2, last_step))
    _header(canvas, maps, rows)
    y = HEADER
    for row, band in zip(rows, bands, strict=True):
        _title(canvas, row, maps.step_name, y, shown=sum(len(line.steps) for line in band))
        y += TITLE
        for line in band:
            _cells(canvas, line, maps.block_length, width, y, colors)
            y += LINE_PITCH
    _colorbar(figure, height, colors, maps.step_name)
    _bars(figure, height, histogram, maps.step_name)
    _notes(canvas, maps, rows, height, per_line)
    return figure


def _header(canvas: Axes, maps: StepMaps, rows: list[TracedRow]) -> None:
    verb = "unmasked" if maps.step_name == "denoise step" else "committed"
    canvas.text(
        MARGIN, 0.42, f"Which {maps.step_name} {verb} each token", size=17, weight="bold", color=INK
    )
    about = (
        f"{maps.folder.name}: {len(rows)} of {maps.num_rows:,} rows, read from left to right. "
        "Cells with the same number came together, in one forward of the model."
    )
    canvas.text(MARGIN, 0.74, about, size=10.5, color=FAINT, parse_math=False)


def _title(canvas: Axes, row: TracedRow, step_name: str, y: float, *, shown: int) -> None:
    count, steps = len(row.steps), len(set(row.steps))
    cost = f"{count} tokens in {steps} {step_name}s, {count / steps:.1f} per step"
    if shown < count:
        cost += f"; the first {shown} are drawn"
    canvas.text(MARGIN, y + 0.24, row.name, size=11, weight="bold", color=INK, parse_math=False)
    canvas.text(WIDTH - MARGIN, y + 0.24, cost, size=10, color=FAINT, ha="right")


def _cells(
    canvas: Axes,
    line: Line,
    block_length: int | None,
    width: float,
    y: float,
    colors: tuple[Colormap, Normalize],
) -> None:
    from matplotlib.patches import Rectangle

    place = _places(block_length, width)
    for i in range(line.given):
        canvas.add_patch(Rectangle((place(i), y), width * 0.94, CELL_HEIGHT, color=PROMPT, lw=0))
    room = int((width - 0.02) / 0.085)
    for i, (text, step) in enumerate(zip(line.texts, line.steps, strict=True), line.given):
        color = colors[0](colors[1](step))
        red, green, blue, _ = color
        ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else INK
        canvas.add_patch(Rectangle((place(i), y), width * 0.94, CELL_HEIGHT, color=color, lw=0))
        center = place(i) + width * 0.47
        if text and len(text) <= room:
            canvas.text(
                center, y + 0.21, text, size=10, family="monospace", color=ink, ha="center",
                parse_math=False,
            )  # fmt: skip
            canvas.text(center, y + 0.37, str(step), size=6.5, color=ink, ha="center", alpha=0.85)
        else:
            canvas.text(center, y + 0.26, str(step), size=9, color=ink, ha="center")


def _places(block_length: int | None, width: float) -> Callable[[int], float]:
    """Return a function that gives the left edge of the i-th cell of a line.

    Lines begin at the border of a block.
    """

    def place(i: int) -> float:
        borders = i // block_length if block_length else 0
        return MARGIN + i * width + borders * BORDER

    return place


def _colorbar(
    figure: Figure, height: float, colors: tuple[Colormap, Normalize], step_name: str
) -> None:
    from matplotlib.cm import ScalarMappable

    length = 2.6
    axes = figure.add_axes(
        ((WIDTH - MARGIN - length) / WIDTH, 1 - 0.62 / height, length / WIDTH, 0.14 / height)
    )
    bar = figure.colorbar(ScalarMappable(colors[1], colors[0]), cax=axes, orientation="horizontal")
    last = int(colors[1].vmax or 1)
    bar.set_ticks(sorted({1 + (last - 1) * i // 5 for i in range(6)}))
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=8, colors=FAINT, length=2)
    axes.set_title(f"{step_name} of the row", size=9, color=FAINT, pad=4)


def _bars(figure: Figure, height: float, histogram: Histogram, step_name: str) -> None:
    left, bottom, wide, tall = 0.95, 0.65, 5.6, FOOTER - 1.35
    axes = figure.add_axes((left / WIDTH, bottom / height, wide / WIDTH, tall / height))
    numbers = list(range(1, histogram.most_tokens + 1))
    shares = [100 * histogram.counts.get(n, 0) / histogram.steps for n in numbers]
    bars = axes.bar(numbers, shares, color=BAR, width=0.72)
    if len(numbers) <= 16:
        axes.bar_label(bars, [f"{s:.1f}%" for s in shares], size=9, color=INK, padding=2)
        axes.set_xticks(numbers)
    axes.set_ylim(0, max(shares) * 1.18)
    top = axes.get_xaxis_transform()  # above the bars, where it hides no label
    axes.plot(histogram.mean, 1.01, "v", color=MEAN, ms=8, transform=top, clip_on=False)
    axes.set_title(
        f"{histogram.mean:.2f} tokens per {step_name} on average (▼), {histogram.rows:,} rows, "
        f"{histogram.tokens:,} tokens",
        size=11, color=INK, loc="left", weight="bold", pad=14,
    )  # fmt: skip
    axes.set_xlabel(f"tokens that one {step_name} brought", size=9.5, color=FAINT)
    axes.set_ylabel(f"% of the {step_name}s", size=9.5, color=FAINT)
    axes.tick_params(labelsize=9, colors=FAINT)
    axes.spines[["top", "right"]].set_visible(False)


def _notes(
    canvas: Axes, maps: StepMaps, rows: list[TracedRow], height: float, per_line: int
) -> None:
    cell = "One cell is one token" + (", with its text." if any(map(_has_text, rows)) else ".")
    meaning = f"the {maps.step_name} that it came from, counted from 1 in each row."
    notes = [f"{cell} Its number and colour are\n{meaning}"]
    if maps.block_length:
        border = "A gap or the end of a line" if per_line >= maps.block_length else "A gap"
        notes.append(f"{border} is the border of a block of {maps.block_length} tokens.")
    if any(row.given for row in rows):
        notes.append("Grey: the end of the prompt, which shares the first block.")
    if any(text == row.END for row in rows for text in row.texts):
        notes.append(f"{TracedRow.END} is the token that ended the row, {TracedRow.SPACE} a space.")
    if not all(map(_has_text, rows)):
        notes.append("For the text of tokens name the model's tokenizer (--tokenizer).")
    y = height - FOOTER + 0.62
    for note in notes:
        canvas.text(7.2, y, note, size=10, color=INK, va="top", linespacing=1.4)
        y += 0.24 + 0.2 * note.count("\n") + 0.08


def _has_text(row: TracedRow) -> bool:
    return any(row.texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="OUT", type=Path, help="the job's output.dir")
    parser.add_argument("--rows", type=int, default=4, help="how many to draw (default 4)")
    parser.add_argument("--out", type=Path, default=Path("step_map.png"), help="the PNG file")
    parser.add_argument(
        "--block-length", type=int, help="of strategy=dllm, where the job left it to the model"
    )
    parser.add_argument(
        "--tokenizer",
        help="folder or hub name, for the text of tokens; not needed where a token is a byte",
    )
    parser.add_argument(
        "--title-column",
        help="whose values are the rows' titles; default: the end of the prompt if the output has "
        "prompt_token_ids, else the columns that the prompt uses",
    )
    args = parser.parse_args()
    if args.rows < 1 or (args.block_length is not None and args.block_length < 1):
        parser.error("--rows and --block-length must be at least 1")
    try:
        maps = read_job(short_user_path(args.folder, "OUT"), args.block_length, args.title_column)
        decoder = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
        rows = maps.traced_rows(args.rows, decoder)
        figure = draw(maps, maps.histogram(), rows)
    except PlotError as error:
        sys.exit(str(error))
    with warnings.catch_warnings():  # a character that no font has is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        try:
            figure.savefig(args.out, format="png")
        except OSError as error:
            sys.exit(f"--out: cannot write {args.out}: {error.strerror}")
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
