"""From the name of a model to its engine, in two steps: first all that costs nothing to check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loader import load_config, load_model
from batchgen.engine.model_config import ModelConfig
from batchgen.engine.strategy import Strategy
from batchgen.engine.tokenizer import eos_token_ids, load_tokenizer
from batchgen.model_source import resolve_model

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "gguf", "dummy"]


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are not loaded yet.

    Attributes:
        path: its folder or GGUF file.
        tokenizer: None if it comes without one.
    """

    path: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    load_format: LoadFormat

    def build_engine(
        self, strategy: Strategy, config: EngineConfig, dtype: DtypeName, device: DeviceName
    ) -> LLMEngine:
        """Load the weights and set the engine up.

        Raises:
            ValueError: a tensor is missing or wrong, the device is not there, or it is too small.
        """
        target = _device(device)
        model = load_model(
            self.path,
            device=target,
            dtype=_dtype(dtype, target),
            load_format="dummy" if self.load_format == "dummy" else "auto",
        )
        return LLMEngine(model, self.tokenizer, self.eos_token_ids, strategy, config)


def open_model(model: str, revision: str | None, load_format: LoadFormat) -> OpenedModel:
    """Find a model and read its configuration and tokenizer.

    Raises:
        ValueError: it cannot be found or is not supported; the message says what to do.
    """
    path = resolve_model(model, revision)
    if load_format == "gguf" and path.suffix != ".gguf":
        raise ValueError(f"load_format is gguf, but {path} is not a .gguf file")
    tokenizer = load_tokenizer(path)
    return OpenedModel(
        path, load_config(path), tokenizer, eos_token_ids(path, tokenizer), load_format
    )


def _device(name: DeviceName) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch sees no GPU: use auto or cpu")
    return torch.device(name)


def _dtype(name: DtypeName, device: torch.device) -> torch.dtype | None:
    """None is the checkpoint's own. CPUs compute in float32, which alone is exact there."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
