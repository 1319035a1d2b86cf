"""Jobs whose drafts come from a head of the model: the rows of strategy=ar, and every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.cli.job_outcome import report
from tests.support.engine.qwen_mtp import TheirHead
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer

MTP = ("strategy=ar_spec", "strategy.proposer=mtp", "strategy.adaptive=false", "dataset.limit=4")
TOLD = "logprobs,routed_experts"


def checkpoint(folder: Path, *, head: bool = True) -> Path:
    TheirHead("qwen3_5_moe", **VOCAB).save(folder, head=head)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("qwen"))


def read(folder: Path) -> pa.Table:
    return pq.read_table(folder / "data", partitioning=None)


@pytest.mark.thorough
def test_the_rows_are_those_of_ar(qwen: Path, rows: Path, tmp_path: Path) -> None:
    plain, drafted = tmp_path / "ar", tmp_path / "mtp"
    run(overrides(qwen, rows, plain, f"output.columns=[{TOLD}]", "dataset.limit=4"))
    more = f"output.columns=[{TOLD},draft_accepted,step_map]"
    run(overrides(qwen, rows, drafted, more, *MTP))
    one, other = read(plain), read(drafted)
    for name in one.column_names:
        assert one[name] == other[name], name
    metrics = json.loads((drafted / "metrics.json").read_text())
    assert metrics["counts"]["num_draft_tokens"] == sum(other["num_draft_tokens"].to_pylist()) > 0
    assert all(steps[0] == 1 for steps in other["step_map"].to_pylist())


@pytest.mark.thorough
def test_random_weights_have_a_head_if_the_configuration_names_one(
    qwen: Path, rows: Path, tmp_path: Path
) -> None:
    result = run(overrides(qwen, rows, tmp_path / "out", "model.load_format=dummy", *MTP))
    assert result.exit_code == 0
    assert sum(read(tmp_path / "out")["num_draft_tokens"].to_pylist()) > 0


def test_a_checkpoint_without_the_head_s_weights_is_refused(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those are that transformers saved, which does not read them."""
    folder, out = checkpoint(tmp_path / "model", head=False), tmp_path / "out"
    assert report(lambda: run(overrides(folder, rows, out, *MTP))) == 2
    told = capsys.readouterr().err
    assert (
        f"strategy.proposer=mtp needs the weights of the model's head 'mtp', and {folder} has none"
    ) in told
    assert "set strategy.proposer to ngram" in told and not out.exists()
    assert run(overrides(folder, rows, out, "dataset.limit=1")).exit_code == 0
