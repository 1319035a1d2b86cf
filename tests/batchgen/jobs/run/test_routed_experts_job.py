"""The column of routed experts in a job: its type, its facts, and a job that is cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.util.errors import ConfigError
from tests.support.engine.routers import router_ids
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer

COLUMNS = "output.columns=[routed_experts,prompt_token_ids]"


@pytest.fixture(scope="module")
def moe(tiny_model: Callable[..., Path]) -> Path:
    folder = tiny_model("qwen3_moe", decoder_sparse_step=2, num_hidden_layers=4, **VOCAB)
    save_tokenizer(folder)
    return folder


def read(folder: Path) -> pa.Table:
    return pq.read_table(folder / "data", partitioning=None)


@pytest.mark.thorough
def test_a_job_that_is_cut_off_has_the_experts_of_every_token(
    moe: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (COLUMNS, "engine.block_size=4", "engine.max_num_seqs=3", "sampling.max_new_tokens=6")
    step, calls = LLMEngine.step, 0

    def cut_off(self: LLMEngine) -> list[RequestOutput]:
        nonlocal calls
        calls += 1
        if calls % 23 == 0:
            raise RuntimeError("the machine is gone")
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", cut_off)
    for _ in range(30):
        try:
            run(overrides(moe, rows, tmp_path / "out", *more))
            break
        except RuntimeError:
            continue
    assert calls > 23, "the job was never cut off"
    table = read(tmp_path / "out")
    field = table.schema.field("routed_experts")
    assert field.type == pa.list_(pa.list_(pa.list_(pa.uint8(), 3), 2))
    assert field.metadata[b"moe_layers"] == b"[1, 3]" and field.metadata[b"num_experts"] == b"8"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`routed_experts`:\n\n- moe_layers: [1, 3]\n- num_experts: 8\n- use: entry t" in card

    model = Qwen3MoeForCausalLM.from_pretrained(moe, dtype=torch.float32)
    samples = table.to_pylist()
    assert len(samples) == 22
    for row in samples:
        ids = row["prompt_token_ids"] + row["token_ids"]
        assert row["routed_experts"] == router_ids(model, ids)[:-1].tolist()


def test_a_row_that_never_ran_has_none(moe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "q": "x"}\n{"id": "b", "q": "' + "long " * 80 + '"}\n')
    run(overrides(moe, rows, tmp_path / "out", COLUMNS, "sampling.n=1"))
    good, bad = read(tmp_path / "out").to_pylist()
    assert good["error"] is None and len(good["routed_experts"]) > 1
    assert bad["error"]["type"] == "prompt_too_long" and bad["routed_experts"] == []


def test_a_dense_model_has_no_such_column(model: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM\) has no layers with experts"):
        run(overrides(model, rows, tmp_path / "out", COLUMNS))
    assert not (tmp_path / "out").exists()


def test_a_model_whose_layers_are_all_dense_neither(
    tiny_model: Callable[..., Path], rows: Path, tmp_path: Path
) -> None:
    folder = tiny_model("qwen3_moe", mlp_only_layers=[0, 1, 2], **VOCAB)
    save_tokenizer(folder)
    with pytest.raises(ConfigError, match="no layers with experts"):
        run(overrides(folder, rows, tmp_path / "out", COLUMNS))
