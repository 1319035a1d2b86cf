"""The ready job of nano_hybrid: real routing and real acceptance, as its training measured them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from nano_batch import Batch, encode
from nano_hybrid import NanoHybrid, Router, load
from nano_problems import held_out_set
from nano_speculation import DRAFTS, decode
from nano_tokenizer import IM_END_ID, build_tokenizer
from real_job import run
from score_nano import read_rows, score, total
from torch import Tensor

import batchgen

FOLDER = Path(batchgen.__file__).parent / "data" / "nano_hybrid"
ROWS = 8
COMPARED = 1
SMALL = [f"dataset.limit={ROWS}", "engine.device=cpu", "engine.kv_cache_gib=0.05"]
PLAIN = [
    "model=nano_hybrid", "dataset=nano_eval", "prompt=chat", "prompt.user='{{ question }}'",
    "sampling=greedy", "sampling.max_new_tokens=80", "strategy=ar",
    "output.columns=[logprobs,routed_experts]",
]  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "data", partitioning=None).to_pylist()
    return sorted(rows, key=lambda row: int(row["id"].rpartition("-")[2]))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ready job, over the first rows."""
    folder = tmp_path_factory.mktemp("nano_hybrid") / "out"
    run(["+experiment=nano_hybrid", *SMALL, f"output.dir={folder}"])
    return folder


def prompts(count: int) -> Batch:
    return encode(held_out_set(count, 0), "plain", build_tokenizer())


def test_it_answers_right_and_several_tokens_a_forward(out: Path) -> None:
    tally = total(score(read_rows(out), "plain").values())
    assert (tally.rows, tally.right) == (ROWS, ROWS)
    assert tally.tokens_per_step >= 2.4
    for row in rows_of(out):
        assert row["finish_reason"] == "stop"
        lengths = {len(row[name]) for name in ("logprobs", "draft_accepted", "step_map")}
        assert lengths == {len(row["token_ids"])}


def test_the_engine_decodes_as_training_did(out: Path) -> None:
    decoded = decode(load(FOLDER), prompts(COMPARED), DRAFTS)
    for row, answer, steps in zip(rows_of(out), decoded.answers, decoded.steps, strict=False):
        assert row["token_ids"] == [*answer, IM_END_ID]
        assert row["num_forwards"] == row["step_map"][-1] == steps


def test_routes_are_those_of_the_model_in_training(out: Path) -> None:
    model, batch = load(FOLDER), prompts(COMPARED)
    for index, row in enumerate(rows_of(out)[:COMPARED]):
        prompt = batch.ids[index, : batch.prompt_lens[index]].tolist()
        ids = torch.tensor([[*prompt, *row["token_ids"]]])
        chosen = routes(model, ids)[:-1].sort(-1).values
        assert torch.equal(torch.tensor(row["routed_experts"]).sort(-1).values, chosen)


def routes(model: NanoHybrid, ids: Tensor) -> Tensor:
    """The experts [T, layers, experts per token] that the model uses for the tokens of one row."""
    found: list[Tensor] = []

    def note(found: list[Tensor], router: Router, _: Any, output: tuple[Tensor, Tensor]) -> None:
        found.append(output[1][0].topk(router.top_k).indices)

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(partial(note, found))
    with torch.inference_mode():
        model(ids, torch.ones(ids.shape))
    return torch.stack(found, dim=1)


def test_its_rows_are_those_without_drafts(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    run([*PLAIN, *SMALL, f"output.dir={folder}"])
    for drafted, plain in zip(rows_of(out), rows_of(folder), strict=True):
        for name in ("id", "text", "token_ids", "logprobs", "routed_experts", "finish_reason"):
            assert drafted[name] == plain[name], name
