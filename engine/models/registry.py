"""The models of the engine. Their classes are named as in the configurations of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.engine.models.llama import LlamaForCausalLM
from batchgen.engine.models.qwen3 import Qwen3ForCausalLM
from batchgen.engine.models.sdar import SDARForCausalLM

MODELS: Mapping[str, type[DenseForCausalLM]] = {
    model.__name__: model for model in (LlamaForCausalLM, Qwen3ForCausalLM, SDARForCausalLM)
}


def model_class(architecture: str, source: Path) -> type[DenseForCausalLM]:
    """Raises ValueError, naming the source and what is supported, for any other architecture."""
    if architecture not in MODELS:
        raise ValueError(
            f"{source}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(MODELS)}"
        )
    return MODELS[architecture]


def gguf_model_class(architecture: str, source: Path) -> type[DenseForCausalLM]:
    """As `model_class`, for the `general.architecture` of a GGUF file."""
    by_gguf = {
        model.gguf_architecture: model
        for model in MODELS.values()
        if model.gguf_architecture is not None
    }
    if architecture not in by_gguf:
        raise ValueError(
            f"{source}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(by_gguf)}"
        )
    return by_gguf[architecture]
