"""SDAR: our block-causal forward against transformers' Qwen3 under an explicit mask; its config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.dense import DenseConfig
from batchgen.engine.models.model_config import Diffusion
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.strategies.ar.strategy import ARStrategy

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB, MASK_ID = 128, 127
BLOCK_SIZE = 16
Span = tuple[int, int, int]
"""Row, first position, position after the last."""
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 0,
    "layer_types": None,
}
"""A configuration whose layers all have windows."""
PUBLISHED = {
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "attn_implementation": "flex_attention",
    "debug": False,
    "ep_size": 1,
    "fuse_cross_entropy": True,
    "micro_forward": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "skip_checkpoint": False,
    "sliding_window": None,
    "dtype": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_deepep": False,
}
"""What the config.json of JetLM/SDAR-4B-Chat has beside Qwen3's fields, or writes differently."""


class PagedRows:
    """Rows that a runner reads, forward by forward; their KV blocks are mixed up and full of what
    other rows left.
    """

    def __init__(self, model: CausalLM, block_length: int, lengths: Sequence[int]) -> None:
        self.device = model.device
        width = -(-max(lengths) // BLOCK_SIZE)
        num_blocks = len(lengths) * width + 1
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0))
        self._tables = (order + 1).view(len(lengths), width)
        caches = ModelUse(model, (1,)).caches(CacheSizes(num_blocks, BLOCK_SIZE, 0))
        for cache in caches.layers:
            assert isinstance(cache, KVCache)
            for plane in cache[:2]:
                plane.normal_(std=3.0, generator=torch.Generator(model.device).manual_seed(1))
        self.runner = ModelRunner(model, caches, block_length)

    def inputs(self, spans: Sequence[Span], ids: Sequence[list[int]]) -> ModelInputs:
        """The keys of the tokens of these spans of rows."""
        lens = np.array([end - start for _, start, end in spans])
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        return ModelInputs(
            torch.tensor([i for part in ids for i in part], device=self.device),
            torch.tensor(positions, device=self.device),
            self._tables[[row for row, _, _ in spans]].to(self.device),
            lens,
            np.array([end for _, _, end in spans]),
        )

    def prefill(self, spans: Sequence[Span], ids: Sequence[list[int]]) -> Tensor:
        """[T, vocab]."""
        rows: npt.NDArray[np.int64] = np.arange(len(spans))
        inputs = self.inputs(spans, ids)
        prefill = PrefillInputs(inputs, rows)
        output = self.runner.prefill(prefill)  # the last layer for the rows' last tokens only
        hidden = self.runner.prefill(prefill._replace(all_hidden=True)).hidden
        assert hidden is not None
        logits = self.runner.compute_logits(hidden).cpu()
        ends = np.cumsum([end - start for _, start, end in spans]) - 1
        torch.testing.assert_close(output.logits.cpu(), logits[ends], atol=1e-5, rtol=1e-5)
        return logits


