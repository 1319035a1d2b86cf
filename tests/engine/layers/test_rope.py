"""Rope variants against transformers' own functions, and the table built from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from batchgen.engine.layers.rotary import DefaultRope, FrequencyFactorsRope, RotaryTable, YarnRope
from batchgen.engine.models.model_config import extended_positions, rope_from_parameters

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
    "original_max_position_embeddings": 32768,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 0.9},
    YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    YARN | {"factor": 1.0},
    YARN | {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("parameters", VARIANTS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_frequencies_and_scaling_equal_transformers(
    parameters: dict[str, Any], head_dim: int
) -> None:
    config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        inv_freq, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    rope = rope_from_parameters(parameters)
    torch.testing.assert_close(rope.inv_freq(head_dim), inv_freq, rtol=1e-6, atol=0)
    assert rope.attention_scaling == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("parameters", [VARIANTS[0], LLAMA3, YARN], ids=str)
def test_table_equals_transformers_cos_and_sin(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        head_dim=64, rope_parameters=dict(parameters), max_position_embeddings=131072
    )
    positions = torch.tensor([0, 1, 5, 4097, 70000, 131071])
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions.unsqueeze(0))
    rope = rope_from_parameters(parameters)
    table = RotaryTable(rope, 64, 131072, torch.device("cpu"))(positions)
    # At large angles one rounding of the angle shows in the result.
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=1e-5)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=1e-5)


def test_frequency_factors_divide_the_angles() -> None:
    base = DefaultRope(10000.0).inv_freq(8)
    scaled = FrequencyFactorsRope(10000.0, (1.0, 2.0, 4.0, 8.0)).inv_freq(8)
    assert torch.equal(scaled * torch.tensor([1.0, 2.0, 4.0, 8.0]), base)


def test_yarn_reaches_its_scaled_length() -> None:
    yarn = YarnRope(1e6, 4.0, 32768)
    assert extended_positions(yarn, 40960) == 131072
    assert extended_positions(yarn, 200000) == 200000
    assert extended_positions(DefaultRope(1e4), 4096) == 4096


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "ntk", "rope_theta": 1e4}, "supported: default, linear, llama3, "),
        ({"rope_type": "longrope", "rope_theta": 1e4}, "missing factor, long_factor, original"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "missing factor"),
        ({"rope_type": "linear", "rope_theta": None, "factor": 2.0}, "missing rope_theta"),
        (YARN | {"surprise": 1}, "unknown surprise"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial"),
    ],
)
def test_other_ropes_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_from_parameters(parameters)
