"""Small pictures (thumbnails) of a job's images, which its pages show. The rows of a job have only
the digests of their images.

Each worker writes a file in the folder THUMBNAILS of the job, such as 00000.json. It is an object
that maps the digests of images' files to JPEG files in base64: `{"91f0…": "/9j/4AAQ…"}`.
"""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.storage.leases.job_files import THUMBNAILS
from batchgen.storage.stores.job_storage import Storage

if TYPE_CHECKING:
    from batchgen.engine.vision.image import Pixels

SIDE = 112
"""The most pixels of a side."""
MOST_BYTES = 3 << 20
"""The most bytes of base64 that one worker keeps; the first images are kept."""
_MOST_EACH = 16 << 10
"""The most bytes of base64 of one picture."""
_JPEG = re.compile(r"/9j/[A-Za-z0-9+/]*={0,2}", re.ASCII)
"""Base64 of a file that begins as a JPEG file does."""
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
"""The digest of an image's file (`RowImage.file_digest`)."""


class Thumbnails:
    """Makes small pictures of images when they are decoded. Thread-safe."""

    def __init__(self) -> None:
        self._pictures: dict[str, str] = {}  # base64 by digest
        self._size = 0  # bytes of all pictures together
        self._is_new = False
        self._lock = threading.Lock()

    def add(self, digest: str, pixels: Pixels) -> None:
        """Store a picture of an image, unless there is one already or MOST_BYTES are reached."""
        if digest in self._pictures or self._size >= MOST_BYTES:
            return
        from PIL import Image

        image = Image.fromarray(pixels)
        image.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=75)
        self._keep(digest, base64.b64encode(file.getvalue()).decode())

    def save(self, storage: Storage, worker: int) -> None:
        """Write the worker's file, with its earlier contents, if there are new pictures."""
        if not self._is_new:
            return
        path = storage.path / THUMBNAILS / f"{worker:05}.json"
        for digest, text in _read(storage.read(path)).items():
            self._keep(digest, text)
        with self._lock:
            self._is_new = False
            text = json.dumps(self._pictures, indent=0)
        storage.make_folder(path.parent)
        storage.write(path, text)

    def _keep(self, digest: str, text: str) -> None:
        """Store a picture (base64), unless it is too large or there is one with this digest."""
        with self._lock:
            if digest not in self._pictures and len(text) <= _MOST_EACH:
                self._pictures[digest] = text
                self._size += len(text)
                self._is_new = True


def read_thumbnails(folder: Path) -> dict[str, str]:
    """Read the pictures in a job's folder: base64 of JPEG files, by the images' digests. Damaged
    entries are left out."""
    thumbnails: dict[str, str] = {}
    below = folder / THUMBNAILS
    files = sorted(below.glob("*.json")) if below.is_dir() and not below.is_symlink() else []
    for file in files:
        if file.is_file() and not file.is_symlink() and file.stat().st_size <= 2 * MOST_BYTES:
            thumbnails |= _read(file.read_bytes())
    return thumbnails


def _read(content: bytes | None) -> Mapping[str, str]:
    """Return the valid entries of a worker's file; None is a file that does not exist."""
    try:
        values = json.loads(content or b"{}")
    except ValueError:
        return {}
    if not isinstance(values, dict):
        return {}
    return {
        digest: text
        for digest, text in values.items()
        if _DIGEST.fullmatch(digest)
        and isinstance(text, str)
        and len(text) <= _MOST_EACH
        and _JPEG.fullmatch(text)
    }
