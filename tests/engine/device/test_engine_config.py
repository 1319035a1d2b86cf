"""The defaults of an engine that depend on the model and the device."""

import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig, Sizes

GIB = 2**30
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SPARSE = Sizes(57 * GIB, 6 * GIB, 140 * GIB, 1)
DENSE = Sizes(15 * GIB, 15 * GIB, 140 * GIB, 1)


@pytest.mark.parametrize(
    ("sizes", "device", "rows", "tokens"),
    [
        (SPARSE, CUDA, 512, 32768),
        (SPARSE._replace(width=4), CUDA, 256, 32768),
        (SPARSE._replace(row_states=1, cache_room=GIB), CUDA, 512, 16384),
        (SPARSE._replace(memory=80 * GIB), CUDA, 256, 8192),
        (DENSE, CUDA, 256, 8192),
        (SPARSE._replace(memory=0), CPU, 256, 2048),
        (DENSE._replace(memory=0), CPU, 256, 2048),
    ],
)
def test_batches_are_larger_where_rows_share_little(
    sizes: Sizes, device: torch.device, rows: int, tokens: int
) -> None:
    config = EngineConfig().resolve(device, sizes, 1024)
    assert (config.max_num_seqs, config.max_batched_tokens) == (rows, tokens)


def test_states_of_rows_take_a_share_of_the_room_for_caches() -> None:
    large = SPARSE._replace(row_states=GIB // 10, cache_room=50 * GIB)
    assert EngineConfig().resolve(CUDA, large, 1024).max_num_seqs == 312
    assert EngineConfig(max_num_seqs=400).resolve(CUDA, large, 1024).max_num_seqs == 400
    small = large._replace(row_states=GIB // 1000)
    assert EngineConfig().resolve(CUDA, small, 1024).max_num_seqs == 512
    none = large._replace(cache_room=0)
    assert EngineConfig().resolve(CUDA, none, 1024).max_num_seqs == 1


def test_what_the_user_says_holds() -> None:
    config = EngineConfig(max_num_seqs=7, max_batched_tokens=99).resolve(CUDA, SPARSE, 1024)
    assert (config.max_num_seqs, config.max_batched_tokens) == (7, 99)


def test_only_large_models_read_prompts_beside_decoding_rows() -> None:
    small = Sizes(GIB, GIB, 140 * GIB, 1)
    assert EngineConfig().resolve(CUDA, DENSE, 1024).chunk_tokens == 256
    assert EngineConfig().resolve(CUDA, small, 1024).chunk_tokens == 0
    assert EngineConfig().resolve(CPU, DENSE._replace(memory=0), 1024).chunk_tokens == 0
    assert EngineConfig(chunk_tokens=0).resolve(CUDA, DENSE, 1024).chunk_tokens == 0
