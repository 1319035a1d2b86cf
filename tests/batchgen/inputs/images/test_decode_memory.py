"""The memory of decoding is what its bound says, and bands of rows give the pixels of the whole."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from batchgen.inputs.images import decode_image as module
from batchgen.inputs.images.decode_image import MOST_PIXELS, decode_image, decoding_bytes
from batchgen.inputs.images.decode_memory import MOST_MEMORY, DecodeMemory
from batchgen.inputs.images.image_sizes import AreaSizes
from batchgen.inputs.images.image_sources import MOST_BYTES, ImageFolder, sources_of
from batchgen.inputs.images.row_images import RowImages
from tests.support.jobs.image_job import VISION

STATUS = Path("/proc/self/status")


def saved(image: Pillow.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def coloured(mode: str, height: int = 50, width: int = 70) -> Pillow.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Pillow.fromarray(values)
    if mode == "P":
        return image.convert("RGB").quantize(16)
    if mode == "I;16":
        return Pillow.fromarray(values[:, :, 0].astype(np.uint16) * 201)
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


TURNED = Pillow.Exif()
TURNED[0x0112] = 6
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "RGBA": ("RGBA", "PNG", {}), "turned": ("RGBA", "PNG", {"exif": TURNED}),
    "LA": ("LA", "PNG", {}), "L": ("L", "PNG", {}), "1": ("1", "PNG", {}),
    "palette": ("P", "PNG", {"transparency": 3}),
    "one colour": ("RGB", "PNG", {"transparency": (1, 2, 3)}),
    "16 bits": ("I;16", "TIFF", {}), "GIF": ("P", "GIF", {"transparency": 3}),
    "WebP": ("RGBA", "WEBP", {"exif": TURNED, "lossless": True}),
    "CMYK": ("CMYK", "JPEG", {"exif": TURNED}),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bands_give_the_pixels_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, file, options = KINDS[kind]
    data = saved(coloured(mode), file, **options)
    whole = decode_image(data, 32, 40)
    for pixels in (1, 70, 70 * 7, 70 * 50):
        monkeypatch.setattr(module, "_BAND_PIXELS", pixels)
        assert (decode_image(data, 32, 40) == whole).all()


@pytest.mark.quick(1)
@pytest.mark.skipif(not STATUS.exists(), reason="the most memory of a process is read from Linux")
@pytest.mark.parametrize("kind", ["RGBA", "WebP", "one colour", "turned"])
def test_decoding_takes_no_more_than_it_counts(kind: str) -> None:
    """Without bands, an image with transparency took up to 28 bytes a pixel."""

    def memory(name: str) -> int:
        (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) << 10

    mode, file, options = KINDS[kind]
    data = saved(coloured(mode, 20, 30).resize((2000, 3000), 0), file, **options)
    decode_image(saved(coloured(mode), file, **options), 32, 32)  # what is loaded once
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    decode_image(data, 32, 32)
    assert memory("VmHWM") - before <= decoding_bytes(3000, 2000)


def test_the_bound_has_room_for_the_largest_image() -> None:
    assert decoding_bytes(1, MOST_PIXELS) + MOST_BYTES <= MOST_MEMORY


def test_threads_hold_no_more_than_the_bound() -> None:
    memory, lock = DecodeMemory(100), threading.Lock()
    held, most, full = 0, 0, threading.Barrier(3)

    def work(size: int) -> None:
        nonlocal held, most
        with memory.hold(size):
            with lock:
                held += min(size, 100)
                most = max(most, held)
            if size == 33:
                full.wait(30)  # three of them are there at once
            with lock:
                held -= min(size, 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [33, 33, 33, *[80, 1000, 60, 50, 99, 2, 100] * 3]))
    assert held == 0 and 99 <= most <= 100


def test_an_error_gives_its_memory_back() -> None:
    memory = DecodeMemory(10)
    for _ in range(3):
        with pytest.raises(ValueError, match="bad"), memory.hold(10):
            raise ValueError("bad")


def test_images_of_rows_hold_what_their_headers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    images = RowImages(ImageFolder(None), AreaSizes(32, 4096, 4096, 1024), VISION.rules)
    sizes: list[int] = []

    @contextmanager
    def hold(size: int) -> Iterator[None]:
        sizes.append(size)
        yield

    monkeypatch.setattr(images._memory, "hold", hold)
    data = saved(coloured("RGBA", 64, 96), "PNG")
    (row,) = images.load(sources_of(data))
    row.image.load()
    images.close()
    assert sizes == [decoding_bytes(64, 96) + len(data)]
