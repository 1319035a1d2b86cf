"""Adapters against PEFT itself, beside the weights and merged by it; skipped where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchgen.engine.sampling.sampling_params import RequestParams
from tests.engine.test_lora import TARGETS, adapted, engine_of
from tests.support.engine.engine_rows import run
from tests.support.engine.lora_files import write_adapter

peft = pytest.importorskip("peft")

KINDS = ("llama", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "gpt_oss", "gemma3_text")
IDS = [(7 * i * i + 3 * i) % 90 + 5 for i in range(40)]


OF_MLPS = ("gate_proj", "up_proj", "down_proj")


def targets_of(kind: str) -> list[str]:
    """Modules to adapt: PEFT (0.21) takes those of all MLPs of deepseek_v3 for those of its routed
    experts alone, and passes over the factors of its dense layers."""
    return [name for name in TARGETS if kind != "deepseek_v3" or name not in OF_MLPS]


def log_probabilities(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """Those of `tokens`, of which the first 8 are the prompt."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    wanted = torch.tensor(tokens[8:]).unsqueeze(1)
    return logits.log_softmax(-1)[7:-1].gather(1, wanted)[:, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_peft(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model(kind)
    paths = {
        "a": write_adapter(
            tmp_path / "a", base, targets_of(kind), seed=1, strength=0.07, ranks={"o_proj": 7}
        ),
        "b": write_adapter(
            tmp_path / "b", base, targets_of(kind), rank=9, seed=2, strength=0.07, use_rslora=True
        ),
    }
    names = ("a", None, "b", "a")
    asked = [(IDS[:8], RequestParams(max_new_tokens=0, lora=name), IDS[8:]) for name in names]
    engine = engine_of(adapted(base, paths))
    scored = [next(iter(output.columns.values())) for output in run(engine, asked)]
    greedy = RequestParams(max_new_tokens=16, temperature=0.0, logprobs=True, ignore_eos=True)
    written = run(
        engine, [(IDS[:8], greedy), *((IDS[:8], replace(greedy, lora=name)) for name in paths)]
    )
    for name, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        model = peft.PeftModel.from_pretrained(model, path).eval()
        output = written[1 + list(paths).index(name)]
        tokens = IDS[:8] + output.token_ids
        for merged in (False, True):
            if merged:
                model = model.merge_and_unload()
            expected = log_probabilities(model, IDS)
            for i in [i for i, each in enumerate(names) if each == name]:
                np.testing.assert_allclose(scored[i], expected, atol=_most(kind))
            of_written = log_probabilities(model, tokens)
            np.testing.assert_allclose(output.columns["logprobs"], of_written, atol=_most(kind))
            with torch.inference_mode():
                best = model(torch.tensor([tokens])).logits[0, 7:-1].argmax(-1)
            assert best.tolist() == output.token_ids


MIXTURE = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
WRITTEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ends": (
        "llama",
        {"tie_word_embeddings": False},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ),
    "scaled embedding": (
        "gemma3_text",
        {"tie_word_embeddings": True},
        {"target_modules": ["embed_tokens"]},
    ),
    "tied lm_head": (
        "qwen3",
        {"tie_word_embeddings": True},
        {"target_modules": ["lm_head", "up_proj"]},
    ),
    "whole": (
        "llama",
        {"tie_word_embeddings": False},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "whole, of a shared weight": (
        "qwen3",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "experts": ("qwen3_moe", {}, MIXTURE),
    "gpt_oss": ("gpt_oss", {}, MIXTURE),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", WRITTEN)
def test_files_that_peft_writes(case: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    kind, changes, config = WRITTEN[case]
    base = tiny_model(kind, **changes)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    adapted_model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **config)).eval()
    torch.manual_seed(0)
    for name, parameter in adapted_model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted_model.save_pretrained(tmp_path / "a")
    asked = [(IDS[:8], RequestParams(max_new_tokens=0, lora="a"), IDS[8:])]
    (scored,) = run(engine_of(adapted(base, {"a": tmp_path / "a"})), asked)
    found, expected = next(iter(scored.columns.values())), log_probabilities(adapted_model, IDS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with adapted_model.disable_adapter():
        assert (log_probabilities(adapted_model, IDS) - expected).abs().max() > 0.01


def _most(kind: str) -> float:
    """What log-probabilities may differ by: a recurrence adds up what rounding differs by."""
    return 5e-5 if kind == "qwen3_5_text" else 1e-5
