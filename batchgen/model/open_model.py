"""From the name of a model to its engine, in two steps: first all that costs nothing to check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import LoadFormat, load_config, load_model, safetensors_files
from batchgen.engine.loading.tokenizer import eos_token_ids, load_tokenizer
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.engine.strategy import Strategy
from batchgen.model.source import resolve_model

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


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

    def dtype(self, name: DtypeName, device: DeviceName) -> torch.dtype:
        """Of weights and activations. A CPU computes in float32 unless told: only that is exact.

        Raises:
            ValueError: the device is not there.
        """
        target = _device(device)
        if name == "auto":
            return torch.float32 if target.type == "cpu" else self.config.dtype
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def load(self, dtype: DtypeName, device: DeviceName) -> DenseForCausalLM:
        """The model with its weights.

        Raises:
            ValueError: a tensor is missing or wrong, or the device is not there.
        """
        return load_model(
            self.path,
            device=_device(device),
            dtype=self.dtype(dtype, device),
            load_format=self.load_format,
        )

    def load_beside(self, model: DenseForCausalLM) -> DenseForCausalLM:
        """With its weights, on the device and in the dtype of another model.

        Raises:
            ValueError: a tensor is missing or wrong.
        """
        return load_model(
            self.path, device=model.device, dtype=model.dtype, load_format=self.load_format
        )

    def engine(
        self,
        model: DenseForCausalLM,
        strategy: Strategy,
        config: EngineConfig,
        draft: DenseForCausalLM | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> LLMEngine:
        """Of the model with its weights.

        Args:
            draft: the draft model with its weights, for a strategy that drafts with one.
            compiler: of constraints; None lets the engine make one when a row needs it.

        Raises:
            ValueError: the configuration does not suit the models or the device's memory.
        """
        return LLMEngine(
            model,
            self.tokenizer,
            self.eos_token_ids,
            strategy,
            config,
            draft=draft,
            compiler=compiler,
        )

    def grammar_compiler(self) -> GrammarCompiler:
        """For rows with constraints.

        Raises:
            ValueError: the model has no tokenizer, one that constraints do not work with, or no
                token that ends a row.
        """
        if self.tokenizer is None:
            raise ValueError(
                "a constraint is about text, and the model comes without a tokenizer: use a model "
                "with one, or no constraint"
            )
        if not self.eos_token_ids:
            raise ValueError(
                "a constrained row ends with EOS, and neither the model's configuration nor its "
                "tokenizer names an EOS token: set eos_token_id in generation_config.json, or use "
                "no constraint"
            )
        return GrammarCompiler(self.tokenizer, self.config.vocab_size, self.eos_token_ids)


def open_model(model: str, revision: str | None, load_format: LoadFormat) -> OpenedModel:
    """Find a model and read its configuration and tokenizer.

    Raises:
        ValueError: it cannot be found or is not supported; the message says what to do.
    """
    path = resolve_model(model, revision, weights=load_format != "dummy")
    if load_format == "gguf" and path.suffix != ".gguf":
        raise ValueError(f"load_format is gguf, but {path} is not a .gguf file")
    config, tokenizer = load_config(path), load_tokenizer(path)
    if path.is_dir() and load_format != "dummy":
        safetensors_files(path)  # raises if there are none
    return OpenedModel(path, config, tokenizer, eos_token_ids(path, tokenizer), load_format)


def _device(name: DeviceName) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch sees no GPU: use auto or cpu")
    return torch.device(name)
