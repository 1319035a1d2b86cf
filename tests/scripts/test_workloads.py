"""The benchmark's workloads must never change: figures of other engines were taken on them."""

from pathlib import Path

import pytest
import torch
from floors import expert_weights, floor_seconds, layer_params, mixers
from measuring import H100, Rates
from shapes import MODELS
from workloads import (
    PROMPT_VOCAB,
    WORKLOADS,
    BenchRequest,
    bare_model,
    model_config,
    prompt_vocab,
    requests,
    write_config,
)

from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.models.dense import DenseConfig


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "count", "prompt_tokens", "output_tokens", "last_id", "outputs"),
    [
        ("mixed", 256, 142_619, 151_173, 88152, (156, 955)),
        ("mixed1k", 1024, 563_810, 573_249, 122784, (765, 847)),
        ("decode", 512, 49_848, 524_288, 147350, (1024, 1024)),
        ("prefill", 512, 792_444, 8_192, 84455, (16, 16)),
        ("long", 64, 389_559, 16_384, 49119, (256, 256)),
        ("gsm8k", 256, 25_577, 49_925, 64277, (127, 299)),
        ("smoke", 16, 604, 560, 78126, (38, 46)),
    ],
)
def test_the_requests_are_those_of_the_comparison(
    name: str,
    count: int,
    prompt_tokens: int,
    output_tokens: int,
    last_id: int,
    outputs: tuple[int, int],
) -> None:
    load = requests(name)
    assert len(load) == count
    assert sum(len(r.prompt) for r in load) == prompt_tokens
    assert sum(r.output_len for r in load) == output_tokens
    assert load[-1].prompt[-1] == last_id
    assert (load[0].output_len, load[-1].output_len) == outputs


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_lengths_and_ids_are_in_their_ranges(name: str) -> None:
    load, shape = requests(name, vocab=64), WORKLOADS[name]
    for r in load:
        assert shape.input_lens[0] <= len(r.prompt) <= shape.input_lens[1]
        assert shape.output_lens[0] <= r.output_len <= shape.output_lens[1]
        assert 0 <= min(r.prompt) and max(r.prompt) < 64
    assert load == requests(name, vocab=64)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "name", "total", "prefill"),
    [
        ("qwen3-0.6b", "mixed", 5.8121, 0.1730),
        ("qwen3-8b", "mixed", 14.4239, 2.5438),
        ("qwen3-8b", "decode", 26.6016, 0.8784),
        ("qwen3-8b", "prefill", 15.1433, 14.4089),
        ("qwen3-30b-a3b", "mixed", 25.2376, 1.0338),
        ("qwen3-30b-a3b", "decode", 31.4161, 0.3471),
        ("qwen3-30b-a3b", "prefill", 6.8041, 6.1104),
        ("deepseek-v2-lite", "mixed", 12.4498, 0.8437),
        ("deepseek-v2-lite", "decode", 14.1473, 0.2787),
        ("deepseek-v2-lite", "prefill", 4.9911, 4.7125),
    ],
)
def test_the_floor_is_that_of_the_comparison(
    tmp_path: Path, model: str, name: str, total: float, prefill: float
) -> None:
    config = load_model_config(write_config(model, tmp_path))
    floor = floor_seconds(config, requests(name, prompt_vocab(config.vocab_size)), H100)
    assert floor.total == pytest.approx(total, abs=1e-4)
    assert floor.prefill == pytest.approx(prefill, abs=1e-4)


def test_the_floor_with_weights_in_fp8(tmp_path: Path) -> None:
    config = load_model_config(write_config("tiny", tmp_path))
    load = [BenchRequest([1] * 10, 3)]
    body, head = layer_params(config), config.hidden_size * config.vocab_size
    slow_memory = floor_seconds(config, load, Rates(1.0, 1e30), in_fp8=True)
    kv = mixers(config).kv_bytes * (11 + 12)
    assert slow_memory.decode == pytest.approx(2 * (body + 2 * head) + kv)
    slow_math = floor_seconds(config, load, Rates(1e30, 1.0), in_fp8=True)
    assert slow_math.prefill == pytest.approx(10 * body + mixers(config).attention_flops * 50)
    assert slow_math.decode == pytest.approx(2 * (body + 2 * head))


