"""Every family of models, and every feature that some families have, from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.__main__ import run_command
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.models.model_registry import MODELS, model_class
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from tests.support.engine.families import ARCHITECTURES, CANVAS, DELTA, DIFFUSION, VISION
from tests.support.engine.fp8_checkpoints import write_fp8
from tests.support.engine.gguf_files import write_gguf
from tests.support.engine.qwen_mtp import TheirHead
from tests.support.jobs.real_job import VOCAB, overrides, save_tokenizer

TinyModel = Callable[..., Path]
SHORT = ("dataset.limit=2", "sampling.max_new_tokens=6", "sampling.n=1")
MTP = ("strategy=ar_spec", "strategy.proposer=mtp", "strategy.adaptive=false")
KINDS = [kind for kind in ARCHITECTURES if kind not in VISION]  # those with images have other tests
WITH_HEAD = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite", "glm4_moe",
)  # fmt: skip


def command(model: Path, rows: Path, out: Path, *more: str) -> pa.Table:
    """Run a job as the command does; it must end well."""
    assert run_command(overrides(model, rows, out, *SHORT, *more)) == 0
    return pq.read_table(out / "data", partitioning=None)


@pytest.mark.quick(1, thorough=6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_each_family(
    kind: str,
    tiny_model: TinyModel,
    reference_logits: Callable[..., Tensor],
    rows: Path,
    tmp_path: Path,
) -> None:
    """With the columns that the family has; the tokens are those that transformers finds likeliest,
    and diffusion models, which are compared with loops elsewhere, answer at all."""
    folder = tiny_model(kind, **VOCAB)
    save_tokenizer(folder)
    config = load_model_config(folder)
    declared = model_class(ARCHITECTURES[kind], folder).declared_columns(config)
    has_experts = any(column.name == ROUTED_EXPERTS for column in declared)
    columns = ["logprobs", "prompt_token_ids", *["routed_experts"] * has_experts]
    chosen = ["sampling=greedy", f"output.columns=[{','.join(columns)}]"]
    if kind in DIFFUSION:
        chosen += ["strategy=dllm", "strategy.block_length=4"]
    if kind in CANVAS:
        chosen += ["strategy=canvas", "strategy.max_denoising_steps=3"]
    if kind in DELTA:
        chosen += ["engine.state_checkpoints=2", "engine.max_batched_tokens=64"]
    table = command(folder, rows, tmp_path / "out", *chosen).to_pylist()
    assert len(table) == 2
    for row in table:
        prompt, answer = row["prompt_token_ids"], row["token_ids"]
        assert 0 < len(answer) == len(row["logprobs"]) <= 6
        if has_experts:
            assert len(row["routed_experts"]) == len(prompt) + len(answer) - 1
            assert {len(ids) for token in row["routed_experts"] for ids in token} == {
                1 if kind.startswith("llama4") else 3
            }
        if kind not in (*DIFFUSION, *CANVAS):
            theirs = reference_logits(folder, [*prompt, *answer])[len(prompt) - 1 : -1]
            assert theirs.argmax(-1).tolist() == answer
            logprobs = theirs.log_softmax(-1).amax(-1)
            torch.testing.assert_close(torch.tensor(row["logprobs"]), logprobs, atol=1e-3, rtol=0)


def below_a_vision_tower(folder: Path) -> None:
    """Give a checkpoint the names and the configuration of one that has a vision tower as well."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
        for name, t in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (architecture,) = text.pop("architectures")
    config: dict[str, Any] = {
        "architectures": [architecture.replace("CausalLM", "ConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.quick(0, thorough=3)
@pytest.mark.parametrize("kind", [*WITH_HEAD, "qwen3_5 below a vision tower"])
def test_heads_for_multi_token_prediction_draft(kind: str, rows: Path, tmp_path: Path) -> None:
    """In checkpoints with the published names; the rows are those of strategy=ar."""
    folder = TheirHead(kind.split(" ")[0], **VOCAB).save(tmp_path / "model")
    if "vision" in kind:
        below_a_vision_tower(folder)
    save_tokenizer(folder)
    columns = "output.columns=[logprobs]"
    plain = command(folder, rows, tmp_path / "ar", columns)
    drafted = command(folder, rows, tmp_path / "mtp", columns, *MTP)
    assert drafted.select(plain.column_names).equals(plain)
    assert sum(drafted["num_draft_tokens"].to_pylist()) > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_a_job_of_a_checkpoint_in_fp8(
    kind: str, tiny_model: TinyModel, rows: Path, tmp_path: Path
) -> None:
    """It has the rows of the dequantised checkpoint; that of DeepSeek-V3 has a head."""
    source, how = tmp_path / "source", ["strategy=ar"]
    if kind == "deepseek_v3":
        TheirHead(kind, **VOCAB).save(source, split_experts=True)
        how = list(MTP)
    else:
        shutil.copytree(tiny_model(kind, **VOCAB), source)
    save_tokenizer(source)
    checkpoint, twin = write_fp8(source, tmp_path)
    columns = "output.columns=[logprobs]"
    plain = command(twin, rows, tmp_path / "out_twin", columns)
    found = command(checkpoint, rows, tmp_path / "out_fp8", columns, *how)
    assert found.select(plain.column_names).equals(plain)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_job_of_a_gguf_file(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """It has the rows of the folder from which the file was made. A file without a tokenizer takes
    token ids."""
    assert sum(entry.gguf is not None for entry in MODELS.values()) == 3
    folder = tiny_model(kind)
    rows = tmp_path / "tokens.jsonl"
    rows.write_text("".join(json.dumps({"id": i, "ids": [3, 5 + i]}) + "\n" for i in range(2)))
    found = []
    for model in (folder, write_gguf(folder, tmp_path / "m.gguf")):
        out = tmp_path / f"out{model.suffix}"
        arguments = [a for a in overrides(model, rows, out, *SHORT) if "prompt.user" not in a]
        tokens = ("prompt=tokens", "prompt.token_ids_column=ids", "output.columns=[logprobs]")
        assert run_command([*arguments, *tokens]) == 0
        found.append(pq.read_table(out / "data", partitioning=None))
    assert found[0].equals(found[1])
