"""The picture of a job's step_map, and the messages if there is nothing to draw."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import plot_step_map
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plot_step_map import (
    BORDER,
    MARGIN,
    WIDTH,
    Line,
    PlotError,
    TracedRow,
    cell_width,
    draw,
    read_job,
    tokens_per_line,
)

DLLM = "batchgen.strategies.dllm.strategy.DLLMStrategy"
AR_SPEC = "batchgen.strategies.ar_spec.strategy.ARSpecStrategy"


def answer(name: str, text: str, steps: list[int] | None, *, prompt: int = 8) -> dict[str, Any]:
    """A row of bytes that ended with the id 258; no steps is an error row."""
    ids = [*text.encode(), 258] if steps else []
    return {
        "row_id": name,
        "sample_index": 0,
        "text": text if steps else None,
        "token_ids": ids,
        "stop": "<|im_end|>" if steps else None,
        "num_prompt_tokens": prompt if steps else None,
        "step_map": steps,
    }


# The second shares its first block of 4 with one token of the prompt.
ROWS = [
    answer("broken", "", None),
    answer("a", "ab c", [2, 1, 2, 2, 3]),
    answer("b", "x+y=z", [1, 1, 1, 2, 3, 3], prompt=9),
]


def job(folder: Path, rows: list[dict[str, Any]], target: str = DLLM, **options: Any) -> Path:
    (folder / "data").mkdir()
    lines = "".join(f"  {key}: {value}\n" for key, value in options.items())
    model = "model:\n  path: package://batchgen/data/nano_sdar\n"
    prompt = model + 'prompt:\n  user: "{{ problem }} {{ hint }}"\n'
    (folder / "config.yaml").write_text(f"{prompt}strategy:\n  _target_: {target}\n{lines}")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), folder / "data" / "part-00000.parquet")
    return folder


def test_rows_and_their_texts(tmp_path: Path) -> None:
    maps = read_job(job(tmp_path, ROWS, block_length=4))
    assert (maps.step_name, maps.block_length) == ("denoise step", 4)
    assert maps.rows(5) == [
        TracedRow("row a", ["a", "b", "␣", "c", "■"], [2, 1, 2, 2, 3], given=0),
        TracedRow("row b", ["x", "+", "y", "=", "z", "■"], [1, 1, 1, 2, 3, 3], given=1),
    ]


def test_what_config_yaml_does_not_say(tmp_path: Path) -> None:
    folder = job(tmp_path, ROWS, "my.Strategy", block_length="null")
    maps = read_job(folder)
    assert (maps.step_name, maps.block_length, maps.rows(2)[1].given) == ("step", None, 0)
    assert read_job(folder, 2).rows(2)[1].given == 1


@pytest.mark.parametrize(
    ("columns", "title"),
    [
        ({"question": "no column of the prompt", "hint": None}, "row r"),
        ({"hint": [1, 2], "problem": "Why?"}, "row r: Why? | [1, 2]"),
        (
            {"problem": "Why " + "x" * 90, "sample_index": 2},
            "row r, sample 2: Why " + "x" * 75 + "…",
        ),
    ],
)
def test_titles(columns: dict[str, Any], title: str, tmp_path: Path) -> None:
    row = answer("r", "hi", [1, 1, 1]) | columns
    assert read_job(job(tmp_path, [row])).rows(1)[0].name == title


def test_long_rows_are_wrapped_at_blocks_and_cut() -> None:
    row = TracedRow("r", list("abcdefghij"), list(range(1, 11)), given=1)
    assert row.lines(4)[:2] == [
        Line(["a", "b", "c"], [1, 2, 3], given=1),
        Line(["d", "e", "f", "g"], [4, 5, 6, 7], given=0),
    ]
    assert "".join(text for line in row.lines(4) for text in line.texts) == "abcdefghij"
    assert len(row.lines(1)) == plot_step_map.MOST_LINES


@pytest.mark.parametrize("block_length", [None, 4, 7, 64])
@pytest.mark.parametrize("width", [0.19, 0.82])
def test_lines_are_whole_blocks_within_the_picture(block_length: int | None, width: float) -> None:
    count = tokens_per_line(width, block_length)
    borders = (count - 1) // block_length if block_length else 0
    assert count >= 1 and MARGIN + count * width + borders * BORDER <= WIDTH - MARGIN
    if block_length and block_length * width < WIDTH - 2 * MARGIN - BORDER:
        assert count % block_length == 0


def test_cells_are_as_wide_as_most_texts() -> None:
    def width(texts: list[str], last_step: int = 1) -> float:
        return cell_width([TracedRow("r", texts, [last_step] * len(texts), 0)])

    assert width(["a"] * 10) < width(["a"] * 10, last_step=1000) < width(["word"] * 10)
    assert width(["a"] * 19 + ["word"]) == width(["a"] * 20)
    assert width(["x" * 50] * 5) == width(["x" * 8] * 5)


def texts_drawn(folder: Path) -> list[str]:
    maps = read_job(folder)
    figure = draw(maps, maps.rows(9))
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_every_token_is_drawn_once_with_its_step(tmp_path: Path) -> None:
    drawn = texts_drawn(job(tmp_path, ROWS, block_length=4))
    cells = drawn[drawn.index("row a") + 2 :]
    assert cells[:10] == ["a", "2", "b", "1", "␣", "2", "c", "2", "■", "3"]
    assert "5 tokens in 3 denoise steps, 1.7 per step" in drawn
    assert any("Grey: the end of the prompt" in text for text in drawn)
    assert any("border of a block of 4 tokens" in text for text in drawn)


def test_what_is_not_there_is_not_explained(tmp_path: Path) -> None:
    row = answer("long", "y" * 900, list(range(1, 902))) | {"stop": None}
    drawn = texts_drawn(job(tmp_path, [row], AR_SPEC))
    assert "Which forward committed each token" in drawn
    assert any("901 tokens in 901 forwards" in t and "are drawn" in t for t in drawn)
    assert not any("Grey" in text or "border" in text or "■" in text for text in drawn)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_step_map.py", *arguments])
    plot_step_map.main()


def test_a_png_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*ROWS, answer("$x^", "日本", [1, 1, 2, 2, 2, 2, 3])]
    folder = job(tmp_path, rows, block_length=4)
    sizes = []
    for count in ("1", "3"):
        picture = tmp_path / f"{count}.png"
        run(monkeypatch, str(folder), "--rows", count, "--out", str(picture))
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
        sizes.append(struct.unpack(">II", content[16:24]))
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path, message: str, *arguments: str) -> None:
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, str(folder), *arguments)

    refused(tmp_path / "nowhere", r"not a job's folder .*: give the job's output\.dir")
    (tmp_path / "config.yaml").write_text("strategy: {}")
    refused(tmp_path, "has no complete shard yet .*: run the job's command again")
    empty, errors, plain = (tmp_path / name for name in ("empty", "errors", "plain"))
    for folder in (empty, errors, plain):
        folder.mkdir()
    refused(job(errors, ROWS[:1]), "none of the 1 rows in .* has tokens: column error says why")
    unmapped = [{key: value for key, value in ROWS[1].items() if key != "step_map"}]
    refused(job(plain, unmapped), r"strategy=dllm .*'output\.columns=\[step_map\]'")
    good = job(empty, ROWS)
    refused(good, "cannot load /no/such", "--tokenizer", "/no/such/tokenizer")
    refused(good, "2", "--rows", "0")
    refused(good, "cannot write .*: No such file", "--out", str(tmp_path / "no" / "p.png"))
    for text in ("strategy: {}", "[", "model: x", ""):
        (good / "config.yaml").write_text(text)
        refused(good, "is not what a job wrote: it names no strategy")
    (good / "data" / "part-00000.parquet").write_bytes(b"no Parquet")
    refused(good, "cannot read")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = read_job(job(tmp_path, ROWS))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(PlotError, match=r"needs matplotlib.*pip install -e '\.\[plot\]'"):
        draw(maps, maps.rows(1))
