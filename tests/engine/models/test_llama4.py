"""Rows of Llama 4 that cross chunks, and the experts that their tokens go through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.models.dense import DenseConfig
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.kernels.attention.windows import ChunkWindow
from tests.engine.loading.test_folding import of_experts, write
from tests.engine.models.test_family_rows import check_greedy, load, make_engine, requests
from tests.engine.test_lora import adapted
from tests.support.engine.alone_rows import Alone
from tests.support.engine.edited_models import edit_config
from tests.support.engine.engine_rows import run
from tests.support.engine.forced_drafts import ForcedStrategy

TinyModel = Callable[..., Path]


def test_tokens_go_through_the_experts_of_transformers(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama4")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for name, module in theirs.named_modules():
        if name.endswith("feed_forward.router"):
            module.register_forward_hook(lambda _module, _args, result: chosen.append(result[0]))
    rows = requests(seed=7, count=3, temperatures=(0,))
    engine = make_engine(load(folder), max_batched_tokens=32, block_size=4)
    for (prompt, _), output in zip(rows, run(engine, rows), strict=True):
        chosen.clear()
        ids = prompt + output.token_ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids])).logits[0]
        check_greedy(output, logits[len(prompt) - 1 : -1].log_softmax(-1))
        found = torch.from_numpy(output.columns[ROUTED_EXPERTS].astype(int))
        expected = torch.stack([scores.argmax(-1) for scores in chosen], 1)[:-1]
        assert torch.equal(found.squeeze(-1), expected)


def test_chunks_end_inside_of_steps_of_drafts(tiny_model: TinyModel) -> None:
    """Also chunks that are shorter than a block, and no multiple of one."""
    for chunk in (5, 24):
        folder = tiny_model("llama4", attention_chunk_size=chunk)
        alone = Alone(make_engine(load(folder), max_num_seqs=1, prefix_caching=False), run)
        rows = requests(seed=20, count=5)
        answers = {str(i): alone(row).token_ids for i, row in enumerate(rows)}
        strategy = ForcedStrategy(answers, k=3, seed=3)
        engine = make_engine(load(folder), strategy, max_num_seqs=4, block_size=8)
        strategy._engine = engine
        alone.check(rows, run(engine, rows))
        assert all(strategy.held)


def test_the_layers_of_scout(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As published, with a tower, and 10,485,760 positions, of which tables have a tenth."""
    config = load_model_config(tiny_model("llama4_tower"))
    family = config.family_as(DenseConfig)
    assert family.layer_windows == (24, None, 24)
    assert all(isinstance(w, ChunkWindow) for w in family.layer_windows if w is not None)
    assert [rope is None for rope in family.layer_ropes] == [False, True, False]
    values = json.loads((tiny_model("llama4_tower") / "config.json").read_text())
    values["text_config"]["max_position_embeddings"] = 10_485_760
    long = edit_config(tiny_model("llama4_tower"), tmp_path / "long", **values)
    assert load_model_config(long).max_position_embeddings == 2**20


def test_adapters_of_all_experts_at_once_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = "model.layers.1.feed_forward.experts"
    stored, _ = of_experts(path, 8, 80, 64)
    adapter = write(tmp_path / "a", stored, target_parameters=["experts.gate_up_proj"])
    with pytest.raises(ValueError, match="axes are the other way round, which is not supported"):
        adapted(tiny_model("llama4"), {"a": adapter})


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("num_experts_per_tok is 2, and only 1 is supported", {"num_experts_per_tok": 2}),
        ("no_rope_layers is", {"no_rope_layers": [1, 2, 0]}),
        ("attn_scale is -1.0, and must be a number from 0 to 1e6", {"attn_scale": -1.0}),
        ("floor_scale is 0", {"floor_scale": 0}),
        ("attention_chunk_size is 0", {"attention_chunk_size": 0}),
        ("layer_types has 'sliding_attention'", {"layer_types": ["sliding_attention"] * 3}),
    ],
)
def test_what_makes_no_sense_is_refused(
    message: str, values: dict[str, object], tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(edit_config(tiny_model("llama4"), tmp_path / "bad", **values))
