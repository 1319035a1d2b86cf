"""Tiny random models of Gemma's form that read images, with a tokenizer and a processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.jobs.image_job import IMAGE_ID, SHIPPED

START_ID, END_ID, VIDEO_ID = 259, 260, 262
MARKS = {"gemma4": "<|image_pad|>", "gemma3": "<|vision_start|>"}
"""What chat templates write for an image."""
_WRITTEN = "<|vision_start|><|image_pad|><|vision_end|>"
_TEXT: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 512,
    "pad_token_id": 0, "eos_token_id": 258, "bos_token_id": 256, "initializer_range": 0.2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "patch_size": 4, "initializer_range": 0.2,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "text_config": _TEXT | {"hidden_size_per_layer_input": 0, "global_head_dim": 32},
    "vision_config": _TOWER | {
        "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2,
        "position_embedding_size": 300,
    },
    "image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID, "boi_token_id": START_ID,
    "eoi_token_id": END_ID,
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    "text_config": _TEXT | {"query_pre_attn_scalar": 20},
    "vision_config": _TOWER | {"image_size": 32, "vision_use_head": False},
    "image_token_id": IMAGE_ID, "boi_token_id": START_ID, "eoi_token_id": END_ID,
    "mm_tokens_per_image": 16,
}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "do_normalize": False, "do_resize": True, "do_rescale": True, "resample": 3,
        "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "max_soft_tokens": 70, "patch_size": 4,
        "pooling_kernel_size": 2, "image_processor_type": "Gemma4ImageProcessor",
    },
    "gemma3": {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True,
        "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2,
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32},
    },
}  # fmt: skip
"""What published checkpoints say of images, but for sizes."""


def save_gemma(folder: Path, kind: str = "gemma4", **processor: Any) -> Path:
    """A random model; `processor` changes what it says of images."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / name, folder / name)
    template = (SHIPPED / "chat_template.jinja").read_text()
    assert _WRITTEN in template
    (folder / "chat_template.jinja").write_text(template.replace(_WRITTEN, MARKS[kind]))
    torch.manual_seed(0)
    says = PROCESSORS[kind] | processor
    if kind == "gemma3":
        squares = transformers.Gemma3Config(**_GEMMA3)
        transformers.Gemma3ForConditionalGeneration(squares).save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(says))
        return folder
    config = transformers.Gemma4Config(**_GEMMA4)
    transformers.Gemma4ForConditionalGeneration(config).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": says}))
    return folder
