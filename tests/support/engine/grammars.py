"""A tokenizer, grammars compiled for it, and plain reading of masks."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint

LETTERS: dict[int, str] = bytes_to_unicode()
WORDS = (
    *('{"', '":', '",', '":"', '"}', '"a"', "ab", "abc", "th", "thi", "</", "</thi", "nk", "nk>"),
    *(
        ">\n",
        ">\n\n",
        ">{",
        '>{"',
        "\n\n",
        "\n{",
        "true",
        "12",
        "123",
        ", ",
        "é",
        "日本",
        "k>ab",
        ">>",
    ),
)
SPECIAL = ("<|end|>", "<|turn|>", "<|pad|>")
THINK = "</think>"
WIDTH = 331
"""Columns of the logits: wider than the tokenizer, and no multiple of 32."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "ab": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "ab"],
    "additionalProperties": False,
}
JSON = Constraint("json_schema", json.dumps(SCHEMA))
TAG = {
    "type": "tag",
    "begin": "<ab>",
    "content": {"type": "regex", "pattern": "[0-9]+"},
    "end": ">",
}


@cache
def make_tokenizer(think_is_special: bool = False) -> PreTrainedTokenizerFast:
    """All bytes, some longer tokens, three special tokens, and `</think>` as one added token."""
    vocab = {letter: i for i, letter in enumerate(LETTERS.values())}
    merges = []
    for word in WORDS:
        letters = "".join(LETTERS[byte] for byte in word.encode())
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocab:
                merges.append((letters[: end - 1], letters[end - 1]))
                vocab[letters[:end]] = len(vocab)
    raw = Tokenizer(models.BPE(vocab, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    think = AddedToken(THINK, special=think_is_special)
    raw.add_special_tokens([think]) if think_is_special else raw.add_tokens([think])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIAL[0])


def token_id(text: str) -> int:
    vocab = make_tokenizer().get_vocab()
    return vocab.get(text) or vocab["".join(LETTERS[byte] for byte in text.encode())]


def ids(*texts: str) -> list[int]:
    return [token_id(text) for text in texts]


END, TURN, PAD, THINK_ID = ids(*SPECIAL, THINK)
_BYTES = {letter: byte for byte, letter in LETTERS.items()}
TEXTS = [
    text.encode() if text in (*SPECIAL, THINK) else bytes(_BYTES[letter] for letter in text)
    for text in make_tokenizer().convert_ids_to_tokens(list(range(len(make_tokenizer()))))
]
PLAIN = [b"" if i in (END, TURN, PAD) else text for i, text in enumerate(TEXTS)]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), WIDTH, (END,))
