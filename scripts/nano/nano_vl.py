"""nano_vl: Qwen3-VL's modules of transformers, their configuration, and a batch's way through."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from nano_learning import (
    IM_END_ID,
    PAD_ID,
    TEXT_CONFIG,
    Batch,
    answer_targets,
    draw_weights,
    mean_loss,
)
from nano_tokenizer import byte_tokenizer
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
VISION_START_ID, VISION_END_ID, IMAGE_ID, VIDEO_ID = range(259, 263)
PATCH, MERGE = 16, 2
FACTOR = PATCH * MERGE
"""Pixels of a token's side."""
NOISE = 6.0
"""The standard deviation of the noise of training pictures, of 255."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": MERGE,
    "patch_size": PATCH,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 64 * FACTOR**2, "shortest_edge": FACTOR**2},
    "temporal_patch_size": 2,
}
"""What preprocessor_config.json says: pictures have 1 to 64 tokens."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(SPECIALS, TEMPLATE)


def model_config(args: Namespace) -> dict[str, Any]:
    """Return the contents of config.json."""
    text = TEXT_CONFIG | {
        "model_type": "qwen3_vl_text",
        "bos_token_id": PAD_ID,
        "hidden_size": args.hidden_size,
        "intermediate_size": 8 * args.hidden_size // 3,
        "num_attention_heads": 4,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            "mrope_section": [12, 10, 10],
        },
    }
    vision = {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": [0, 1],
        "depth": args.depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": args.width,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4 * args.width,
        "num_heads": args.width // 32,
        "num_position_embeddings": 256,
        "out_hidden_size": args.hidden_size,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "eos_token_id": IM_END_ID,
        "image_token_id": IMAGE_ID,
        "pad_token_id": PAD_ID,
        "text_config": text,
        "tie_word_embeddings": True,
        "video_token_id": VIDEO_ID,
        "vision_config": vision,
        "vision_end_token_id": VISION_END_ID,
        "vision_start_token_id": VISION_START_ID,
    }