def block_causal_logits(folder: Path, rows: Sequence[list[int]], block_length: int) -> list[Tensor]:
    """transformers' logits, [len(row), vocab] float32 of each row."""
    model = Qwen3ForCausalLM.from_pretrained(
        folder, config=_qwen3_config(folder), dtype=torch.float32, attn_implementation="eager"
    )
    logits = []
    for row in rows:
        block = torch.arange(len(row)) // block_length
        hidden = block[None, :] > block[:, None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            output = model(torch.tensor([row]), attention_mask=mask[None, None])
        logits.append(output.logits[0])
    return logits


def _qwen3_config(folder: Path) -> Qwen3Config:
    values = json.loads((folder / "config.json").read_text())
    config: Qwen3Config = Qwen3Config.from_dict(values | {"model_type": "qwen3"})
    return config


def random_rows(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def load(folder: Path, device: str = "cpu") -> CausalLM:
    model = load_model(folder, device=torch.device(device), dtype=torch.float32)
    model.pack()
    return model


def equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.quick(2, thorough=4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_length", [2, 4, 8, 32])
@pytest.mark.parametrize("chunk_blocks", [None, 1, 2, 3])
def test_logits_equal_qwen3_under_a_block_causal_mask(
    block_length: int, chunk_blocks: int | None, device: str, tiny_model: TinyModel
) -> None:
    """Prompts of all lengths mod block_length in one batch, whole and in chunks of whole blocks."""
    folder = tiny_model("sdar", num_key_value_heads=1)
    # Shorter than a block, and longer by some blocks.
    lengths = [n for r in range(block_length) for n in (r, r + (1 + r % 3) * block_length) if n]
    rows = random_rows(lengths)
    paged = PagedRows(load(folder, device), block_length, lengths)
    ours = [torch.empty(0, VOCAB) for _ in rows]
    chunk = max(lengths) if chunk_blocks is None else chunk_blocks * block_length
    for start in range(0, max(lengths), chunk):
        spans = [(i, start, min(start + chunk, n)) for i, n in enumerate(lengths) if n > start]
        logits = paged.prefill(spans, [rows[i][a:b] for i, a, b in spans])
        for (i, _, _), part in zip(spans, logits.split([b - a for _, a, b in spans]), strict=True):
            ours[i] = torch.cat((ours[i], part))
    for row, theirs in zip(ours, block_causal_logits(folder, rows, block_length), strict=True):
        equal(row, theirs)


@pytest.mark.quick(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_length", [2, 4, 8, 32])
def test_denoising_and_commit_forwards_equal_qwen3(
    block_length: int, device: str, tiny_model: TinyModel
) -> None:
    """Forwards of one block of each row write its places again and again: masks, then tokens; then
    one commits a block and denoises the next one at once.
    """
    folder, size = tiny_model("sdar"), block_length
    blocks = [1, 3, 2]  # of context
    rows = random_rows([(n + 2) * size for n in blocks])
    paged = PagedRows(load(folder, device), size, [len(row) for row in rows])
    paged.prefill(
        [(i, 0, n * size) for i, n in enumerate(blocks)],
        [row[: n * size] for row, n in zip(rows, blocks, strict=True)],
    )
    for row, n in zip(rows, blocks, strict=True):
        row[(n + 1) * size :] = [MASK_ID] * size
    final = [row.copy() for row in rows]
    for step, width in (("masked", 1), ("half", 1), ("fused", 2)):
        for row, whole, n in zip(rows, final, blocks, strict=True):
            shown = {"masked": 0, "half": size // 2, "fused": size}[step]
            start = n * size
            row[start : start + size] = whole[start : start + shown] + [MASK_ID] * (size - shown)
        spans = [(i, n * size, (n + width) * size) for i, n in enumerate(blocks)]
        read = [rows[i][a:b] for i, a, b in spans]
        ours = paged.runner.decode(paged.inputs(spans, read)).logits.cpu()
        theirs = block_causal_logits(folder, [rows[i][:b] for i, _, b in spans], size)
        equal(ours, torch.cat([t[-width * size :] for t in theirs]))


def test_a_decode_step_beside_a_prefill_is_block_causal(tiny_model: TinyModel) -> None:
    folder, size = tiny_model("sdar"), 4
    rows = random_rows([9, 14])
    paged = PagedRows(load(folder), size, [9, 14])
    paged.prefill([(0, 0, 8)], [rows[0][:8]])
    decode = paged.inputs([(0, 8, 9)], [rows[0][8:]])
    prefill = paged.inputs([(1, 0, 14)], [rows[1]])
    decoded, prefilled = paged.runner.mixed(decode, PrefillInputs(prefill, np.array([0]), True))
    assert prefilled.hidden is not None
    ours = torch.cat((decoded.logits, paged.runner.compute_logits(prefilled.hidden)))
    theirs = block_causal_logits(folder, rows, size)
    equal(ours, torch.cat((theirs[0][8:], theirs[1])))


def edit_config(folder: Path, target: Path, **changes: Any) -> Path:
    """A folder with only a config.json; a change to None removes the key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    target.mkdir()
    kept = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


def test_a_published_configuration_is_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = edit_config(tiny_model("sdar"), tmp_path / "m", **PUBLISHED)
    config = load_model_config(folder)
    assert config.architecture == "SDARForCausalLM"
    family = config.family_as(DenseConfig)
    assert config.dtype == torch.bfloat16 and family.rope.rope_theta == 1e6
    assert family.qk_norm and not family.qkv_bias
    assert config.diffusion == Diffusion(mask_token_id=MASK_ID, block_length=None)
    trained = edit_config(folder, tmp_path / "n", block_size=8, block_causal_prompt=True)
    assert load_model_config(trained).diffusion == Diffusion(mask_token_id=MASK_ID, block_length=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3', and .* SDARForCausalLM .* 'sdar'"),
        ({"mask_token_id": VOCAB}, "mask_token_id 128 is not in the vocabulary of 128"),
        ({"mask_token_id": -1}, "mask_token_id -1 is not in the vocabulary"),
        ({"mask_token_id": "<|MASK|>"}, "mask_token_id"),
        ({"mask_token_id": None}, "neither config.json .*'mask_token_id'.* add it to config.json"),
        ({"block_size": 1}, "block_length is 1; it must be over 1"),
        ({"block_size": "4"}, "block_size"),
        (WINDOWS, "sliding-window attention"),
        ({"use_regular_causal": True}, "use_regular_causal.* is not supported"),
        ({"block_causal_prompt": False}, "block_causal_prompt.* is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "the checkpoint is quantized"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_named(
    changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = edit_config(tiny_model("sdar"), tmp_path / "m", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_model_config(folder)
    assert str(folder) in str(error.value)


def write_tokenizer(folder: Path, *, added: list[str], **special: str) -> None:
    """With the class and the foreign code that published tokenizers name."""
    vocab = {f"t{i}": i for i in range(100)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, "t0")))
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.add_special_tokens({**special})
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    code = {"auto_map": {"AutoTokenizer": ["tokenization_qwen2.Qwen2Tokenizer", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | code))


def test_the_tokenizer_names_the_mask_where_the_configuration_does_not(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = edit_config(tiny_model("sdar"), tmp_path / "m", **PUBLISHED, mask_token_id=None)
    write_tokenizer(folder, added=["<|a|>", "<|MASK|>", "<|b|>"])
    assert load_model_config(folder).diffusion == Diffusion(mask_token_id=101, block_length=None)
    write_tokenizer(folder, added=["<|a|>", "<|MASK|>", "<|b|>"], mask_token="<|b|>")
    assert load_model_config(folder).diffusion == Diffusion(mask_token_id=102, block_length=None)
    write_tokenizer(folder, added=["<|a|>"])
    with pytest.raises(ValueError, match=r"neither config.json .* nor the tokenizer"):
        load_model_config(folder)
    said = edit_config(folder, tmp_path / "n", mask_token_id=5)
    write_tokenizer(said, added=["<|MASK|>"])
    assert load_model_config(said).diffusion == Diffusion(mask_token_id=5, block_length=None)


def names(model: CausalLM) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What each of the model's weights is called, and which tensors of a checkpoint fill it."""
    return [(slot.pieces, slot.sources) for slot in model.checkpoint_slots()]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_have_the_names_of_qwen3(tied: bool, tiny_model: TinyModel, tmp_path: Path) -> None:
    sdar = load_model(tiny_model("sdar", tie_word_embeddings=tied), device=CPU)
    qwen3 = load_model(tiny_model("qwen3", tie_word_embeddings=tied), device=CPU)
    assert type(sdar).__name__ == "SDARForCausalLM"
    assert names(sdar) == names(qwen3)
    for name, parameter in qwen3.named_parameters():
        assert torch.equal(parameter, sdar.get_parameter(name))
    assert sdar.lm_head is not None
    assert (sdar.lm_head.weight is sdar.model.embed_tokens.weight) == tied

    cut = tmp_path / "cut"
    shutil.copytree(tiny_model("sdar", tie_word_embeddings=tied), cut)
    tensors = load_file(cut / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, cut / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.1\.self_attn\.q_norm"):
        load_model(cut, device=CPU)


def test_dummy_weights_need_a_configuration_only(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = edit_config(tiny_model("sdar"), tmp_path / "m", **PUBLISHED)
    model = load_model(folder, device=CPU, load_format="dummy")
    assert model.dtype == torch.bfloat16
    assert model.lm_head is not None
    assert model.lm_head.weight.float().std() > 0.01


def test_gguf_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "sdar")
    writer.add_tensor("t", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'sdar' is not supported; supported: llama, qwen2, qwen3"):
        load_model_config(path)


def test_ar_refuses_a_diffusion_model(tiny_model: TinyModel) -> None:
    config = EngineConfig(max_num_seqs=2, kv_cache_gib=0.01)
    with pytest.raises(ValueError, match=r"SDARForCausalLM is a diffusion model.* strategy=dllm"):
        LLMEngine(load_model(tiny_model("sdar"), device=CPU), None, (), ARStrategy(), config)
    LLMEngine(load_model(tiny_model("qwen3"), device=CPU), None, (), ARStrategy(), config)
