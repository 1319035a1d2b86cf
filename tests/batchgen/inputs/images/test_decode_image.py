"""Images are sized as transformers sizes them, and decoded to the same bits."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.vision.vision_config import CLIP
from batchgen.inputs.images.decode_image import decode_image, image_size
from batchgen.inputs.images.image_sizes import AreaSizes, image_sizes
from batchgen.inputs.images.image_sources import ImageFolder, ImageSource
from batchgen.inputs.images.row_images import RowImages
from batchgen.util.errors import ConfigError
from tests.support.jobs.image_job import VISION, encoded, picture, save_model

SIDES = st.integers(1, 3000)


def flat(size: tuple[int, int], colour: Any, mode: str = "RGB") -> Pillow.Image:
    return Pillow.new(mode, size, colour)


def pixels(data: bytes) -> npt.NDArray[np.uint8]:
    return decode_image(data, *image_size(data))


@given(SIDES, SIDES, st.sampled_from([1, 3, 64, 1000]), st.sampled_from([3, 70, 1280, 16384]))
def test_sizes_are_those_of_transformers(height: int, width: int, least: int, most: int) -> None:
    least, most = min(least, most) * 1024, most * 1024
    rules = AreaSizes(32, most, most, least)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError) as error:
            rules.size(height, width)
        assert error.value.type == "bad_image_size"
        return
    expected = smart_resize(height, width, factor=32, min_pixels=least, max_pixels=most)
    assert rules.size(height, width) == expected
    assert rules.tokens(*expected) == math.prod(expected) // 1024


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(("width", "height"), [(640, 480), (97, 1201), (33, 31), (160, 96)])
def test_pixels_are_those_of_transformers(kind: str, width: int, height: int) -> None:
    """Values between the pixels and the model are equal to the bit, whatever must be scaled."""
    data = picture(width, height, kind, seed=width)
    size = {"shortest_edge": 4096, "longest_edge": 96 * 1024}
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=size
    )
    image: Pillow.Image = Pillow.open(io.BytesIO(data))
    theirs = processor(images=[image], return_tensors="np")
    rules = AreaSizes(32, 96 * 1024, 96 * 1024, 4096)
    own = decode_image(data, *rules.size(*image_size(data)))
    rows, columns = (length // 16 for length in own.shape[:2])
    assert theirs["image_grid_thw"].tolist() == [[1, rows, columns]]
    only = processor(images=[own], do_resize=False, return_tensors="np")
    assert np.array_equal(only["pixel_values"], theirs["pixel_values"])


def test_pictures_of_cameras_are_upright() -> None:
    """All eight orientations of EXIF, in JPEG, PNG and WebP; TIFF says it in a tag of its own."""
    upright = Pillow.fromarray(np.arange(32 * 48 * 3, dtype=np.uint8).reshape(32, 48, 3))
    for orientation in range(1, 9):
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        for kind, more in (("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
            data = encoded(upright, kind, exif=exif, **more)
            from PIL import ImageOps

            expected = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))))
            assert image_size(data) == expected.shape[:2]
            assert np.array_equal(pixels(data), expected), (kind, orientation)
    assert image_size(encoded(upright, "JPEG", exif=exif)) == (48, 32)


@pytest.mark.parametrize(
    ("name", "image", "kind", "expected"),
    [
        ("transparent", flat((4, 4), (255, 0, 0, 0), "RGBA"), "PNG", (255, 255, 255)),
        ("half", flat((4, 4), (0, 0, 0, 128), "RGBA"), "PNG", (127, 127, 127)),
        ("grey and alpha", flat((4, 4), (0, 0), "LA"), "PNG", (255, 255, 255)),
        ("palette", flat((4, 4), (10, 200, 30)).quantize(4), "PNG", (10, 200, 30)),
        ("grey", flat((4, 4), 77, "L"), "PNG", (77, 77, 77)),
        ("two colours", flat((4, 4), 1, "1"), "PNG", (255, 255, 255)),
        ("CMYK", flat((4, 4), (0, 255, 255, 0), "CMYK"), "TIFF", (255, 0, 0)),
        ("YCbCr", flat((4, 4), (200, 128, 128), "YCbCr"), "TIFF", (200, 200, 200)),
        ("16 bits", Pillow.fromarray(np.full((4, 4), 51200, np.uint16)), "PNG", (200, 200, 200)),
    ],
)
def test_colours_of_other_kinds(
    name: str, image: Pillow.Image, kind: str, expected: tuple[int, int, int]
) -> None:
    data = encoded(image, kind)
    if name == "YCbCr":
        try:
            Pillow.open(io.BytesIO(data)).load()
        except OSError:
            pytest.skip("this version of Pillow cannot read what it wrote")
    found = pixels(data)
    assert found.shape == (4, 4, 3) and found.dtype == np.uint8
    assert tuple(found[1, 2].tolist()) == expected, name


def test_a_colour_that_is_transparent_and_the_first_frame_of_several() -> None:
    image = flat((4, 4), (1, 2, 3))
    image.putpixel((0, 0), (9, 9, 9))
    found = pixels(encoded(image, "PNG", transparency=(9, 9, 9)))
    assert found[0, 0].tolist() == [255] * 3 and found[1, 1].tolist() == [1, 2, 3]
    frames = [flat((8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        red, green, _ = pixels(data)[3, 3].tolist()
        assert red > 240 and green < 16, kind


def test_values_that_are_no_colours_are_refused() -> None:
    for mode in ("I", "F"):
        with pytest.raises(RequestError) as error:
            pixels(encoded(flat((4, 4), 7, mode), "TIFF"))
        assert error.value.type == "bad_image" and "32 bits" in str(error.value)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"image_mean": [0.48, 0.45, 0.40]}, "image_mean"),
        ({"resample": 2}, "resample"),
        ({"do_resize": False}, "do_resize"),
        ({"patch_size": 14}, "14 pixels"),
        ({"size": {"shortest_edge": 9, "longest_edge": 4}}, "the first not the larger"),
        ({"size": {"shortest_edge": 9, "longest_edge": "many"}}, "the first not the larger"),
    ],
)
def test_a_processor_of_another_kind_is_refused(
    says: dict[str, Any], why: str, tmp_path: Path
) -> None:
    save_model(tmp_path, **says)
    with pytest.raises(ConfigError, match=why):
        image_sizes(tmp_path, VISION, None)


def test_a_model_has_its_own_colours(tmp_path: Path) -> None:
    save_model(tmp_path, image_mean=[*CLIP.mean], image_std=[*CLIP.std])
    assert image_sizes(tmp_path, replace(VISION, colours=CLIP), None).side == 32
    with pytest.raises(ConfigError, match=r"image_mean=\[0\.48.*supported: \[0\.5"):
        image_sizes(tmp_path, VISION, None)


def test_what_a_job_allows_is_at_most_what_the_model_does(tmp_path: Path) -> None:
    save_model(tmp_path, size={"shortest_edge": 65536, "longest_edge": 16777216})
    assert image_sizes(tmp_path, VISION, None) == AreaSizes(32, 1280 * 1024, 16777216, 65536)
    assert image_sizes(tmp_path, VISION, 10**9).max_pixels == 16777216
    assert image_sizes(tmp_path, VISION, 4096) == AreaSizes(32, 4096, 16777216, 4096)
    with pytest.raises(ConfigError, match="less than one token"):
        image_sizes(tmp_path, VISION, 1023)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        image_sizes(tmp_path, VISION, None)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1024, 4096, 65536]))
def test_no_image_is_taken_for_another(seed: int, most: int) -> None:
    """A byte of the file, the limits and the version of Pillow are in the digest, by which the
    engine knows an image; the same file has the same one, also under a name."""
    sizes = AreaSizes(32, most, 65536, 1024)
    data = picture(64, 64, "BMP", seed=seed)
    at = 60 + seed % (len(data) - 60)
    changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def digest(data: bytes, sizes: AreaSizes, name: str | None = None) -> bytes:
        images = RowImages(ImageFolder(None), sizes, VISION.rules, 1)
        try:
            return images.load([ImageSource(data, name)])[0].image.digest
        finally:
            images.close()

    found = digest(data, sizes)
    assert found == digest(data, sizes, "name.bmp")
    others = [digest(changed, sizes), digest(data, replace(sizes, max_pixels=most - 1024 + 1))]
    with patch("batchgen.inputs.images.row_images.pillow_version", lambda: "0"):
        others.append(digest(data, sizes))
    assert found not in others and len(set(others)) == 3
