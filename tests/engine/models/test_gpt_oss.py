"""The published gpt-oss models: their configurations, sizes and names, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import KVSpec
from batchgen.engine.layers.rotary import YarnRope
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.dense import DenseConfig
from batchgen.engine.models.gpt_oss import GptOssForCausalLM
from tests.support.engine.edited_models import edit_config, edit_weights
from tests.support.engine.fp8_checkpoints import write_fp8

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(40)]


def published(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": layers, "num_key_value_heads": 8, "num_local_experts": experts,
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 201088,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "experts", "parameters", "active"),
    [(24, 32, 20_914_757_184, 3.6e9), (36, 128, 116_829_156_672, 5.1e9)],
)
def test_the_published_sizes(
    layers: int, experts: int, parameters: int, active: float, tmp_path: Path
) -> None:
    """Numbers of parameters are those of the model card, where the active ones leave out the
    embedding."""
    (tmp_path / "config.json").write_text(json.dumps(published(layers, experts)))
    config = load_model_config(tmp_path, "dummy")
    assert config.max_position_embeddings == 131072
    rope = config.family_as(DenseConfig).rope
    assert isinstance(rope, YarnRope)
    assert (rope.rope_theta, rope.factor, rope.truncate) == (150000, 32, False)
    assert rope.attention_scaling == pytest.approx(1.3466, abs=1e-4)
    model = GptOssForCausalLM(config, device=torch.device("meta"), dtype=torch.bfloat16)
    assert model.num_parameters == parameters
    embedding = 201088 * 2880
    assert model.parameters_per_token - embedding == pytest.approx(active, rel=0.02)
    assert model.cache_specs == [KVSpec(64, 8, 64, 128), KVSpec(64, 8, 64)] * (layers // 2)


@pytest.mark.thorough
def test_no_tensor_of_a_checkpoint_is_passed_over(
    tiny_model: TinyModel, run_paged: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Each of a layer's changes the logits, sinks and all biases among them."""
    folder = tiny_model("gpt_oss")
    expected = run_paged(load_model(folder, device=CPU), IDS, [40])
    names: list[str] = []

    def note(tensors: dict[str, Tensor]) -> None:
        names.extend(name for name in tensors if ".layers.1." in name)

    edit_weights(folder, tmp_path / "same", note)
    # What is added to all keys alike moves all scores of a query alike, which sinks feel.
    assert len(names) == 17 and sum(name.endswith(("bias", "sinks")) for name in names) == 8
    for index, name in enumerate(names):

        def double(tensors: dict[str, Tensor], name: str = name) -> None:
            tensors[name] = tensors[name] * 2

        changed = edit_weights(folder, tmp_path / str(index), double)
        found = run_paged(load_model(changed, device=CPU), IDS, [40])
        assert float((found - expected).abs().max()) > 1e-3, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": -1.0}, "swiglu_limit is -1.0, and must be a number over 0"),
        ({"swiglu_alpha": 0.0}, "swiglu_alpha is 0.0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_is_refused_is_named(
    changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(edit_config(tiny_model("gpt_oss"), tmp_path / "m", **changes))


def test_a_checkpoint_with_its_experts_in_fp8_is_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Its rows of gate and up take turns, so that a block's scale is of rows of both."""
    fp8, _ = write_fp8(tiny_model("gpt_oss"), tmp_path)
    with pytest.raises(ValueError, match=r"0\.mlp\.experts is in FP8 .*model\.quantization=fp8"):
        load_model(fp8, device=CPU)