class PictureModel:
    """The model in training: pictures of one size go through the tower together."""

    def __init__(self, args: Namespace) -> None:
        self.config = model_config(args)
        self.files = {"preprocessor_config": PROCESSOR}
        self.facts: dict[str, Any] = {}
        self.right = torch.zeros(())
        """The share of right rows of the last batch that was learnt from."""
        AttentionInterface.register("by_picture", _attention_by_picture)
        config = Qwen3VLConfig(**self.config | {"dtype": "float32"})
        config._attn_implementation = "sdpa"
        self.module: Any = Qwen3VLForConditionalGeneration(config).float()
        self.module.model.visual.config._attn_implementation = "by_picture"
        self.module.train()
        depth = {True: args.depth, False: args.layers}
        draw_weights(self.module, args.seed, lambda name: depth["visual" in name], _std)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Compute nats per token of the answers; pictures get noise."""
        pixels = tuple(_noised(each, generator) for each in batch.pixels)
        logits = self.logits(batch._replace(pixels=pixels))
        self.right = right_rows(logits.detach(), batch).float().mean()
        return mean_loss(logits, answer_targets(batch))

    def logits(self, batch: Batch) -> Tensor:
        """Compute logits [B, N, vocabulary]."""
        model = self.module.model
        embedded = model.language_model.embed_tokens(batch.ids)
        layers, seen = None, batch.ids == IMAGE_ID
        if batch.pixels:
            features = [self.tower(pixels) for pixels in batch.pixels]
            first, *layers = [
                torch.cat(each, dim=1).flatten(0, 1) for each in zip(*features, strict=True)
            ]
            embedded = embedded.masked_scatter(seen[..., None], first.to(embedded.dtype))
        hidden = model.language_model(
            inputs_embeds=embedded,
            position_ids=batch.positions,
            visual_pos_masks=seen,
            deepstack_visual_embeds=layers,
            use_cache=False,
        ).last_hidden_state
        return self.module.lm_head(hidden)  # type: ignore[no-any-return]

    def tower(self, pixels: Tensor) -> list[Tensor]:
        """Compute what the language model gets of pictures [B, height, width, 3] uint8: their
        embeddings and, for each deepstack layer, what is added, [B, tokens, hidden_size] each."""
        visual = self.module.model.visual
        count, height, width, _ = pixels.shape
        rows, cells = height // PATCH, width // PATCH
        values = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        # Patches stand in the order of tokens: the four of a token are beside each other.
        shape = (count, 3, rows // MERGE, MERGE, PATCH, cells // MERGE, MERGE, PATCH)
        patches = values.view(shape).permute(0, 2, 5, 3, 6, 1, 4, 7)
        patches = patches.reshape(count * rows * cells, 3, 1, PATCH, PATCH)
        hidden = visual.patch_embed(patches.expand(-1, -1, 2, -1, -1).flatten(1))
        row, cell = _places(rows, cells, pixels.device)
        hidden = hidden + _table(visual.pos_embed.weight, row, cell, rows, cells).repeat(count, 1)
        head = hidden.shape[1] // visual.config.num_heads
        rates = 10000 ** -(torch.arange(0, head // 2, 2, device=row.device) / (head // 2))
        angles = torch.cat([row[:, None] * rates, cell[:, None] * rates], dim=1).repeat(count, 2)
        ends = torch.tensor([0, len(hidden)], dtype=torch.int32)
        layers: list[Tensor] = []
        for index, block in enumerate(visual.blocks):
            hidden = block(
                hidden,
                cu_seqlens=ends,
                position_embeddings=(angles.cos(), angles.sin()),
                patches=rows * cells,
            )
            if index in self.config["vision_config"]["deepstack_visual_indexes"]:
                layers.append(visual.deepstack_merger_list[len(layers)](hidden))
        return [each.view(count, -1, each.shape[1]) for each in (visual.merger(hidden), *layers)]


def _places(rows: int, cells: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch of a picture, in the order of tokens."""
    grid = torch.arange(rows * cells, device=device).view(rows, cells)
    grid = grid.view(rows // MERGE, MERGE, cells // MERGE, MERGE).transpose(1, 2).flatten()
    return grid // cells, grid % cells


def _table(weight: Tensor, row: Tensor, cell: Tensor, rows: int, cells: int) -> Tensor:
    """The learned positions of patches, read bilinearly from their square table."""
    side = math.isqrt(len(weight))
    by_row, by_column = (
        _shares(place, count, side) for place, count in ((row, rows), (cell, cells))
    )
    return (by_row[:, :, None] * by_column[:, None, :]).flatten(1) @ weight


def _shares(place: Tensor, count: int, side: int) -> Tensor:
    """How much of each of the table's `side` lines a place of `count` takes, [places, side]."""
    at = torch.linspace(0, side - 1, count, device=place.device)[place]
    low = at.floor().long()
    high = (low + 1).clamp(max=side - 1)
    upper = (at - low)[:, None]
    return F.one_hot(low, side) * (1 - upper) + F.one_hot(high, side) * upper


def _attention_by_picture(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    patches: int = 0,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention [1, heads, B·patches, d] in which each run of `patches` sees itself alone."""

    def apart(states: Tensor) -> Tensor:
        return states[0].view(states.shape[1], -1, patches, states.shape[3]).transpose(0, 1)

    states = (apart(query), apart(key), apart(value))
    out = F.scaled_dot_product_attention(*states, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)[None], None


def _noised(pixels: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(pixels.shape, device=pixels.device, generator=generator)
    return (pixels + NOISE * noise).round().clamp(0, 255).to(torch.uint8)


def _std(name: str, weight: Tensor) -> float:
    """Rows of the tables begin small, products with a variance of one over their inputs."""
    tables = {"embed_tokens": 0.06, "pos_embed": 0.2}
    return tables.get(name.split(".")[-2], float(weight[0].numel() ** -0.5))


def right_rows(logits: Tensor, batch: Batch) -> Tensor:
    """Tell for each row whether every token of its answer is the likeliest one, [B] bool.

    That is the case exactly if greedy decoding gives the answer.
    """
    targets = answer_targets(batch)
    return ((logits[:, :-1].argmax(-1) == targets) | (targets == -100)).all(1)
