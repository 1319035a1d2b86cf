"""Jobs whose rows have images: from the data set to Parquet, without an engine that computes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from batchgen.util.errors import ConfigError
from tests.support.jobs.image_job import (
    DecodingEngine,
    arguments,
    encoded,
    opened,
    picture,
    run,
    write_rows,
)
from tests.support.jobs.real_job import run as run_real

HF = b'{"info": {"features": {"image": {"_type": "Image"}}}}'


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out / "data", partitioning=None).to_pylist()
    return rows


SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in ("struct", "binary", "template")]


@pytest.mark.quick(2)
@pytest.mark.parametrize("form", ["hf", "list", "path", "data", *SLOW])
def test_images_of_a_column_in_every_form(form: str, vl_model: Path, tmp_path: Path) -> None:
    """Two rows, of 64×32 and 96×64 pixels; none of the forms writes pixels to the output."""
    data = [picture(64, 32), picture(96, 64, "JPEG", seed=1)]
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    for index, each in enumerate(data):
        (folder / "sub" / f"{index}.img").write_bytes(each)
    paths = [f"sub/{index}.img" for index in range(2)]
    structs = [{"bytes": each, "path": path} for each, path in zip(data, paths, strict=True)]
    values: dict[str, Any] = {
        "struct": structs, "hf": structs, "binary": data, "list": [[each] for each in structs],
        "path": paths, "data": [data_url(each) for each in data],
        "template": ["0", "1"],
    }  # fmt: skip
    table = pa.table({"question": ["What?", "Who?"], "image": values[form]})
    if form == "hf":
        table = table.replace_schema_metadata({b"huggingface": HF})
    name = "number" if form == "template" else "image"
    pq.write_table(table.rename_columns(["question", name]), folder / "rows.parquet")
    more = ["prompt.images=[sub/{{number}}.img]"] if form == "template" else []
    engine = DecodingEngine()
    result = run(arguments(vl_model, folder / "rows.parquet", tmp_path / "out", *more), engine)
    assert result.exit_code == 0
    rows = rows_of(tmp_path / "out")
    assert [row["text"] for row in rows] == ["[(32, 64, 3)]", "[(64, 96, 3)]"]
    references = [image for row in rows for image in row["prompt_images"]]
    assert [(r["width"], r["height"], r["tokens"]) for r in references] == [
        (64, 32, 2),
        (96, 64, 6),
    ]
    assert len({r["digest"] for r in references}) == 2
    named = form not in ("binary", "data")
    expected = [f"sub/{i}.img" for i in range(2)] if named else [None, None]
    assert [r["path"] for r in references] == expected
    kept = {"path": paths, "template": ["0", "1"]}
    if form in kept:
        assert [row[name] for row in rows] == kept[form]
    elif form != "data":
        assert "image" not in rows[0]
    else:
        assert all(len(row["image"]) < 70 for row in rows)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["attempts"][0]
    assert (metrics["images"], metrics["image_tokens"]) == (2, 8)


def test_conversations_with_parts(vl_model: Path, tmp_path: Path) -> None:
    """OpenAI's and HuggingFace's parts; those without a source take the row's own images."""
    (tmp_path / "a.png").write_bytes(picture(32, 32, seed=3))
    url = {"url": data_url(picture(64, 64))}
    openai = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "Hi"}]
    path = [{"type": "image", "path": "a.png"}, {"text": "Hi"}]
    free = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "image"}]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": openai}]},
        {"messages": [{"role": "user", "content": path}]},
        {
            "messages": [{"role": "user", "content": free}],
            "images": ["a.png", f"file://{tmp_path}/a.png"],
        },
        {"messages": [{"role": "user", "content": "text alone"}]},
        {"messages": [{"role": "user", "content": "before"}], "images": ["a.png"]},
        {"messages": [{"role": "user", "content": free}], "images": ["a.png"]},
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    given = arguments(vl_model, file, tmp_path / "out", "prompt=messages")
    assert run(given).exit_code == 3
    found = rows_of(tmp_path / "out")
    sizes = ["[(64, 64, 3)]", "[(32, 32, 3)]", "[(32, 32, 3), (32, 32, 3)]", "[]", "[(32, 32, 3)]"]
    assert [row["text"] for row in found] == [*sizes, None]
    assert found[-1]["error"]["type"] == "bad_images" and found[-1]["prompt_images"] is None
    assert found[3]["prompt_images"] == []
    text = json.dumps(found[0]["messages"])
    assert "base64" not in text and "blake2b=" in text
    assert max(f.stat().st_size for f in (tmp_path / "out" / "data").iterdir()) < 40_000


