"""Jobs over rows with images, with a tiny random model of Qwen3-VL's form and an engine that only
decodes."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image as Pillow
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import batchgen
from batchgen.config.compose.compose_config import compose
from batchgen.engine.interface.outputs import Begun, RequestError, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.engine.models.vision_part import deepstack_tower
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image import Image
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.util.request_id import RequestId

MEMORY = MemoryPlan(0, 0, 0, num_blocks=0, kv_tokens=0, total=None)
SHIPPED = Path(batchgen.__file__).parent / "data" / "nano_vl"
IMAGE_ID = 261
TINY = {"hidden_size": 64, "intermediate_size": 170, "num_hidden_layers": 3}
TINY_TOWER = {"hidden_size": 32, "intermediate_size": 128, "num_heads": 1, "depth": 2}


def tiny_config() -> dict[str, Any]:
    """The configuration of a model of nano_vl's form that is smaller still."""
    config: dict[str, Any] = json.loads((SHIPPED / "config.json").read_text())
    config["text_config"] |= TINY
    config["vision_config"] |= TINY_TOWER | {"out_hidden_size": TINY["hidden_size"]}
    return config


VISION = deepstack_tower(Qwen3VLConfig(**tiny_config()))


def random_weights(contents: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights: rows of tables begin small, products with a variance of one over their
    inputs."""
    config = Qwen3VLConfig(**contents | {"dtype": "float32"})
    model: Any = Qwen3VLForConditionalGeneration(config).float()
    tables = {"embed_tokens": 0.06, "pos_embed": 0.2}
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            std = tables.get(name.split(".")[-2], float(weight[0].numel() ** -0.5))
            nn.init.normal_(weight, std=std)
    weights: dict[str, Tensor] = model.state_dict()
    return weights


def save_model(folder: Path, **processor: Any) -> Path:
    """A random model of Qwen3-VL's form; `processor` changes what it says of images."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in [*SHIPPED.glob("*.json"), *SHIPPED.glob("*.jinja")]:
        shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    says = json.loads((SHIPPED / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(says | processor))
    torch.manual_seed(0)
    weights = random_weights(tiny_config())
    kept = {name: value.contiguous() for name, value in weights.items() if "lm_head" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def picture(
    width: int = 64, height: int = 32, kind: str = "PNG", seed: int = 0, **more: Any
) -> bytes:
    """The bytes of a file with a random picture."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encoded(Pillow.fromarray(values), kind, **more)


def encoded(image: Pillow.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


@dataclass
class Stats:
    decoded: int = 0


@dataclass
class DecodingEngine:
    """Decodes the images of the oldest requests in every step, and answers with their sizes."""

    per_step: int = 4
    side: int = 32  # pixels of a token's side
    max_num_seqs: int = 8
    stats: Stats = field(default_factory=Stats)
    memory: MemoryPlan = MEMORY
    batch_dependence: str | None = None
    generated_tokens: int = 0
    seen: list[Image] = field(default_factory=list)
    _waiting: list[tuple[RequestId, list[int], Sequence[Image]]] = field(default_factory=list)

    def add_request(
        self,
        request_id: RequestId,
        prompt_token_ids: list[int],
        params: RequestParams,
        answer: GivenAnswer | None = None,
        images: Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> bool:
        wanted = sum(each.height // self.side * (each.width // self.side) for each in images)
        assert prompt_token_ids.count(IMAGE_ID) == wanted
        self._waiting.append((request_id, prompt_token_ids, images))
        return False

    def begun_lengths(self) -> dict[RequestId, int]:
        return {}

    def begun(self, request_id: RequestId, start: int = 0) -> Begun | None:
        return None

    @property
    def num_running(self) -> int:
        return min(len(self._waiting), self.max_num_seqs)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        return np.zeros(self.num_running, np.int64)

    def measure_costs(self) -> None:
        pass

    def take_costs(self, *, wait: bool = False) -> list[tuple[RequestId, float]]:
        return []

    def close(self) -> None:
        pass

    def abort(self, request_id: RequestId) -> bool:
        return False

    def step(self) -> list[RequestOutput]:
        done, self._waiting = self._waiting[: self.per_step], self._waiting[self.per_step :]
        return [self._answer(*each) for each in done]

    def _answer(
        self, request_id: RequestId, prompt: list[int], images: Sequence[Image]
    ) -> RequestOutput:
        try:
            shapes = [each.load().shape for each in images]
        except RequestError as error:
            return RequestOutput(request_id, prompt, [], "", "error", error=error)
        self.stats.decoded += len(shapes)
        self.seen += images
        return RequestOutput(request_id, prompt, [1], str(shapes), "stop")


def arguments(model: Path, rows: Path, out: Path, *more: str) -> list[str]:
    return [
        "model=hf", f"model.path={model}", "dataset=files", f"dataset.path={rows}",
        "prompt=chat", "sampling=greedy", "sampling.max_new_tokens=4", "engine.device=cpu",
        "engine.max_model_len=256", "output.columns=[]", "output.rows_per_shard=8",
        "output.on_all_errors=continue", f"output.dir={out}", *more,
    ]  # fmt: skip


def opened(given: Sequence[str], engine: DecodingEngine) -> ResolvedJob:
    config = compose({}, list(given))
    return dataclasses.replace(resolve_job(config), port=lambda: engine)


def run(given: Sequence[str], engine: DecodingEngine | None = None) -> JobResult:
    config = compose({}, list(given))
    return execute_job(config, opened(given, engine or DecodingEngine()))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
