"""More adapters than adapter slots: rows wait for theirs, and have the bits that they have when all
adapters are on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.adapters import add_adapters, slot_numbers
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.peft_files import open_adapter
from batchgen.engine.lora import layer_lora as lora
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.strategy import Strategy
from batchgen.kernels.lora.expert_lora import ExpertAdapters, ExpertFactors
from batchgen.kernels.lora.lora import LoRAProducts, StackedFactors, add_lora_reference_
from batchgen.kernels.lora.lora_tokens import LoRATokens
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.engine.test_lora import CONFIG, rows
from tests.support.cases import some_slow, some_thorough
from tests.support.engine.engine_rows import Request, expect_short_rows, run
from tests.support.engine.lora_files import DENSE, write_adapter
from tests.support.engine.ranked_engines import Case, run_divided

CPU = torch.device("cpu")
NAMES = ("a", "b", "c", "d", "e")


def five_adapters(base: Path, folder: Path) -> dict[str, Path]:
    """Adapters of several ranks, of which one leaves most modules alone."""
    return {
        name: write_adapter(
            folder / name,
            base,
            (*DENSE, "embed_tokens", "lm_head") if i != 3 else ("q_proj", "down_proj"),
            rank=3 + 2 * i,
            seed=i,
            strength=0.1,
            experts=True,
        )
        for i, name in enumerate(NAMES)
    }


def model_of(base: Path, adapters: dict[str, Path], slots: int | None) -> CausalLM:
    model = load_model(base, device=CPU, dtype=torch.float32)
    add_adapters(model, {n: open_adapter(path) for n, path in adapters.items()}, slots=slots)
    return model


def requests(count: int = 24, **changes: Any) -> list[Request]:
    """Rows with each of the adapters and with none."""
    names = (*NAMES, None)
    return [
        (prompt, replace(params, lora=names[(i * i + i // 5) % len(names)], **changes))
        for i, (prompt, params) in enumerate(rows(count))
    ]


def expect_equal(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert np.array_equal(one.columns["logprobs"], other.columns["logprobs"])


MODES: dict[str, tuple[str, Callable[[], Strategy], dict[str, Any], bool]] = {
    "plain": ("qwen3", ARStrategy, {}, False),
    "chunks": ("qwen3", ARStrategy, {"max_batched_tokens": 16, "chunk_tokens": 8}, False),
    "overlap": ("llama", ARStrategy, {"overlap": True}, False),
    "preemption": ("qwen3", ARStrategy, {"kv_cache_gib": 0.0002}, True),
    "drafts": ("llama", partial(ARSpecStrategy, adaptive=False), {}, False),
    "states": ("qwen3_5_text", ARStrategy, {"state_checkpoints": 8}, False),
    "experts": ("qwen3_moe", ARStrategy, {}, False),
    "diffusion": ("sdar", partial(DLLMStrategy, block_length=4), {}, False),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", some_slow(MODES, ["chunks", "preemption", "states", "experts"]))
def test_rows_have_the_bits_of_all_adapters_in_memory(
    mode: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, strategy, changes, short = MODES[mode]
    base = tiny_model(kind)
    adapters = five_adapters(base, tmp_path)
    if short:
        expect_short_rows(monkeypatch)
    asked = requests(12, max_new_tokens=60) if short else requests()

    def outputs(slots: int | None) -> list[RequestOutput]:
        config = replace(CONFIG, lora_slots=slots, **changes)
        engine = LLMEngine(model_of(base, adapters, slots), None, (2,), strategy(), config)
        return run(engine, asked)

    expected = outputs(None)
    for slots in (1, 3):
        found = outputs(slots)
        expect_equal(found, expected)
        if short and slots > 1:
            assert any(output.num_preemptions for output in found)


def stacked_sum(
    out: Tensor,
    x: Tensor,
    tokens: LoRATokens,
    stacked: StackedFactors,
    products: Sequence[Sequence[LoRAProducts]],
) -> Tensor:
    return add_lora_reference_(out, x, tokens.slots, stacked)


def stacked_experts(
    adapters: ExpertAdapters, factors: ExpertFactors | None, out: Tensor, x: Tensor, slots: Tensor
) -> None:
    assert factors is not None
    k, experts = adapters.ids.shape[1], adapters.ids.flatten()[slots]
    own = adapters.adapter_slots[slots // k]
    pairs = torch.where(own > 0, (own - 1) * adapters.num_experts + experts + 1, 0)
    add_lora_reference_(out, x, pairs, factors.stacked)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "overlap"),
    some_thorough(
        [("llama", False), ("llama", True), ("qwen3_moe", False)],
        [("llama", True), ("qwen3_moe", False)],
    ),
)
def test_slots_are_written_anew(
    kind: str, overlap: bool, tiny_model: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The factors as a GPU has them, at addresses that stay, computed by the reference."""
    monkeypatch.setattr(ExpertAdapters, "_add_", stacked_experts)
    monkeypatch.setattr(lora, "stacks", lambda device: True)
    monkeypatch.setattr(lora, "add_lora_", stacked_sum)
    base = tiny_model(kind)
    adapters = five_adapters(base, tmp_path)
    found = {}
    for slots in (None, 2):
        model = model_of(base, adapters, slots)
        assert model.lora is not None
        read = [open_adapter(path) for path in adapters.values()]
        per_slot = slot_numbers(model, read) * 4
        assert model.lora.num_bytes == per_slot * (slots or len(adapters))
        addresses = [layer.addresses for layer in model.lora.layers]
        config = replace(CONFIG, lora_slots=slots, overlap=overlap)
        found[slots] = run(LLMEngine(model, None, (2,), ARStrategy(), config), requests())
        assert [layer.addresses for layer in model.lora.layers] == addresses
        assert model.lora.in_slots != [1, 2] or slots is None
    expect_equal(found[2], found[None])


@pytest.mark.thorough
def test_ranks_swap_at_the_same_steps(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    adapters = five_adapters(base, tmp_path)
    case = Case(base, requests(), adapters=adapters, config={"lora_slots": 2})
    expected, _ = case.run()
    ((found, _),) = run_divided([case], 2)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.columns["logprobs"], other.columns["logprobs"], atol=1e-5)


def test_slots_that_the_model_does_not_have(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    config = replace(CONFIG, lora_slots=2)
    for model, has in (
        (load_model(base, device=CPU), "no adapters that are computed beside its weights"),
        (model_of(base, five_adapters(base, tmp_path), None), "5 slots"),
    ):
        with pytest.raises(ValueError, match=f"lora_slots is 2, and the model has {has}"):
            LLMEngine(model, None, (2,), ARStrategy(), config)
