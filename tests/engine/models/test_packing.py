"""What a packed model says of this CPU's products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.engine.loading.loader import load_model
from batchgen.engine.models import packing
from batchgen.kernels.layers import cpu_product

CPU = torch.device("cpu")


def test_products_that_do_not_keep_bits_are_named(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    monkeypatch.setattr(cpu_product, "product_keeps_bits", lambda *_: False)
    monkeypatch.setattr(packing, "cpu_row_multiple", lambda *_: None)
    model = load_model(folder, device=CPU)
    model.pack()
    assert model.batch_dependence is not None
    for words in ("with 1 thread ", "64×192 in float32", "attention with heads of 16"):
        assert words in model.batch_dependence


def test_a_model_runs_where_no_product_keeps_bits(
    tiny_model: Callable[..., Path],
    run_paged: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = list(range(100))
    expected = run_paged(load_model(tiny_model("llama"), device=CPU), ids, [60, 40])
    monkeypatch.setattr(cpu_product, "product_keeps_bits", lambda *_: False)
    model = load_model(tiny_model("llama"), device=CPU)
    model.pack()
    torch.testing.assert_close(run_paged(model, ids, [60, 40]), expected)


def test_shapes_that_layers_share_are_tried_once(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def record(product: object, in_features: int, *_: object) -> bool:
        tried.append(in_features)
        return True

    monkeypatch.setattr(cpu_product, "product_keeps_bits", record)
    model = load_model(tiny_model("llama"), device=CPU)
    model.pack()
    assert len(tried) == 4  # qkv like the head, o, gate and up, down; of three layers
    assert model.batch_dependence is None