def test_the_floor_of_gpt_oss_with_experts_in_mxfp4(tmp_path: Path) -> None:
    config = load_model_config(write_config("gpt-oss-20b-bf16", tmp_path))
    load = [BenchRequest([1], 2)] * 512
    step = floor_seconds(config, load, Rates(4.1e12, 1e30), in_mxfp4=True).decode
    assert step == pytest.approx(3.07e-3, rel=0.01)
    whole = floor_seconds(config, load, Rates(4.1e12, 1e30)).decode
    experts = expert_weights(config).read(512) * (2 - 17 / 32)
    assert whole - step == pytest.approx(experts / 4.1e12)
    products = Rates(1e30, 1.0)  # in bfloat16 either way
    assert floor_seconds(config, load, products, in_mxfp4=True) == floor_seconds(
        config, load, products
    )


def test_the_floor_of_one_request_by_hand(tmp_path: Path) -> None:
    config = load_model_config(write_config("tiny", tmp_path))
    # A layer: q, k, v, o of 64 × (64 + 32 + 32 + 64) and three products of 64 × 128.
    assert layer_params(config) == 2 * (64 * 192 + 3 * 64 * 128)
    load = [BenchRequest([1] * 10, 3)]
    weights = layer_params(config) + 64 * 512
    kv_per_token = 2 * 2 * 2 * 16 * 2
    slow_memory = floor_seconds(config, load, Rates(1.0, 1e30))
    assert slow_memory.decode == pytest.approx(2 * 2 * weights + kv_per_token * (11 + 12))
    slow_math = floor_seconds(config, load, Rates(1e30, 1.0))
    assert slow_math.decode == pytest.approx(2 * 2 * weights)
    attention = 4 * 2 * 4 * 16 * 10 * 10 / 2
    assert slow_math.prefill == pytest.approx(2 * layer_params(config) * 10 + attention)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_each_model_is_one_that_the_engine_reads(tmp_path: Path, model: str) -> None:
    config = load_model_config(write_config(model, tmp_path / "new"))
    assert [config.architecture] == MODELS[model]["architectures"]
    sparse = ("a3b", "a4b", "moe", "hybrid", "deepseek", "latent", "oss", "nemotron")
    experts = any(part in model for part in sparse)
    assert (expert_weights(config).layers > 0) == experts
    assert (config.diffusion is not None) == ("sdar" in model)
    assert (config.vision is not None) == ("vl" in model)
    windows = any(config.family_as(DenseConfig).layer_windows)
    assert windows == (("gemma" in model and "full" not in model) or "oss" in model)
    longest = max(w.input_lens[1] + w.output_lens[1] for w in WORKLOADS.values())
    assert longest <= config.max_position_embeddings or "tiny" in model
    other = any(part in model for part in ("deepseek", "nemotron", "tiny"))
    assert other or config.vocab_size >= PROMPT_VOCAB


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "model",
    [
        "qwen3-8b",
        "qwen3-30b-a3b",
        "hybrid-35b-a3b",
        "nemotron-30b-a3b",
        "deepseek-v2-lite",
        "gemma3-27b",
        "gemma4-31b",
        "gemma4-26b-a4b",
    ],
)
def test_the_floor_counts_all_weights(model: str) -> None:
    config = model_config(model)
    experts = expert_weights(config)
    counted = layer_params(config) + experts.layers * experts.experts * experts.each
    counted += (1 if config.tie_word_embeddings else 2) * config.hidden_size * config.vocab_size
    made = bare_model(config, torch.device("meta"))
    assert made.num_parameters == pytest.approx(counted, rel=0.002)


def test_prompts_leave_out_the_ids_at_the_end_of_a_vocabulary() -> None:
    assert prompt_vocab(151_936) == PROMPT_VOCAB
    assert prompt_vocab(102_400) == 100_400 and prompt_vocab(512) == 512


def test_the_floor_of_experts_by_hand(tmp_path: Path) -> None:
    config = load_model_config(write_config("tiny-moe", tmp_path))
    # A layer: attention as in the dense model, and a router to 8 experts of three products.
    assert layer_params(config) == 2 * (64 * 192 + 64 * 8)
    experts = expert_weights(config)
    assert experts.of_token == 2 * 2 * 3 * 64 * 32
    assert experts.touched(1) == 2 and experts.touched(2) == pytest.approx(2 + 2 * 6 / 8)
    assert experts.read(1000) == pytest.approx(2 * 8 * 3 * 64 * 32)
    load = [BenchRequest([1], 2), BenchRequest([1], 2)]
    weights = layer_params(config) + 64 * 512 + experts.read(2)
    kv_per_token = 2 * 2 * 2 * 16 * 2
    slow_memory = floor_seconds(config, load, Rates(1.0, 1e30))
    assert slow_memory.decode == pytest.approx(2 * weights + kv_per_token * (2 + 2))


