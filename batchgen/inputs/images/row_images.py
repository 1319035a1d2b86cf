"""Prepares the images of rows for the engine and the output: sizes, token counts, digests and
decoding. `RowImages` is the entry point, which prompts use.

A chat template writes one *mark* (a special token) for each image into the prompt. `marked` and
`expanded` turn each mark into as many image tokens as the image takes in the model.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from batchgen.engine.device.host_limits import usable_cores
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.vision.image import DIGEST_BYTES, Image, Pixels
from batchgen.engine.vision.image_span import ImageRules
from batchgen.inputs.images.decode_ahead import DecodeAhead
from batchgen.inputs.images.decode_image import (
    decode_image,
    decoding_bytes,
    image_size,
    pillow_version,
)
from batchgen.inputs.images.decode_memory import DecodeMemory
from batchgen.inputs.images.image_sizes import ImageSizes
from batchgen.inputs.images.image_sources import ImageFolder, ImageSource
from batchgen.inputs.images.thumbnails import Thumbnails

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_DIGEST_BYTES = 16
"""The length of the digest of an image's file, which output rows and thumbnails contain."""
MOST_IMAGES = 32
"""The most images of a row if `prompt.max_images` is not set."""
_DATA_URL = re.compile(r"(data:image\\?/[\w.+-]{1,40});base64,([\w+/\\-]*={0,2})", re.ASCII)
"""A data: URL; JSON may write a slash with a backslash."""


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image of a row, for the engine and for the output.

    Attributes:
        image: the image for the engine, which is decoded when it is needed.
        tokens: the number of tokens that it takes.
        path: its name in the row; None without one.
        file_digest: the digest of its file's bytes, in hex digits.
    """

    image: Image
    tokens: int
    path: str | None
    file_digest: str

    @property
    def reference(self) -> dict[str, Any]:
        """The entry of the image in the output column."""
        return {
            "path": self.path,
            "digest": self.file_digest,
            "width": self.image.width,
            "height": self.image.height,
            "tokens": self.tokens,
        }


class RowImages:
    """Makes images for the engine from those that rows name.

    Args:
        folder: reads the files that rows name.
        sizes: the sizes to which the model resizes images.
        rules: the tokens around and for an image in prompts.
        limit: the most images of a row.

    Attributes:
        thumbnails: small pictures of the images that were decoded.
        image_token_id: the token that is repeated in a prompt as often as an image has tokens.
        fingerprint: a digest of everything besides an image's file that decides its pixels.
    """

    def __init__(
        self,
        folder: ImageFolder,
        sizes: ImageSizes,
        rules: ImageRules,
        limit: int = MOST_IMAGES,
    ) -> None:
        self._folder, self._sizes, self._limit = folder, sizes, limit
        self.thumbnails = Thumbnails()
        self.image_token_id = rules.image_token_id
        self._rules = rules
        self.fingerprint = sizes.fingerprint(pillow_version())
        threads = min(8, usable_cores())
        self._memory = DecodeMemory()
        self._ahead = DecodeAhead(threads, max(16, 2 * threads))
        self._user_informed = False

    def tokens(self, sources: Sequence[ImageSource]) -> list[int]:
        """Return how many tokens each image takes, reading only the headers of the files.

        Raises:
            RequestError: there are too many images (`too_many_images`), or one cannot be read.
        """
        self._check_count(sources)
        return [
            self._sizes.tokens(*self._sizes.size(*self._original_size(source)))
            for source in sources
        ]

    def load(self, sources: Sequence[ImageSource]) -> list[RowImage]:
        """Return the images, which are decoded later. Raises RequestError as `tokens` does."""
        self._check_count(sources)
        return [self._load(source) for source in sources]

    def file_digests(self, sources: Sequence[ImageSource]) -> list[str]:
        """Return the digests of the files that a row names. Images inside the row have none."""
        return [_digest(self._folder.read(name)) for name in file_names(sources)]

    def file_stamps(self, sources: Sequence[ImageSource]) -> list[str]:
        """Return name, size and modification time of each file that a row names."""
        stats = ((name, self._folder.find(name).stat()) for name in file_names(sources))
        return [f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in stats]

    @property
    def mark_id(self) -> int:
        """The token that a chat template writes for an image."""
        mark = self._rules.mark_id
        return self._rules.image_token_id if mark is None else mark

    def marked(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """Replace each image mark of the chat template in a prompt by the texts of the start, image
        and end tokens, if the model has a token of its own as mark."""
        rules = self._rules
        if rules.mark_id is None:
            return text
        ids = (rules.start_token_id, rules.image_token_id, rules.end_token_id)
        whole = "".join(str(tokenizer.decode([token])) for token in ids)
        whole = f"{rules.margin}{whole}{rules.margin}"
        return text.replace(str(tokenizer.decode([rules.mark_id])), whole)

    def expanded(self, ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Repeat the image token of each image in a prompt as often as the image has tokens.

        Raises:
            RequestError: the number of image tokens differs from that of images, for example
                because a text contains one (`bad_images`).
        """
        marks = ids.count(self.image_token_id)
        if marks != len(tokens):
            raise RequestError(
                "bad_images",
                f"the chat template wrote {marks} image placeholders for the row's {len(tokens)} "
                "images: either a text of the row contains the model's image token, or the "
                "template leaves images out",
            )
        counts, expanded = iter(tokens), list[int]()
        for token in ids:
            expanded += [token] * (next(counts) if token == self.image_token_id else 1)
        return expanded

    def close(self) -> None:
        """Stop decoding."""
        self._ahead.close()

    def _check_count(self, sources: Sequence[ImageSource]) -> None:
        if len(sources) > self._limit:
            raise RequestError(
                "too_many_images",
                f"the row has {len(sources)} images, and at most {self._limit} are read: raise "
                "prompt.max_images",
            )

    def _original_size(self, source: ImageSource) -> tuple[int, int]:
        """Return the original height and width of an image."""
        if source.data is not None:
            return image_size(source.data)
        assert source.path is not None
        path = self._folder.find(source.path)
        try:
            with path.open("rb") as file:
                return image_size(file)
        except OSError as error:
            raise RequestError(
                "image_not_found", f"{source.path} cannot be read: {error.strerror}"
            ) from None

    def _load(self, source: ImageSource) -> RowImage:
        """Read an image's file for its size and digests, and queue it for decoding."""
        data = source.data
        if data is None:
            assert source.path is not None
            data = self._folder.read(source.path)
        size = image_size(io.BytesIO(data))
        self._tell(*size)
        height, width = self._sizes.size(*size)
        key = blake2b(data, digest_size=DIGEST_BYTES)  # equal for equal pixels, for caches
        key.update(f"{self.fingerprint} {height} {width}".encode())
        file_digest = _digest(data)
        read = self._reader(source, file_digest)
        memory = decoding_bytes(*size) + len(data)
        decode = partial(self._decode, read, height, width, file_digest, memory)
        image = Image(self._ahead.add(decode), height, width, key.digest())
        tokens = self._sizes.tokens(height, width)
        return RowImage(image, tokens, source.path, file_digest)

    def _reader(self, source: ImageSource, file_digest: str) -> Callable[[], bytes]:
        """Return a function that reads the image's bytes again for decoding, so that waiting rows
        hold no files in memory."""
        if (data := source.data) is not None:
            return lambda: data
        name, folder = source.path, self._folder
        assert name is not None

        def read() -> bytes:
            content = folder.read(name)
            if _digest(content) != file_digest:
                raise RequestError("bad_image", f"{name} has changed while the job ran")
            return content

        return read

    def _decode(
        self, read: Callable[[], bytes], height: int, width: int, file_digest: str, memory: int
    ) -> Pixels:
        with self._memory.hold(memory):
            pixels = decode_image(read(), height, width, self._sizes.resampling)
            self.thumbnails.add(file_digest, pixels)
            return pixels

    def _tell(self, height: int, width: int) -> None:
        """Tell the user once that images are scaled down, at the first one, which has this original
        size."""
        if self._user_informed or not self._sizes.scales_down(height, width):
            return
        self._user_informed = True
        limit = self._sizes.max_pixels
        print(
            f"batchgen: an image of {width}×{height} pixels is scaled down to at most {limit:,} "
            f"pixels ({limit // self._sizes.side**2:,} tokens), and so are others: "
            f"prompt.max_pixels says how many, and this model takes up to "
            f"{self._sizes.most_of_model:,}",
            file=sys.stderr,
            flush=True,
        )


def file_names(sources: Sequence[ImageSource]) -> list[str]:
    """Return the names of the files among the images of a row."""
    return [each.path for each in sources if each.data is None and each.path is not None]


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=FILE_DIGEST_BYTES).hexdigest()


def without_pixels(value: Any) -> Any:
    """Return the value, with the digest in place of the bytes of each data: URL of an image, at any
    depth and within any text, so that no pixels are written to the output:
    `data:image/png;base64,iVBO…` → `data:image/png;blake2b=91f0…`."""
    if isinstance(value, str):
        return _DATA_URL.sub(_short_url, value) if "data:image" in value else value
    if isinstance(value, Mapping):
        return {key: without_pixels(item) for key, item in value.items()}
    return [without_pixels(item) for item in value] if isinstance(value, list) else value


def _short_url(match: re.Match[str]) -> str:
    return f"{match[1]};blake2b={_digest(match[2].encode())}"
