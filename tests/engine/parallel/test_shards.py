"""Which part of each weight a rank holds, without any process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.engine.layers.embedding import rows_of_rank, vocab_slot
from batchgen.engine.loading.config_file import LoadFormat
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from tests.support.engine.engine_rows import weights

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")


def load(folder: Path, rank: int = 0, size: int = 1, load_format: LoadFormat = "auto") -> CausalLM:
    parallel = TensorParallel(rank, size)
    return load_model(folder, device=CPU, load_format=load_format, parallel=parallel)


def squares(model: CausalLM) -> dict[str, tuple[float, bool]]:
    """The sum of squares of each piece, and whether a rank has only some of it."""
    slots = [slot for slot in model.checkpoint_slots() if len(slot.pieces) == 1]
    return {
        slot.pieces[0]: (
            float(slot.parameter.double().square().sum()),
            slot.elsewhere or slot.shard is not None,
        )
        for slot in slots
    }


@pytest.mark.quick(5, thorough=3)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "kind", ["qwen2_moe", "qwen3_next", "qwen3_5", "deepseek_v2", "minimax_m2", "gpt_oss"]
)
def test_the_ranks_hold_every_value_once(
    tiny_model: TinyModel, kind: str, load_format: LoadFormat
) -> None:
    folder = tiny_model(kind, vocab_size=129)
    whole = squares(load(folder, load_format=load_format))
    first, second = (squares(load(folder, rank, 2, load_format)) for rank in range(2))
    assert first.keys() == second.keys() == whole.keys()
    divided = 0
    for name, (expected, _) in whole.items():
        (one, is_divided), (two, _) = first[name], second[name]
        # Norms, routers and biases behind the sum of all ranks are on each of them.
        assert (one + two if is_divided else one) == pytest.approx(expected, rel=1e-6)
        divided += is_divided
    assert divided > len(whole) // 3


@pytest.mark.parametrize(
    ("vocab", "size", "rows"), [(151_936, 4, 40_960), (131_080, 8, 16_385), (32_001, 2, 16_001)]
)
def test_ranks_have_whole_chunks_of_a_large_vocabulary(vocab: int, size: int, rows: int) -> None:
    taken = []
    for rank in range(size):
        parallel = TensorParallel(rank, size)
        assert rows_of_rank(vocab, parallel) == rows
        weight = torch.empty((rows, 1))
        slot = vocab_slot("lm_head.weight", weight, vocab, parallel)
        assert slot.shard is not None
        ((start, end),) = slot.shard.ranges
        assert slot.parameter.shape == (end - start, 1) and start == rank * rows < end
        taken += [start, end]
    assert taken[0] == 0 and taken[-1] == vocab and taken[1:-1:2] == taken[2::2]
    assert rows_of_rank(vocab, ALONE) == vocab


def test_ranks_without_a_key_head_of_their_own_have_the_same(tiny_model: TinyModel) -> None:
    models = [load(tiny_model("qwen3"), rank, 4) for rank in range(4)]
    name = "model.layers.0.self_attn.k_proj.weight"
    keys = [weights(model)[name] for model in models]
    assert keys[0].shape == (16, 64)
    assert torch.equal(keys[0], keys[1]) and torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[0], keys[2])


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        ("qwen3", 3, "does not divide the model's num_attention_heads 4: choose 1, 2 or 4"),
        ("qwen3_moe", 16, "num_attention_heads 4"),
        ("qwen3_next", 4, "does not divide the model's linear_num_key_heads 2: choose 1 or 2"),
        ("deepseek_v2", 3, "num_attention_heads 4"),
    ],
)
def test_models_that_cannot_be_divided(
    tiny_model: TinyModel, kind: str, size: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        load(tiny_model(kind), 0, size)


def test_key_heads_and_ranks_must_divide_one_another() -> None:
    with pytest.raises(ValueError, match="not a multiple of the model's num_key_value_heads 4"):
        TensorParallel(0, 6).kv_heads(4)
    assert [TensorParallel(rank, 8).kv_heads(4)[0] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [TensorParallel(rank, 2).kv_heads(4) for rank in range(2)] == [(0, 2), (2, 4)]


def test_a_tensor_of_another_shape_is_refused_on_every_rank(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("qwen3")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = torch.cat((tensors[name], tensors[name]), 1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    for rank in range(2):
        with pytest.raises(ValueError, match=rf"{name} has shape .* says 96 on axis 1"):
            load(tmp_path, rank, 2)


def test_a_shard_of_several_ranges() -> None:
    shard = TensorParallel(1, 2).shard(0, 4, 2)
    assert shard == Shard(0, 6, ((2, 4), (5, 6)))
    whole = torch.arange(12).view(6, 2)
    assert shard.take(whole).tolist() == [[4, 5], [6, 7], [10, 11]]
    assert shard.whole_shape([3, 2]) == [6, 2] and shard.length == 3
