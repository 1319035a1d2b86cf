"""A tokenizer of Harmony's tokens, and a tiny model that wanders through the format.

The model looks at the last token alone: its weights are a table of what may follow what.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FORMAT = [
    *("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|endoftext|>"),
]
WORDS = [
    *("assistant", "analysis", "commentary", "final", " to=functions.add", "json"),
    *("Hm", " so", " well", " yes", '{"a": 1}'),
]
NEXT = {
    "assistant": ["<|channel|>"],
    "<|start|>": ["assistant"],
    "<|channel|>": ["analysis", "analysis", "final", "commentary"],
    "analysis": ["<|message|>"],
    "final": ["<|message|>", "<|message|>", "<|constrain|>"],
    "commentary": ["<|message|>", " to=functions.add"],
    " to=functions.add": ["<|constrain|>"],
    "<|constrain|>": ["json"],
    "json": ["<|message|>"],
    "<|message|>": ["Hm", "Hm", '{"a": 1}'],
    "Hm": [" so", " well"],
    " so": [" well", "<|end|>", " yes"],
    " well": [" so", "<|end|>", "<|return|>"],
    " yes": ["<|end|>", "<|return|>", " so"],
    '{"a": 1}': ["<|call|>", "<|end|>"],
    "<|end|>": ["<|start|>"],
}
"""What may follow a token, each as often as it stands there."""
TEMPLATE = """
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}
{{- '<|start|>system<|message|>Today: ' + strftime_now('%Y-%m-%d') }}
{{- '\\nReasoning: ' + reasoning_effort + '<|end|>' }}
{%- for m in messages %}
    {%- set role = 'developer' if m.role == 'system' else m.role %}
    {{- '<|start|>' + role }}
    {%- if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}
    {{- '<|message|>' + m.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, the words of NEXT, and the special tokens of the format."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(FORMAT)
    raw.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|return|>")
    made.chat_template = TEMPLATE
    return made


def ids(text: str) -> list[int]:
    """The tokens of a text, in which tokens of the format stand by their names."""
    return list(tokenizer().encode(text, add_special_tokens=False))


def save_model(folder: Path) -> Path:
    """Save the model and its tokenizer; it names no stop ids besides EOS."""
    size = len(tokenizer()) + (-len(tokenizer())) % 8
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=ids("<|return|>")[0],
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = torch.zeros(size, size)
        for last, following in NEXT.items():
            for word in following:
                table[ids(word)[0], ids(last)[0]] += 1
        # The norm makes a one-hot vector sqrt(size) long; what must not follow is e^12 less likely.
        model.lm_head.weight.copy_((table + 6e-6).log() / size**0.5)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
