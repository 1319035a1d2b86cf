"""Bad pictures become rows with errors, and the job goes on; what is outside is never read."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.images.decode_image import decode_image, image_size
from batchgen.inputs.images.image_sources import ImageFolder, sources_of
from tests.support.jobs.gemma_job import save_gemma
from tests.support.jobs.image_job import DecodingEngine, arguments, encoded, picture, run

SECRET = "secret.png"


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that claims a size, whatever its rows are."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    )


def flipped(data: bytes, seed: int) -> bytes:
    """The bytes with some in the middle of the compressed pixels changed."""
    at = len(data) // 2 + seed
    return data[:at] + bytes(255 - byte for byte in data[at : at + 40]) + data[at + 40 :]


KINDS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "cut PNG": ("bad_image", lambda i: picture(64, 64, seed=i)[: 300 + 200 * i]),
    "cut JPEG": ("bad_image", lambda i: picture(64, 64, "JPEG", seed=i)[: 700 + 50 * i]),
    "cut WebP": ("bad_image", lambda i: picture(64, 64, "WEBP", seed=i)[: 100 + 200 * i]),
    "cut GIF": ("bad_image", lambda i: picture(64, 64, "GIF", seed=i)[: 900 + 50 * i]),
    "header alone": ("bad_image", lambda i: picture(64, 64)[: 33 + i]),
    "damaged": ("bad_image", lambda i: flipped(picture(64, 64, seed=i), i)),
    "no image": ("bad_image", lambda i: b"no image, but some text " * (i + 1)),
    "empty": ("bad_image", lambda i: b""),
    "bomb": ("bad_image", lambda i: png(60_000, 60_000 + i)),
    "another format": ("bad_image", lambda i: encoded(Pillow.new("RGB", (32, 32)), "PPM")),
    "a program": ("bad_image", lambda i: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
    "32 bits": ("bad_image", lambda i: encoded(Pillow.new("F", (32, 32)), "TIFF")),
    "no base64": ("bad_image", lambda i: f"data:image/png;base64,{'?' * (i + 1)}"),
    "long": ("bad_image_size", lambda i: picture(1, 201 + i)),
    "zero": ("bad_image", lambda i: png(0, 64 + i)),
    "URL": ("image_url", lambda i: ("https", "http", "ftp", "s3", "HTTPS")[i] + "://x.y/a.png"),
    "missing": ("image_not_found", lambda i: f"none/{i}.png"),
    "a folder": ("image_not_found", lambda i: (".", "", "a\0b", "sub", "fifo")[i]),
    "outside": (
        "image_not_allowed",
        lambda i: (f"../{SECRET}", "/etc/passwd", "file:///etc/passwd", "link", "sub/up/x")[i],
    ),
    "too many": ("too_many_images", lambda i: [picture(32, 32)] * (5 + i)),
    "too long": ("prompt_too_long", lambda i: [picture(256, 256, seed=i)] * 4),
}


def source(value: Any) -> list[dict[str, Any]]:
    values = value if isinstance(value, list) else [value]
    return [
        {"bytes": each, "path": None} if isinstance(each, bytes) else {"bytes": None, "path": each}
        for each in values
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4", "gemma3"])
def test_a_hundred_bad_pictures(family: str, vl_model: Path, tmp_path: Path) -> None:
    """Five of each kind stand among good ones; each has its error, and the good ones answers.
    Gemma scales long pictures, too."""
    model, engine, kinds = vl_model, DecodingEngine(), KINDS
    if family != "qwen3_vl":
        model, engine = save_gemma(tmp_path / "model", family), DecodingEngine(side=8)
        kinds = {name: kind for name, kind in KINDS.items() if name != "long"}
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / SECRET).write_bytes(picture())
    os.symlink(tmp_path / SECRET, folder / "link")
    os.symlink("..", folder / "sub" / "up")
    os.symlink(tmp_path, folder / "sub" / "out")
    os.mkfifo(folder / "fifo")
    bad = [(name, kind, make(i)) for i in range(5) for name, (kind, make) in kinds.items()]
    bad = [each if each[2] != "sub/up/x" else (*each[:2], f"sub/out/{SECRET}") for each in bad]
    assert len(bad) >= 100 and len(kinds) >= 20
    values = [source(value) for _, _, value in bad]
    good = {3, 50, len(bad)}
    for place in sorted(good):
        values.insert(place, source(picture(64, 32)))
    questions = ["What?"] * len(values)
    pq.write_table(pa.table({"question": questions, "images": values}), folder / "r.parquet")
    given = arguments(model, folder / "r.parquet", tmp_path / "out", "prompt.max_images=4")
    if family == "gemma3":  # whose images are all of 16 tokens
        given.append("engine.max_model_len=90")
    assert run(given, engine).exit_code == 3
    table = pq.read_table(tmp_path / "out" / "data", partitioning=None)
    rows = table.select(["row_index", "text", "error"]).to_pylist()
    assert [row["row_index"] for row in rows] == list(range(len(values)))
    failed = [row for row in rows if row["error"] is not None]
    assert {row["row_index"] for row in rows if row["error"] is None} == good
    found = [(name, row["error"]["type"]) for (name, *_), row in zip(bad, failed, strict=True)]
    assert found == [(name, kind) for name, kind, _ in bad]
    # What a row says is the same on every machine.
    assert all(str(tmp_path) not in row["error"]["message"] for row in failed)


def test_another_root_is_the_users_word(vl_model: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "a.png").write_bytes(picture())
    table = pa.table({"question": ["a", "b"], "image": ["a.png", str(tmp_path / "a.png")]})
    pq.write_table(table, tmp_path / "set" / "r.parquet")
    given = arguments(vl_model, tmp_path / "set" / "r.parquet", tmp_path / "out")
    assert run([*given, f"prompt.image_root={tmp_path}"]).exit_code == 0


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_any_damage_is_an_error_of_the_row(kind: str) -> None:
    """Cut at every length and changed at any place: pixels, or a RequestError and nothing else."""
    data = picture(12, 9, kind)
    step = max(1, len(data) // 60)
    damaged = [data[:end] for end in range(0, len(data), step)]
    for at in range(0, len(data), step):
        damaged.append(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    errors = 0
    for each in damaged:
        try:
            height, width = image_size(each)
            assert decode_image(each, min(height, 64), min(width, 64)).dtype == "uint8"
        except RequestError as error:
            errors += 1
            assert error.type == "bad_image"
    assert errors > len(damaged) // 4


def test_a_folder_holds_its_files_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"1")
    (tmp_path / "rootless").write_bytes(b"2")  # its path begins with the root's
    folder = ImageFolder(root)
    assert folder.read("a") == folder.read(str(root / "a")) == folder.read("./x/../a") == b"1"
    for name in (
        "../rootless",
        str(tmp_path / "rootless"),
        "..",
        "/dev/zero",
        "/proc/self/environ",
    ):
        with pytest.raises(RequestError) as error:
            folder.read(name)
        assert error.value.type == "image_not_allowed", name
    with pytest.raises(RequestError, match=r"prompt\.image_root"):
        ImageFolder(None).read("a")


def test_what_names_an_image() -> None:
    one = base64.b64encode(b"abc").decode()
    assert sources_of(f"data:image/png;charset=x;base64,{one}")[0].data == b"abc"
    assert sources_of("file:///a%20b.png")[0].path == "/a b.png"
    assert sources_of({"bytes": None, "path": None}) == sources_of(None) == []
    assert len(sources_of([b"a", {"bytes": b"b", "path": "b.png"}, ["c"]])) == 3
    for bad in (1, {"x": 1}, 2.5, [[True]]):
        with pytest.raises(RequestError, match="an image is bytes"):
            sources_of(bad)
    for address in ("http://a/b", "data:image/png,abc", "file://host/a", "gs://b/c"):
        with pytest.raises(RequestError) as error:
            sources_of(address)
        assert error.value.type == "image_url"
