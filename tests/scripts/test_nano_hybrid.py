"""nano_hybrid: the same arithmetic as transformers', drafts as they are trained, its script."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import nano_training
import pytest
import torch
import train_nano_hybrid
from nano_batch import Batch, encode
from nano_hybrid import MoE, NanoHybrid
from nano_hybrid_config import HybridConfig
from nano_problems import FORMS, SCHEMA, final_number, problems
from nano_speculation import decode, draft_mask, losses, passes
from nano_tokenizer import IM_END_ID, VOCAB_SIZE, build_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, Qwen3_5MoeForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import MtpModel

TINY = HybridConfig(
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    linear_head_dim=16,
    num_experts=8,
    expert_size=16,
    shared_expert_size=16,
)


def tiny(scale: float = 0.15) -> NanoHybrid:
    model = NanoHybrid(TINY)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough that a wrong term shows
        parameter.data += torch.randn(parameter.shape, generator=generator) * scale
    return model


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(2))