def test_the_floor_of_recurrences_by_hand(tmp_path: Path) -> None:
    config = load_model_config(write_config("tiny-hybrid", tmp_path))
    # Three recurrent layers: queries and keys of 2 · 16, values and gates of 4 · 16, two numbers
    # for each of 4 heads, and the output. One layer of attention, whose queries have gates. In all
    # of them a router to 8 experts, and a shared one.
    delta = 64 * (2 * 32 + 64 + 64 + 8 + 64)
    assert mixers(config).params == 3 * delta + 64 * (2 * 64 + 32 + 32 + 64)
    assert layer_params(config) == mixers(config).params + 4 * (64 * 8 + 3 * 64 * 32)
    state = 3 * 4 * 16 * 16
    load = [BenchRequest([1] * 10, 3)]
    weights = layer_params(config) + 64 * 512 + expert_weights(config).read(1)
    kv_per_token = 2 * 2 * 16 * 2
    slow_memory = floor_seconds(config, load, Rates(1.0, 1e30))
    read = 2 * 2 * weights + kv_per_token * (11 + 12) + 2 * 2 * 4 * state
    assert slow_memory.decode == pytest.approx(read)
    slow_math = floor_seconds(config, load, Rates(1e30, 1.0))
    of_token = 2 * (layer_params(config) + expert_weights(config).of_token) + 3 * 2 * state
    assert slow_math.prefill == pytest.approx(10 * of_token + 4 * 4 * 16 * 10 * 10 / 2)


def test_the_floor_of_windows_by_hand(tmp_path: Path) -> None:
    config = load_model_config(write_config("tiny-gemma3", tmp_path))
    # A layer of six has no window, the others see 24 tokens.
    assert layer_params(config) == 6 * (64 * 192 + 3 * 64 * 128)
    mixing = mixers(config)
    assert (mixing.kv_bytes, mixing.window_bytes, mixing.window) == (128, 5 * 128, 24)
    assert mixing.read_bytes([10, 100]) == 128 * 110 + 5 * 128 * (10 + 24)
    pair = 4 * 4 * 16
    assert mixing.prefill_flops(20) == 6 * pair * 20 * 20 / 2
    # The corner that the window has passed is left out.
    assert mixing.prefill_flops(100) == pair * 5000 + 5 * pair * (100 * 100 - 76 * 76) / 2
    load = [BenchRequest([1] * 100, 2)]
    slow_memory = floor_seconds(config, load, Rates(1.0, 1e30))
    weights = layer_params(config) + 64 * 512
    assert slow_memory.decode == pytest.approx(2 * weights + mixing.read_bytes([101]))


def test_heads_and_values_of_gemma4_differ_between_layers(tmp_path: Path) -> None:
    config = load_model_config(write_config("tiny-gemma4", tmp_path))
    # The layer without a window has heads of 32, one of keys, which are its values, too.
    assert mixers(config).params == 5 * 64 * 192 + 64 * 32 * (2 * 4 + 1)
    assert mixers(config).kv_bytes == 2 * 32 * 2
    config = load_model_config(write_config("gemma4-31b", tmp_path / "large"))
    whole = layer_params(config) + config.hidden_size * config.vocab_size
    assert whole == pytest.approx(30.7e9, rel=0.01)


def test_the_floor_of_latent_attention_by_hand(tmp_path: Path) -> None:
    config = load_model_config(write_config("tiny-latent", tmp_path))
    # Queries of 4 heads of 16 + 8, the latent of 32 and a key of 8, what expands it, the output.
    attention = 64 * 4 * 24 + 64 * 40 + 32 * 4 * (16 + 16) + 4 * 16 * 64
    assert mixers(config).params == 3 * attention
    # One dense layer, and two with a router to 8 experts and a shared one.
    assert layer_params(config) == 3 * attention + 3 * 64 * 128 + 2 * (64 * 8 + 3 * 64 * 32)
    assert mixers(config).kv_bytes == 3 * 2 * (32 + 8)
    assert mixers(config).attention_flops == 3 * 2 * 4 * (24 + 16)
    assert mixers(config).state_bytes == 0


def test_the_states_of_a_row_of_the_large_hybrid(tmp_path: Path) -> None:
    config = load_model_config(write_config("hybrid-35b-a3b", tmp_path))
    assert mixers(config).state_bytes == 60 * 2**20
    experts = expert_weights(config)
    total = layer_params(config) + experts.read(10**6) + 2 * 2048 * 248320
    assert total == pytest.approx(34.66e9, rel=1e-3)
