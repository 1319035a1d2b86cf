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
from plot_step_map import BORDER, MARGIN, WIDTH, cell_width, draw, tokens_per_line
from step_map_data import Histogram, Line, PlotError, TracedRow, read_job, token_texts

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
        "stop": "<end>" if steps else None,
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
    prompt = 'prompt:\n  user: "{{ problem }} {{ hint }}"\n'
    (folder / "config.yaml").write_text(f"{prompt}strategy:\n  _target_: {target}\n{lines}")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), folder / "data" / "part-00000.parquet")
    return folder


def test_rows_and_their_texts(tmp_path: Path) -> None:
    maps = read_job(job(tmp_path, ROWS, block_length=4))
    assert (maps.num_rows, maps.step_name, maps.block_length) == (3, "denoise step", 4)
    assert maps.traced_rows(5) == [
        TracedRow("row a", ["a", "b", "␣", "c", "■"], [2, 1, 2, 2, 3], given=0),
        TracedRow("row b", ["x", "+", "y", "=", "z", "■"], [1, 1, 1, 2, 3, 3], given=1),
    ]
    assert [row.name for row in maps.traced_rows(1)] == ["row a"]


def test_the_block_length_may_be_given(tmp_path: Path) -> None:
    folder = job(tmp_path, ROWS, block_length="null")
    assert read_job(folder).block_length is None
    assert read_job(folder).traced_rows(2)[1].given == 0
    assert read_job(folder, 2).traced_rows(2)[1].given == 1


def test_speculation_has_forwards_and_no_blocks(tmp_path: Path) -> None:
    maps = read_job(job(tmp_path, ROWS, AR_SPEC, num_spec_tokens=3))
    assert (maps.step_name, maps.block_length) == ("forward", None)


def test_another_paradigm_has_steps(tmp_path: Path) -> None:
    assert read_job(job(tmp_path, ROWS, "my.Strategy")).step_name == "step"


def test_histogram(tmp_path: Path) -> None:
    histogram = read_job(job(tmp_path, ROWS)).histogram()
    # a: steps of 1, 3 and 1 tokens; b: of 3, 1 and 2.
    assert histogram == Histogram({1: 3, 2: 1, 3: 2}, rows=2)
    assert (histogram.steps, histogram.tokens, histogram.most_tokens) == (6, 11, 3)
    assert histogram.mean == pytest.approx(11 / 6)


def title(
    tmp_path: Path, title_column: str | None = None, decoder: Any = None, **columns: Any
) -> str:
    row = answer("r", "hi", [1, 1, 1]) | columns
    (traced,) = read_job(job(tmp_path, [row]), title_column=title_column).traced_rows(1, decoder)
    return traced.name


def test_titles_are_the_columns_of_the_prompt(tmp_path: Path) -> None:
    """Whatever their names are; `question` is a column as any other."""
    columns = {"question": "another", "problem": "Why\n  not? " + "x" * 90, "sample_index": 2}
    assert title(tmp_path, **columns) == "row r, sample 2: Why not? " + "x" * 70 + "…"


def test_titles_of_several_columns(tmp_path: Path) -> None:
    assert title(tmp_path, hint=[1, 2], problem="Why?") == "row r: Why? | [1, 2]"


def test_a_row_whose_prompt_nobody_knows_has_its_id(tmp_path: Path) -> None:
    assert title(tmp_path, question="another", hint=None) == "row r"


def test_the_column_of_titles_may_be_given(tmp_path: Path) -> None:
    folder = job(tmp_path, [answer("r", "hi", [1, 1, 1]) | {"problem": "a", "other": "b"}])
    assert read_job(folder, title_column="other").traced_rows(1)[0].name == "row r: b"
    with pytest.raises(PlotError, match=r"--title-column: the rows have no column 'oter': choose"):
        read_job(folder, title_column="oter")


def test_titles_are_the_end_of_the_prompt_where_it_can_be_read(tmp_path: Path) -> None:
    class Decoder:
        def decode(self, ids: list[int], **_: bool) -> str:
            return "long " * 30 + " ".join(map(str, ids)) if ids[0] == 300 else "t"

    ids = {"problem": "Why?", "prompt_token_ids": [300, 301]}
    assert title(tmp_path, **ids) == "row r: Why?"
    (tmp_path / "x").mkdir()
    named = title(tmp_path / "x", decoder=Decoder(), **ids)
    assert named.startswith("row r: …g long") and named.endswith(" long 300 301")
    (tmp_path / "y").mkdir()
    as_bytes = [256, *b"2 + 2?", 257]
    assert title(tmp_path / "y", prompt_token_ids=as_bytes) == "row r: 2 + 2?"


def test_long_rows_are_wrapped_at_blocks_and_cut() -> None:
    row = TracedRow("r", list("abcdefghij"), list(range(1, 11)), given=1)
    assert row.lines(4, most_lines=2) == [
        Line(["a", "b", "c"], [1, 2, 3], given=1),
        Line(["d", "e", "f", "g"], [4, 5, 6, 7], given=0),
    ]
    assert "".join(text for line in row.lines(4, 9) for text in line.texts) == "abcdefghij"


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


class Words:
    def decode(self, ids: list[int]) -> str:
        return {0: "Hello", 1: " world", 2: "\n", 3: "<end>", 4: "\ufffd\x00"}[ids[0]]


def test_texts_of_a_tokenizer_and_without_one() -> None:
    row = {"token_ids": [0, 1, 2, 4, 3], "text": "Hello world\n", "stop": "<end>"}
    assert token_texts(row, Words()) == ["Hello", "␣world", "↵", "��", "■"]
    assert token_texts(row | {"stop": None}, Words())[-1] == "<end>"
    assert token_texts(row, None) == [""] * 5  # these ids are no bytes of the text
    umlaut = {"token_ids": [*"ä".encode(), 258], "text": "ä", "stop": "<end>"}
    assert token_texts(umlaut, None) == ["c3", "a4", "■"]


def texts_drawn(folder: Path) -> list[str]:
    maps = read_job(folder)
    figure = draw(maps, maps.histogram(), maps.traced_rows(9))
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_every_token_is_drawn_once_with_its_step(tmp_path: Path) -> None:
    drawn = texts_drawn(job(tmp_path, ROWS, block_length=4))
    cells = drawn[drawn.index("row a") + 2 :]
    assert cells[:10] == ["a", "2", "b", "1", "␣", "2", "c", "2", "■", "3"]
    assert "5 tokens in 3 denoise steps, 1.7 per step" in drawn
    assert {"50.0%", "16.7%", "33.3%"} <= set(drawn)
    assert any("Grey: the end of the prompt" in text for text in drawn)
    assert any("border of a block of 4 tokens" in text for text in drawn)


def test_what_is_not_there_is_not_explained(tmp_path: Path) -> None:
    row = answer("long", "y" * 900, list(range(1, 902))) | {"text": "something else"}
    drawn = texts_drawn(job(tmp_path, [row], AR_SPEC))
    assert "Which forward committed each token" in drawn
    assert any("901 tokens in 901 forwards" in t and "are drawn" in t for t in drawn)
    assert any("--tokenizer" in text for text in drawn)
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
        draw(maps, maps.histogram(), maps.traced_rows(1))
