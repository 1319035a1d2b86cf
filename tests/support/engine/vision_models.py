"""Tiny random models with vision towers, images for them, and transformers as their oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from batchgen.engine.loading.loader import load_model
from batchgen.engine.vision.image import Image
from batchgen.engine.vision.image_span import ImageRules
from batchgen.engine.vision.vision_config import CLIP, HALVES
from tests.support.engine.tiny_models import SIZES

IMAGE, VIDEO, START, END = 120, 121, 122, 123
SIDE = 8
RULES = ImageRules(IMAGE, START, END, SIDE, other_ids=(VIDEO,))
KINDS = {
    "qwen3_vl": "Qwen3VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "gemma4_small": "Gemma4",
    "gemma4": "Gemma4",
    "gemma3": "Gemma3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}
_SIZES = SIZES | {"max_position_embeddings": 512}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 48,
}
_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 51,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "initializer_range": 0.1,
}
_WINDOWED = _TOWER | {"hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": [1]}
del _WINDOWED["num_position_embeddings"]
_LAYERS = ["full_attention", "sliding_attention"]
_GEMMA4_SMALL: dict[str, Any] = {
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "layer_types": _LAYERS * 2,
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "sliding_window": 24, "global_head_dim": 32, "pad_token_id": 0, "rope_parameters": None,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "layer_types": [*_LAYERS, "sliding_attention", *_LAYERS[:1]], "num_hidden_layers": 4,
    "sliding_window": 9, "global_head_dim": 32, "pad_token_id": 0, "rope_parameters": None,
    "attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    "layer_types": [*_LAYERS, "sliding_attention"], "sliding_window": 9, "pad_token_id": 0,
    "query_pre_attn_scalar": 20, "rope_parameters": None,
}  # fmt: skip
_SQUARE: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 51, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 24, "vision_use_head": False, "initializer_range": 0.1,
}  # fmt: skip
_AXIAL: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 51, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 20, "initializer_range": 0.1,
}  # fmt: skip
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_GEMMA_IDS: dict[str, Any] = {"boi_token_id": START, "eoi_token_id": END}
_GEMMA3_IDS: dict[str, Any] = _GEMMA_IDS | {"mm_tokens_per_image": 9}


_POSITIONS = ("pos_embed.weight", "position_embedding_table", "position_embedding.weight")


@cache
def vision_folder(kind: str, vocab_size: int = 128) -> Path:
    """The folder of a random float32 model of one of the `KINDS`, saved by transformers."""
    torch.manual_seed(3)
    tower, text = dict(_TOWER), _SIZES | {"rope_parameters": _rope([3, 3, 2])}
    text["vocab_size"] = vocab_size
    if kind == "qwen2_5_vl":
        tower = dict(_WINDOWED)
        text["rope_parameters"] = _rope([3, 3, 2], interleaved=False)
    elif kind == "gemma3":
        text, tower = text | _GEMMA3, dict(_SQUARE)
    elif kind.startswith("gemma4"):
        is_small = kind == "gemma4_small"
        text |= _GEMMA4_SMALL if is_small else _GEMMA4
        tower = _AXIAL | {"use_clipped_linears": is_small, "standardize": not is_small}
    elif kind.startswith("qwen3_5"):
        text = _SIZES | _MOE | _HYBRID | {"rope_parameters": {**_rope([2, 1, 1]),
                                                       "partial_rotary_factor": 0.5}}  # fmt: skip
    else:
        tower["deepstack_visual_indexes"] = [0, 2]
        text |= _MOE if kind.endswith("moe") else {}
    name = KINDS[kind]
    ids = _IDS | {"gemma3": _GEMMA3_IDS, "gemma4": _GEMMA_IDS}.get(kind[:6], {})
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=tower, **ids)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    for path, parameter in model.named_parameters():
        if "norm" in path and path.endswith("weight"):
            # Gemma 3 has the weights minus 1, but for those of its tower.
            is_centred = kind == "gemma3" and not path.startswith("model.vision_tower")
            parameter.data.uniform_(*((-0.5, 0.5) if is_centred else (0.5, 1.5)))
        elif path.endswith("bias"):
            parameter.data.normal_(0, 0.3)
        elif path.endswith("A_log"):
            parameter.data.uniform_(-2, 2)
        elif path.endswith("mm_input_projection_weight"):
            parameter.data.normal_(0, 0.15)
        elif path.endswith(
            ("pos_embed.weight", "position_embedding_table", "position_embedding.weight")
        ):
            parameter.data.normal_(0, 0.5)
    for path, buffer in model.named_buffers():
        if path.endswith(("_min", "_max")):  # bounds that cut some values
            bound = 0.2 + 0.8 * torch.rand(())
            buffer.data.fill_(bound if path.endswith("max") else -bound)
        elif path.endswith("std_bias"):
            buffer.data.normal_(0, 0.5)
        elif path.endswith(("std_scale", "layer_scalar")):
            buffer.data.uniform_(0.5, 1.5)
    _FOLDERS.append(TemporaryDirectory(prefix=kind))
    folder = Path(_FOLDERS[-1].name)
    model.save_pretrained(folder)
    return folder


_FOLDERS: list[TemporaryDirectory[str]] = []
"""They live as long as the process."""


@cache
def mtp_folder() -> Path:
    """A copy of Qwen3.5's folder with a random head for multi-token prediction."""
    _FOLDERS.append(TemporaryDirectory(prefix="mtp"))
    folder = Path(_FOLDERS[-1].name)
    source = vision_folder("qwen3_5")
    values = json.loads((source / "config.json").read_text())
    values["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(values))
    empty = load_model(folder, device=torch.device("cpu"), heads=("mtp",), load_format="dummy")
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(source / "model.safetensors")
    for slot in empty.checkpoint_slots():
        (name, *_), parts = slot.sources, len(slot.pieces)
        if name.startswith("mtp.") and parts == 1:
            drawn = torch.randn(slot.source_shape, generator=generator)
            tensors[name] = drawn * (0.02 if "norm" in name else 0.15)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _rope(sections: list[int], *, interleaved: bool = True) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": sections}
    return parameters | ({"mrope_interleaved": True} if interleaved else {})


@cache
def theirs(kind: str) -> Any:
    """The model of transformers."""
    loaded = getattr(transformers, f"{KINDS[kind]}ForConditionalGeneration").from_pretrained(
        vision_folder(kind), dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


def picture(seed: int, rows: int, columns: int) -> Image:
    """A random image of so many tokens each way."""
    shape = (rows * SIDE, columns * SIDE, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return image_of(pixels)


def picture_for(kind: str, seed: int, rows: int, columns: int) -> Image:
    """`picture`, or one of the only size that a model takes."""
    return picture(seed, 3, 3) if kind == "gemma3" else picture(seed, rows, columns)


def image_of(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Image:
    digest = blake2b(repr(pixels.shape).encode() + pixels.tobytes(), digest_size=32).digest()
    return Image(pixels, pixels.shape[0], pixels.shape[1], digest)


def prompt(*parts: Sequence[int] | Image) -> list[int]:
    """Text with images between the tokens that the model's template puts around them."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, Image):
            count = RULES.num_tokens(part.height, part.width)
            ids += [START, *[IMAGE] * count, END]
        else:
            ids += part
    return ids


def their_inputs(
    ids: Sequence[int], images: Sequence[Image], kind: str = "qwen3_vl"
) -> dict[str, Tensor]:
    """What transformers' model takes, with pixels by its Pillow processor."""
    tokens = torch.tensor([list(ids)])
    inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int()}
    if kind == "gemma3":
        inputs["token_type_ids"] = inputs.pop("mm_token_type_ids")
    if images and kind == "gemma3":
        halves: dict[str, Any] = {"image_mean": HALVES.mean, "image_std": HALVES.std}
        squares = Gemma3ImageProcessorPil(size={"height": 24, "width": 24}, **halves)
        found = squares([image.load() for image in images], return_tensors="pt")
        inputs["pixel_values"] = found["pixel_values"]
    elif images and kind.startswith("gemma4"):
        of_gemma = Gemma4ImageProcessorPil(
            patch_size=4, pooling_kernel_size=2, max_soft_tokens=70, do_resize=False
        )
        inputs |= of_gemma([image.load() for image in images], return_tensors="pt")
        del inputs["num_soft_tokens_per_image"]
    elif images:
        colours = CLIP if kind == "qwen2_5_vl" else HALVES
        processor = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2,
            image_mean=colours.mean, image_std=colours.std,
            size={"shortest_edge": 1, "longest_edge": 10**7},
        )  # fmt: skip
        inputs |= processor([image.load() for image in images], return_tensors="pt")
    return inputs


def their_logits(kind: str, ids: Sequence[int], images: Sequence[Image]) -> Tensor:
    """Transformers' logits [len(ids), vocab]."""
    with torch.inference_mode():
        logits: Tensor = theirs(kind)(**their_inputs(ids, images, kind)).logits[0]
    return logits
