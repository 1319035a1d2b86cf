"""A fast tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from batchgen.engine.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The pattern of Llama 3 and Qwen2, which differ in how many digits go together."""
    return lambda: _split(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
    "deepseek-r1-qwen": _words(r"\p{N}"),
}
"""Value of `tokenizer.ggml.pre` → how text is cut before byte-level BPE."""


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast | None:
    """The tokenizer that the file describes, with its chat template; None if it has none.

    Raises:
        ValueError: its kind is not supported; the message lists those that are.
    """
    metadata = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = metadata.get("model", "none")
    if kind == "none":
        return None
    if kind not in _BUILDERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; "
            f"supported: {', '.join(_BUILDERS)}"
        )
    try:
        tokenizer = _BUILDERS[kind](metadata)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    tokens, types = metadata["tokens"], metadata["token_type"]
    for token_type, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, its_type in zip(tokens, types, strict=True)
                if its_type == token_type
            ]
        )
    _add_sequence_ends(tokenizer, metadata)
    named = {
        f"{name}_token": tokens[metadata[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in metadata
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = str(metadata.get("pre"))
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if "qwen" in pre:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_BUILDERS = {"gpt2": _byte_level_bpe}


def _add_sequence_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Let plain encoding put BOS before and EOS after the text where the file asks for it."""
    # Files of these two kinds may leave it out and still mean it.
    bos_default = metadata["model"] == "llama" or metadata.get("pre") == "llama-bpe"
    template, ends = ["$A"], []
    if metadata.get("add_bos_token", bos_default):
        ends.append((metadata["tokens"][metadata["bos_token_id"]], metadata["bos_token_id"]))
        template = [ends[-1][0], *template]
    if metadata.get("add_eos_token", False):
        ends.append((metadata["tokens"][metadata["eos_token_id"]], metadata["eos_token_id"]))
        template = [*template, ends[-1][0]]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=ends
        )