@pytest.mark.thorough
def test_bodies_of_openai_and_conversations_that_begin_without_images(
    vl_model: Path, tmp_path: Path
) -> None:
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture(64, 96))}}]
    contents: list[Any] = ["Hi", [*parts, {"type": "text", "text": "What?"}]]
    messages = [[{"role": "user", "content": content}] for content in contents]
    for prompt, key in (("openai", "body"), ("messages", "messages")):
        rows = [{key: {"messages": m} if key == "body" else m} for m in messages]
        file = write_rows(tmp_path / f"{key}.jsonl", rows)
        assert run(arguments(vl_model, file, tmp_path / key, f"prompt={prompt}")).exit_code == 0
        found = rows_of(tmp_path / key)
        assert [row["text"] for row in found] == ["[]", "[(96, 64, 3)]"]
        assert "base64" not in json.dumps(found[1][key])


@pytest.mark.thorough
def test_rows_do_not_depend_on_how_the_job_was_run(vl_model: Path, tmp_path: Path) -> None:
    """A real engine: one after the other, in a batch, and grown by a second run; two images of
    which one pixel differs, the same image twice, and rows without images are among the rows."""
    values = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    other = values.copy()
    other[0, 0, 0] ^= 1
    one, two = (encoded(Pillow.fromarray(each)) for each in (values, other))
    images = [[one], [two], [], [one, two], [two, one], [one], [picture(32, 160)], [one, one]]
    table = pa.table({"question": ["Hi"] * 8, "images": images})
    pq.write_table(table, tmp_path / "r.parquet")
    more = ["output.columns=[logprobs]", "engine.kv_cache_gib=0.01", "output.rows_per_shard=4"]
    runs = {
        "one": ["engine.max_num_seqs=1"],
        "batch": ["engine.max_batched_tokens=32"],
        "grown": [],
    }
    for name, own in runs.items():
        given = arguments(vl_model, tmp_path / "r.parquet", tmp_path / name, *more, *own)
        if name == "grown":
            assert run_real([*given, "dataset.limit=3"]).exit_code == 0
        assert run_real(given).exit_code == 0
    found = {name: rows_of(tmp_path / name) for name in runs}
    assert found["one"] == found["batch"] == found["grown"]
    logprobs = [row["logprobs"] for row in found["one"]]
    assert logprobs[0] == logprobs[5] != logprobs[1]
    assert len({tuple(each) for each in logprobs}) == 7


def test_prompts_have_as_many_tokens_as_the_images(vl_model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [{"question": "<|image_pad|>", "image": "a"}])
    (tmp_path / "a").write_bytes(picture(96, 64))
    parts = opened(arguments(vl_model, rows, tmp_path / "out"), DecodingEngine())
    assert run(arguments(vl_model, rows, tmp_path / "out")).exit_code == 3
    (row,) = rows_of(tmp_path / "out")
    assert row["error"]["type"] == "bad_images"  # the text has a mark of its own
    (first,) = parts.source.rows()
    good = type(first)(0, "0", {**first.fields, "question": "Hi"})
    assert "<|vision_start|><|image_pad|><|vision_end|>Hi" in (parts.prompt.text(good) or "")
    ids = parts.prompt.token_ids(good)
    assert ids.count(261) == 6 and ids.index(261) == 7


def test_a_changed_file_is_a_changed_row(vl_model: Path, tmp_path: Path) -> None:
    """Also where the data set names it only, and in which a resumed job is refused for it."""
    names = [{"question": "Hi", "image": f"{i}.png"} for i in range(3)]
    rows = write_rows(tmp_path / "rows.jsonl", names)
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture(seed=i))
    given = arguments(vl_model, rows, tmp_path / "out")
    assert run(given).exit_code == 0
    assert run(given).exit_code == 0  # it is complete
    (tmp_path / "1.png").write_bytes(picture(seed=9))
    with pytest.raises(ConfigError, match="dataset"):
        run(given)
    (tmp_path / "1.png").write_bytes(picture(seed=1))
    assert run(given).exit_code == 0
    with pytest.raises(ConfigError, match="max_pixels"):
        run([*given, "prompt.max_pixels=1024"])


@pytest.mark.parametrize(
    ("more", "rows", "why"),
    [
        (["prompt.image_column=image"], {"question": "", "image": "a.png"}, "prompt.image_column"),
        (["prompt.images=[a.png]"], {"question": ""}, "prompt.images"),
        (
            ["prompt=messages"],
            {"messages": [{"role": "user", "content": [{"type": "image", "path": "a"}]}]},
            "have images",
        ),
    ],
)
def test_a_model_of_text_is_refused_before_weights_load(
    model: Path, tmp_path: Path, more: list[str], rows: dict[str, Any], why: str
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [rows])
    with pytest.raises(ConfigError, match=why) as error:
        opened(arguments(model, file, tmp_path / "out", *more), DecodingEngine())
    assert "reads no images" in str(error.value) and str(model) in str(error.value)


def test_large_images_are_scaled_down_with_a_word(
    vl_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "Hi", "image": "a"}] * 2)
    (tmp_path / "a").write_bytes(picture(128, 128))
    run(arguments(vl_model, rows, tmp_path / "out", "prompt.max_pixels=4096"))
    assert [row["text"] for row in rows_of(tmp_path / "out")] == ["[(64, 64, 3)]"] * 2
    said = capsys.readouterr().err
    assert said.count("prompt.max_pixels") == 1 and "4 tokens" in said
