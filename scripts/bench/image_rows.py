"""Rows with pictures for a job whose engine only decodes them, and what that takes."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from modes.images import files, photo
from PIL import Image as Pillow
from synthetic_job import InstantEngine, instant_job, must_be_flat

import batchgen
from batchgen.images.decode_image import decode_image, image_size
from batchgen.images.image_sizes import image_sizes
from batchgen.jobs.run_job import run_job

MODEL = Path(batchgen.__file__).parent / "data" / "nano_vl"
_GROUP = 100
"""Rows of the data set that are written at once."""


def write_rows(folder: Path, rows: int, size: tuple[int, int]) -> dict[str, str]:
    """Write `rows` pictures of `size` (width, height), no two of which are equal, and a folder of a
    model that lets them have as many tokens as large ones do; returns the keys of their job."""
    every = files([photo(*size, seed) for seed in range(20)], rows)
    schema = pa.schema([("question", pa.string()), ("image", pa.binary())])
    with pq.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for start in range(0, rows, _GROUP):
            data = list(islice(every, min(_GROUP, rows - start)))
            table = {"question": ["What is this?"] * len(data), "image": data}
            writer.write_table(pa.table(table, schema))
    model = folder / "model"
    shutil.copytree(MODEL, model)
    says = json.loads((model / "preprocessor_config.json").read_text())
    says["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}
    (model / "preprocessor_config.json").write_text(json.dumps(says))
    return {"model": str(model), "path": str(folder / "rows.parquet")}


def seconds_each(size: tuple[int, int], count: int) -> dict[str, float]:
    """Processor seconds of one picture on one core: ours, and that of transformers' processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    photos = [photo(*size, seed) for seed in range(count)]
    limits = {"shortest_edge": 65536, "longest_edge": 1280 * 32 * 32}
    values: Any = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = Qwen2VLImageProcessorPil(size=limits, **values)
    sizes = image_sizes(MODEL, 32, None)
    sizes = replace(sizes, least=limits["shortest_edge"], most=limits["longest_edge"])

    def ours(data: bytes) -> object:
        return decode_image(data, *sizes.size(*image_size(data)))

    def theirs(data: bytes) -> object:
        image: Pillow.Image = Pillow.open(io.BytesIO(data))
        return processor(images=[image], return_tensors="pt")["pixel_values"]

    return {name: _time(work, photos) for name, work in (("ours", ours), ("theirs", theirs))}


def _time(work: Any, photos: Sequence[bytes]) -> float:
    work(photos[0])
    began = time.process_time()
    for data in photos:
        work(data)
    return (time.process_time() - began) / len(photos)


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--speed-count", type=int, default=20, help="pictures of 1080p")


def run_images(options: argparse.Namespace) -> list[Any]:
    """Time a job over rows with pictures, and the work on one picture beside transformers'.

    The engine decodes every picture and computes nothing. The exit code is 1 if the memory without
    mapped files grew by more than 10% after a fifth of the rows. Pictures of 1920 by 1080 pixels
    are decoded and scaled to 1,280 tokens on one core; transformers' processor makes float32
    patches of them, which this engine makes on the device.
    """
    each = seconds_each((1920, 1080), options.speed_count)
    print("1080p: {ours:.4f} s of one core; transformers' processor: {theirs:.4f} s".format(**each))
    with tempfile.TemporaryDirectory(prefix="bench_job_layer") as temporary:
        engine, folder = InstantEngine(16, every=100), Path(temporary)
        at = write_rows(folder, options.rows, (options.width, options.height))
        values = {
            "model": {"choice": "hf", "path": at["model"]},
            "dataset": {"choice": "files", "path": at["path"]},
            "prompt": {"choice": "chat", "max_pixels": 262144},
        }
        config, parts = instant_job(folder, engine, values)
        clock, cpu = time.perf_counter(), time.process_time()
        result = run_job(config, parts)
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        assert result.exit_code == 0, result.message
    print(
        f"{options.rows} pictures of {options.width}×{options.height}: {clock:.0f} s, {cpu:.0f} s "
        f"of processors, {options.rows / cpu:.0f} pictures for a second of a core"
    )
    early, peak = engine.check_memory(options.rows, 5)
    must_be_flat(early, peak)
    found = {"rows": options.rows, "seconds": clock, "cpu_seconds": cpu, "mib": [early, peak]}
    return [found | {f"{name}_1080p_s": value for name, value in each.items()}]
