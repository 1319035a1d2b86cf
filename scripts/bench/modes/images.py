"""The mode images of bench_engine.py: rows with a picture each, as a job gives them."""

from __future__ import annotations

import argparse
import io
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from floors import floor_seconds, tower_flops
from measuring import Rates, measure_rates, synchronize
from modes.engine_runs import Bench
from PIL import Image as Pillow
from shapes import MODELS
from workloads import BenchRequest, prompt_vocab

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.step_timing import StepTime
from batchgen.engine.images.image import Image, Pixels
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.images.image_sizes import DEFAULT_TOKENS, ImageSizes
from batchgen.images.image_sources import ImageFolder, ImageSource
from batchgen.images.row_images import RowImages

_PHOTOS = 32
"""How many different photos are drawn; the rows' files of one photo differ behind its end."""


def photo(width: int, height: int, seed: int) -> bytes:
    """A JPEG file with smooth colours and some noise, about as large as a photo's."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), np.uint8)
    image = Pillow.fromarray(small).resize((width, height), Pillow.Resampling.BICUBIC)
    values = np.asarray(image, np.int16) + draw.integers(-12, 13, (height, width, 3))
    file = io.BytesIO()
    Pillow.fromarray(values.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def files(photos: Sequence[bytes], count: int) -> Iterator[bytes]:
    """Different files of these photos: nobody reads what stands behind the end of one."""
    for number in range(count):
        yield photos[number % len(photos)] + number.to_bytes(4, "big")


class PictureRow(NamedTuple):
    """What a job knows of a row before it is its turn."""

    file: bytes
    text: list[int]


@dataclass(slots=True)
class Loading:
    """The seconds in which the engine waited for pixels, since this was last asked."""

    seconds: float = 0.0

    def watched(self, image: Image) -> Image:
        """Return the image, whose pixels are given at the same time as without this."""
        return replace(image, pixels=partial(self._load, image))

    def _load(self, image: Image) -> Pixels:
        start = time.perf_counter()
        pixels = image.load()
        self.seconds += time.perf_counter() - start
        return pixels

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class PictureRun(NamedTuple):
    """What a run of rows took, in seconds of the clock and of the device."""

    seconds: float
    prompt_lens: list[int]
    steps: list[StepTime]
    loading: list[float]  # how long the host waited for pixels before each step
    tower: float

    @property
    def waited(self) -> float:
        """Seconds in which the device had nothing to do because the host waited for pixels."""
        pairs = zip(self.steps, self.loading, strict=True)
        return sum(min(step.idle_before, loading) for step, loading in pairs)

    @property
    def figures(self) -> dict[str, float]:
        busy = sum(step.seconds for step in self.steps)
        rows = len(self.prompt_lens)
        return {
            "seconds": self.seconds,
            "rows_per_s": rows / self.seconds,
            "steps": len(self.steps),
            "busy_seconds": busy,
            "tower_seconds": self.tower,
            "tower_share": self.tower / busy,
            "idle_seconds": sum(step.idle_before for step in self.steps),
            "host_loading_seconds": sum(self.loading),
            "waited_seconds": self.waited,
            "waited_share": self.waited / self.seconds,
        }


class PictureRows:
    """Gives rows with pictures to an engine as a job does, whose code reads the files.

    As many rows are queued as a job queues, and the job layer's threads decode their pictures.
    """

    def __init__(self, bench: Bench, params: SamplingParams, sizes: ImageSizes) -> None:
        engine, vision = bench.engine, bench.model_config.vision
        assert engine.images is not None and vision is not None
        self._engine, self._params, self._loading = engine, params, Loading()
        self._store, self._timer, self._rules = engine.images, bench.timer, vision.rules
        self._images = RowImages(ImageFolder(None), sizes, self._rules.image_token_id, most=1)

    def run(self, rows: Sequence[PictureRow]) -> PictureRun:
        """Run rows to their ends."""
        engine, waiting = self._engine, iter(rows)
        lens, loading = list[int](), list[float]()
        self._timer.reset()
        self._store.read_times()
        before, start = self._store.seconds, time.perf_counter()
        running, row = 0, next(waiting, None)
        while running or row is not None:
            while row is not None and running < 2 * engine.max_num_seqs:
                lens.append(self._add(str(len(lens)), row))
                running, row = running + 1, next(waiting, None)
            steps = len(self._timer)
            for output in engine.step():
                if output.error is not None or output.finish_reason != "length":
                    raise RuntimeError(f"row {output.request_id} has ended: {output.error}")
                running -= 1
            if len(self._timer) > steps:
                loading.append(self._loading.take())
        synchronize()
        seconds = time.perf_counter() - start
        self._store.read_times()
        return PictureRun(seconds, lens, self._timer.steps(), loading, self._store.seconds - before)

    def _add(self, name: str, row: PictureRow) -> int:
        """Queue a row; returns the length of its prompt."""
        (found,) = self._images.load([ImageSource(row.file, None)])
        rules = self._rules
        image = [rules.start_token_id, *[rules.image_token_id] * found.tokens, rules.end_token_id]
        prompt = image + row.text
        params = replace(self._params, seed=int(name))
        self._engine.add_request(name, prompt, params, images=[self._loading.watched(found.image)])
        return len(prompt)

    def close(self) -> None:
        """Stop the threads."""
        self._images.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="qwen3-vl-8b", help=", ".join(MODELS))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--width", type=int, default=1000, help="pixels of a picture")
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--text", type=int, default=64, help="tokens of a prompt besides its image")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--image-tokens", type=int, default=EngineConfig.image_tokens)
    parser.add_argument("--kv-cache-gib", type=float)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run rows with a JPEG picture each, all different, through the threads of the job layer.

    The device waits for pictures in the idle time before a step that follows the host's waiting for
    pixels, and no longer than the host waited. The floor counts the tower's operations as those of
    a prefill; at the rates that this GPU reached before.
    """
    here = measure_rates()
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        image_tokens=options.image_tokens,
        kv_cache_gib=options.kv_cache_gib,
    )
    bench = Bench(options.model, config, vision=True)
    bench.engine.capture_graphs()
    print(bench.engine.memory, flush=True)
    with ThreadPoolExecutor() as pool:
        photos = list(pool.map(partial(photo, options.width, options.height), range(_PHOTOS)))
    vision = bench.model_config.vision
    assert vision is not None
    side = vision.rules.pixels_per_token
    sizes = ImageSizes(side, 64 * side**2, DEFAULT_TOKENS * side**2, 16_384 * side**2)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_new_tokens=options.output_len)
    rows = PictureRows(bench, params, sizes)
    draws = random.Random("pictures")
    vocab = prompt_vocab(bench.model_config.vocab_size)
    if vision.rules.image_token_id < vocab:  # in a vocabulary of few tokens
        vocab = vision.rules.never_sampled[0]
    height, width = sizes.size(options.height, options.width)
    found = []
    every = files(photos, (options.runs + 1) * options.rows)
    for number in range(options.runs + 1):
        warming = number == 0
        count = min(options.rows, 64) if warming else options.rows
        texts = [[draws.randrange(vocab) for _ in range(options.text)] for _ in range(count)]
        done = rows.run([PictureRow(next(every), text) for text in texts])
        if not warming:
            flops = count * tower_flops(vision, height, width)
            figures = {"rows": count, "height": height, "width": width} | done.figures
            found.append(figures | _floor(bench, done, options.output_len, flops, here))
            print(describe(found[-1]), flush=True)
    rows.close()
    common = {"model": options.model, "file_bytes": sum(map(len, photos)) / len(photos)}
    return [common | figures for figures in found]


