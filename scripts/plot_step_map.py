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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import yaml

from batchgen.prompts.used_columns import used_columns
from batchgen.texts.tokens.decode_tokens import decode_with, job_decode
from batchgen.texts.tokens.step_name import step_name
from batchgen.util.paths import short_user_path
from batchgen.util.shorten import beginning

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
FOOTER = 2.0
BORDER = 0.09  # between blocks
MOST_LINES = 6
LONGEST_TEXT = 8
INK, FAINT, PROMPT = "#1c1c28", "#6a6a78", "#e4e4ea"
TITLE_LENGTH = 80
SPACE, END = "␣", "■"
Decode = Callable[[list[int]], str]


class PlotError(Exception):
    """A mistake of the user. The message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Line:
    """Consecutive tokens of a row that are drawn in one line, after `given` cells of the prompt."""

    texts: Sequence[str]
    steps: Sequence[int]
    given: int


@dataclass(frozen=True, slots=True)
class TracedRow:
    """The tokens of a row, and the steps that they came from.

    Attributes:
        name: the title of the row.
        texts: the text of each token as it is drawn, or empty strings if it is not known.
        steps: the step of each token, from 1.
        given: how many positions of the first token's block are the end of the prompt.
    """

    name: str
    texts: Sequence[str]
    steps: Sequence[int]
    given: int

    def lines(self, tokens_per_line: int) -> list[Line]:
        """Cut the row into at most `MOST_LINES` lines; the tokens after those are left out.

        The first `given` cells of the first line are the end of the prompt, so all lines begin at
        the same offset in a block.
        """
        starts = range(-self.given, len(self.steps), tokens_per_line)[:MOST_LINES]
        parts = [(slice(max(start, 0), start + tokens_per_line), start) for start in starts]
        return [Line(self.texts[at], self.steps[at], max(-start, 0)) for at, start in parts]


@dataclass(frozen=True)
class StepMaps:
    """The output of a job that has the column step_map.

    Attributes:
        step_name: what the numbers of step_map count.
        block_length: positions of a diffusion block; None if the strategy has no blocks, or if
            config.yaml does not say.
        titles: the columns that the prompt uses, whose values are a row's title.
        decode: tokens to text; None if the tokenizer is not on this machine.
    """

    folder: Path
    data: ds.Dataset
    step_name: str
    block_length: int | None
    titles: Sequence[str]
    decode: Decode | None

    def rows(self, count: int) -> list[TracedRow]:
        """Read the first `count` rows that have tokens.

        Raises:
            PlotError: if no row has tokens.
        """
        names = ["row_id", "sample_index", "token_ids", "stop", "num_prompt_tokens", "step_map"]
        names += self.titles
        batches = self.data.to_batches(columns=[*dict.fromkeys(names)], batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist() if row["step_map"])
        if not (found := [self._traced(row) for row in islice(rows, count)]):
            raise PlotError(
                f"none of the {self.data.count_rows()} rows in {self.folder} has tokens: column "
                "error says why"
            )
        return found

    def _traced(self, row: dict[str, Any]) -> TracedRow:
        name = f"row {row['row_id']}"
        name += f", sample {row['sample_index']}" if row["sample_index"] else ""
        values = [str(row[name]) for name in self.titles if row[name] is not None]
        name += ": " + beginning(" | ".join(values), TITLE_LENGTH) if values else ""
        given = row["num_prompt_tokens"] % self.block_length if self.block_length else 0
        decode = self.decode or (lambda ids: "")
        texts = [shown(decode([token])) for token in row["token_ids"]]
        if row["stop"] and texts[-1] == shown(row["stop"]):
            texts[-1] = END
        return TracedRow(name, texts, row["step_map"], given)


def shown(text: str) -> str:
    """A token in one line, with visible spaces."""
    for character, sign in ((" ", SPACE), ("\n", "↵"), ("\t", "→")):
        text = text.replace(character, sign)
    return "".join(c if c.isprintable() else "�" for c in text)


def read_job(
    folder: Path,
    block_length: int | None = None,
    tokenizer: str | None = None,
) -> StepMaps:
    """Open a job's output; what is None is taken from the job's config.yaml.

    Raises:
        PlotError: if the folder is not a job's, has no complete shard, or lacks a column.
    """
    files = sorted((folder / "data").glob("*.parquet"))
    if not (folder / "config.yaml").is_file():
        raise PlotError(
            f"{folder} is not a job's folder (it has no config.yaml): give the job's output.dir"
        )
    if not files:
        raise PlotError(
            f"{folder} has no complete shard yet (data/*.parquet): run the job's command again, it "
            "goes on where it stopped"
        )
    try:
        data = ds.dataset([str(file) for file in files], format="parquet")
    except pa.ArrowInvalid as error:
        raise PlotError(f"cannot read {folder / 'data'}: {error}") from None
    if "step_map" not in data.schema.names:
        raise PlotError(
            f"{folder} has no column step_map: run the job with strategy=dllm or strategy=ar_spec "
            "and 'output.columns=[step_map]'"
        )
    config = _config(folder / "config.yaml")
    used = [name for name in used_columns(config.get("prompt") or {}) if name in data.schema.names]
    return StepMaps(
        folder,
        data,
        step_name(config),
        block_length or config["strategy"].get("block_length"),
        used,
        job_decode(config) if tokenizer is None else _load_tokenizer(tokenizer),
    )


def _config(file: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        target = config["strategy"]["_target_"]
    except (yaml.YAMLError, KeyError, TypeError):
        target = None
    if not isinstance(target, str):
        raise PlotError(f"{file} is not what a job wrote: it names no strategy")
    return dict(config)


def _load_tokenizer(name: str) -> Decode:
    from transformers import AutoTokenizer

    try:
        return decode_with(AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise PlotError(f"--tokenizer: cannot load {name}: {error}") from None


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


def draw(maps: StepMaps, rows: list[TracedRow]) -> Figure:
    """Draw a band of cells for each row, and below them an explanation.

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
    bands = [row.lines(per_line) for row in rows]
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
    _notes(canvas, maps, rows, height, per_line)
    return figure


def _header(canvas: Axes, maps: StepMaps, rows: list[TracedRow]) -> None:
    verb = "unmasked" if maps.step_name == "denoise step" else "committed"
    canvas.text(
        MARGIN, 0.42, f"Which {maps.step_name} {verb} each token", size=17, weight="bold", color=INK
    )
    about = (
        f"{maps.folder.name}: {len(rows)} of {maps.data.count_rows():,} rows, from left to right. "
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

    def place(i: int) -> float:
        """The left edge of the i-th cell; lines begin at the border of a block."""
        return MARGIN + i * width + (i // block_length * BORDER if block_length else 0)

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
    if any(END in row.texts for row in rows):
        notes.append(f"{END} is the token that ended the row, {SPACE} a space.")
    if not all(map(_has_text, rows)):
        notes.append("For the text of tokens name the model's tokenizer (--tokenizer).")
    y = height - FOOTER + 0.4
    for note in notes:
        canvas.text(MARGIN, y, note, size=10, color=INK, va="top", linespacing=1.4)
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
        help="folder or hub name, for the text of tokens; default: the model's, if it is here",
    )
    args = parser.parse_args()
    if args.rows < 1 or (args.block_length is not None and args.block_length < 1):
        parser.error("--rows and --block-length must be at least 1")
    try:
        folder = short_user_path(args.folder, "OUT")
        maps = read_job(folder, args.block_length, args.tokenizer)
        rows = maps.rows(args.rows)
        figure = draw(maps, rows)
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
