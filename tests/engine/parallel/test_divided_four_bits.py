"""Weights in 4 bits that are divided between ranks, whose columns may end within groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from tests.engine.parallel.test_divided_engines import compare, rows
from tests.support.engine.packed_checkpoints import nvfp4, pack_quantized, write_packed
from tests.support.engine.ranked_engines import Case

WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 384}
"""Each of two ranks has 192 of 384 columns: the second group of 128 is on both."""
MOE = WIDE | {"moe_intermediate_size": 64}


def int4(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.fixture
def folders(tiny_model: Callable[..., Path], tmp_path: Path) -> dict[str, Path]:
    """Shallow models, because a difference in a sum's last bits is large behind many layers in
    bfloat16."""
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    forms: dict[str, Any] = {
        "int4": ("qwen3", WIDE, int4(128), partial(pack_quantized, group=128, zero=True)),
        "nvfp4": ("qwen3", WIDE, modelopt, partial(nvfp4, modelopt=True)),
        "experts": ("qwen3_moe", MOE, int4(32), pack_quantized),
    }
    found = {}
    for name, (kind, sizes, quantization, pack) in forms.items():
        (tmp_path / name).mkdir()
        folder = tiny_model(kind, **sizes | {"num_hidden_layers": 1})
        found[name], _ = write_packed(folder, tmp_path / name, quantization, pack)
    return found


@pytest.mark.thorough
def test_two_ranks_say_what_one_says(folders: dict[str, Path]) -> None:
    """Dequantised, as on a CPU, and from 4 bits."""
    cases = []
    for name, folder in folders.items():
        columns = (ROUTED_EXPERTS,) if name == "experts" else ()
        case = partial(Case, folder, columns=columns)
        cases.append(case(rows(5)))
        cases.append(
            case(rows(5, tokens=2), in_four_bits=True, dtype=torch.bfloat16, tolerance=0.05)
        )
    compare(cases, 2)
