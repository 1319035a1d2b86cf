"""The tokenizer of the nano models: a token for each byte, four special ones, a ChatML template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"
SPECIALS = (PAD, IM_START, IM_END, MASK)
PAD_ID, IM_START_ID, IM_END_ID, MASK_ID = range(256, 260)
VOCAB_SIZE = 264
"""Rows of the embedding: 260 tokens, and 4 unused ones to a multiple of 8, for tensor cores."""

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer. The id of a byte is its value, so any text can be encoded and decoded."""
    raw = Tokenizer(models.BPE({char: byte for byte, char in enumerate(_byte_chars())}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=IM_END,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = _CHATML
    return tokenizer


def _byte_chars() -> list[str]:
    """Return the character for each byte in byte-level vocabularies (GPT-2, Radford et al. 2019).

    A printable byte has its Latin-1 character; the others have those from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