def _floor(
    bench: Bench, done: PictureRun, output_len: int, flops: float, here: Rates | None
) -> dict[str, float]:
    """The least seconds of the rows at the rates of this GPU; nothing on a CPU."""
    if here is None:
        return {}
    load = [BenchRequest([0] * length, output_len) for length in done.prompt_lens]
    text, tower = floor_seconds(bench.model_config, load, here).total, flops / here.flops
    return {
        "floor": text + tower,
        "floor_tower": tower,
        "floor_share": (text + tower) / done.seconds,
    }


def describe(figures: dict[str, Any]) -> str:
    """Two lines of a run's figures."""
    floor = ""
    if "floor" in figures:
        floor = f", floor {figures['floor']:.1f} s (share {figures['floor_share']:.2f}), of which "
        floor += f"the tower {figures['floor_tower']:.1f} s"
    return (
        f"{figures['rows']} rows with a picture of {figures['width']}×{figures['height']}: "
        f"{figures['seconds']:.2f} s, {figures['rows_per_s']:.2f} rows/s{floor}\n"
        f"  tower {figures['tower_seconds']:.2f} s ({figures['tower_share']:.1%} of the device's "
        f"work), device idle {figures['idle_seconds']:.2f} s, of which it waited for pictures "
        f"{figures['waited_seconds']:.2f} s ({figures['waited_share']:.1%}); the host waited "
        f"{figures['host_loading_seconds']:.2f} s for them"
    )
