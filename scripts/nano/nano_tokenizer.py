"""The tokenizers of the nano models: a token for each byte, and special ones."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer(specials: tuple[str, ...], template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte, whose id is its value, and the special tokens,
    of which the first is for padding and the third ends a message."""
    # The characters of bytes in byte-level vocabularies (GPT-2, Radford et al. 2019): a printable
    # byte has its Latin-1 character; the others have those from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    chars = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    raw = Tokenizer(models.BPE({char: byte for byte, char in enumerate(chars)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=specials[2],
        pad_token=specials[0],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = template
    return tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer of nano_sdar and nano_hybrid."""
    tokenizer = byte_tokenizer(SPECIALS, _CHATML)
    tokenizer.mask_token = SPECIALS[3]
    return tokenizer
