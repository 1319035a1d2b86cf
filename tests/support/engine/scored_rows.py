"""Rows with answers, through engines and through transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.engine.engine_rows import Scored

CPU = torch.device("cpu")


def scored(prompt: list[int], answer: list[int], **options: Any) -> Scored:
    return prompt, RequestParams(max_new_tokens=0, **options), answer


def make_engine(
    folder: Path,
    strategy: Strategy | None = None,
    *,
    heads: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    hidden_layers: tuple[int, ...] = (),
    **config: Any,
) -> LLMEngine:
    options: dict[str, Any] = {"kv_cache_gib": 0.02, "max_num_seqs": 6} | config
    model = load_model(
        folder, device=CPU, dtype=torch.float32, heads=heads, hidden_layers=hidden_layers
    )
    return LLMEngine(
        model,
        None,
        (2,),
        strategy or ARStrategy(),
        EngineConfig(**options),
        context_columns=columns,
    )


class Reference:
    """A model of transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        model_type = json.loads((folder / "config.json").read_text())["model_type"]
        has_tower = model_type in ("llama4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
        kind = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
        self._model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def logprobs(self, prompt: list[int], answer: list[int]) -> npt.NDArray[np.float32]:
        """[len(answer), vocab], of every token at each position of the answer."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + answer])).logits[0]
        found = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return found.numpy()  # type: ignore[no-any-return]
