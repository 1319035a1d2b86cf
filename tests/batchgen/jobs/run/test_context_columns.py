"""A column of context scope in a job: its type and lengths, and a job that is cut off."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models import model_registry as registry
from batchgen.util.errors import ConfigError
from tests.support.engine.toy_hybrid import ARCHITECTURE, write_toy
from tests.support.jobs.real_job import overrides, run, save_tokenizer

EVERY = 31
"""Steps after which the machine is gone."""
COLUMNS = "output.columns=[toy_route,logprobs,prompt_token_ids]"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = {ARCHITECTURE: registry.ModelEntry("tests.support.engine.toy_hybrid")}
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS) | entry)
    folder = tmp_path / "toy"
    folder.mkdir()
    write_toy(folder, vocab_size=257)
    save_tokenizer(folder)
    return folder


def read(folder: Path) -> pa.Table:
    return pq.read_table(folder / "data", partitioning=None)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ar", "ar_spec"])
def test_a_job_that_is_cut_off_writes_the_same_values(
    toy: Path, rows: Path, tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (COLUMNS, f"strategy={strategy}", "engine.block_size=4", "engine.max_num_seqs=3",
            "dataset.limit=6")  # fmt: skip
    run(overrides(toy, rows, tmp_path / "whole", *more))
    step, calls = LLMEngine.step, 0

    def cut_off(self: LLMEngine) -> list[RequestOutput]:
        nonlocal calls
        calls += 1
        if calls % EVERY == 0:
            raise RuntimeError("the machine is gone")
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", cut_off)
    for _ in range(30):
        try:
            run(overrides(toy, rows, tmp_path / "cut", *more))
            break
        except RuntimeError:
            continue
    assert calls > EVERY, "the job was never cut off"
    whole, cut = read(tmp_path / "whole"), read(tmp_path / "cut")
    counts = [name for name in whole.column_names if name.startswith("num_")]
    shown = [name for name in whole.column_names if name not in counts]
    assert whole.select(shown).equals(cut.select(shown))
    field = whole.schema.field("toy_route")
    assert field.type == pa.list_(pa.list_(pa.list_(pa.uint8(), 2), 4))
    assert field.metadata[b"scope"] == b"context"
    for row in whole.to_pylist():
        tokens = len(row["prompt_token_ids"]) + len(row["token_ids"])
        assert len(row["toy_route"]) == tokens - 1


def test_only_models_that_declare_it_have_the_column(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no column 'toy_route' with strategy ar"):
        run(overrides(model, rows, tmp_path / "out", COLUMNS))
