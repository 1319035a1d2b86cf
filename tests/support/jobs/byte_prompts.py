"""Prompts of rows by a tokenizer whose tokens are bytes."""

from __future__ import annotations

from typing import Any

from datasets import Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchgen.config.groups.prompt_config import ChatPromptConfig, PromptConfig, TextPromptConfig
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import Prompt, build_prompt

BOS = 256
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking is defined and not "
    "enable_thinking %}<no_think>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """A token per byte, in the order of the byte-level alphabet, then `<s>`, put before texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", BOS)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = chat_template
    return fast


TOKENIZER = byte_tokenizer()
COLUMNS = ("q", "note", "n", "items", "messages", "ids", "two words")


def build(config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None = TOKENIZER) -> Prompt:
    columns = dict.fromkeys(COLUMNS, Value("string"))
    return build_prompt(config, tokenizer, vocab_size=257, columns=columns)


def row(**fields: Any) -> Row:
    return Row(0, "0", fields)


def text(template: str) -> TextPromptConfig:
    return TextPromptConfig(text=template, add_special_tokens=False)


def chat(template: str) -> Prompt:
    return build(ChatPromptConfig(user="{{ q }}"), byte_tokenizer(template))
