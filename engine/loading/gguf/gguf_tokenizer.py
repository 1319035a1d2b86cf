"""Builds a fast tokenizer from the metadata of a GGUF file. `load_tokenizer` calls
`gguf_tokenizer`."""

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

from batchgen.engine.loading.gguf.gguf_file import GGUFFile

# The kinds of tokens in `tokenizer.ggml.token_type`.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
"""The element types of lists in the metadata."""


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split text into the matches of a regular expression, then map its bytes to characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    """Split text by the pattern of GPT-2."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """Split text into single digits, and the rest by the pattern of GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Return a function that splits text by the pattern of Llama 3 and Qwen2; `digits` is the part
    in which they differ."""
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
"""Maps the value of `tokenizer.ggml.pre` to the pre-tokenizer of byte-level BPE."""


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast | None:
    """Build the tokenizer that the file describes, with its chat template; None if the file has
    none. Raises ValueError if its kind is not supported, or its metadata are incomplete or of wrong
    types."""
    metadata = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = metadata.get("model", "none")
    if kind == "none":
        return None
    if kind not in [*_BUILDERS]:  # a list, because a damaged file's value may be unhashable
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; "
            f"supported: {', '.join(_BUILDERS)}"
        )
    try:
        _check_types(metadata)
        tokenizer = _BUILDERS[kind](metadata)
        _add_tokens(tokenizer, metadata)
        _add_sequence_ends(tokenizer, metadata)
    except KeyError as error:
        raise ValueError(
            f"{file.path}: metadata tokenizer.ggml.{error.args[0]} is missing"
        ) from error
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"{file.path}: its tokenizer cannot be built: {error}") from error
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"{file.path}: metadata tokenizer.chat_template is not a string")
    named = {
        f"{name}_token": metadata["tokens"][metadata[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in metadata
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _check_types(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, for metadata of a wrong type, or an id that is not in the
    vocabulary."""
    for key, kind in _LISTS.items():
        value = metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ValueError(f"metadata tokenizer.ggml.{key} is not a list of {kind.__name__}")
    number = len(metadata["tokens"])
    for key, value in metadata.items():
        if key.startswith("add_") and not isinstance(value, bool):
            raise ValueError(f"metadata tokenizer.ggml.{key} is {value!r:.60}, and must be a bool")
        if key.endswith("_token_id") and (type(value) is not int or not 0 <= value < number):
            raise ValueError(
                f"metadata tokenizer.ggml.{key} is {value!r:.60}, and must be the id of one of the "
                f"{number} tokens"
            )


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build a byte-level BPE tokenizer, the kind of GPT-2, Llama 3 and Qwen."""
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


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build SentencePiece BPE: merges are ranked by the scores of the joined tokens."""
    tokens, scores, types = metadata["tokens"], metadata["scores"], metadata["token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = [
        (-score, vocab[token[:cut]], vocab[token[cut:]])
        for token, score, its_type in zip(tokens, scores, types, strict=True)
        if its_type == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(ranked)]
    unknown = tokens[metadata["unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


_BUILDERS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add control and user-defined tokens, which are matched before the text is split."""
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, token_type in zip(
                    metadata["tokens"], metadata["token_type"], strict=True
                )
                if token_type == kind
            ]
        )


def _add_sequence_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Make encoding add BOS before the text and EOS after it, if the file asks for it."""
    # Files of these two kinds may omit the key although a BOS is intended.
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
