"""Work beside other work: when it is begun, and that results have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.device.side_stream import MOST_TOKENS, beside, with_side_stream
from batchgen.engine.execution.graph_shapes import GraphShapes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.loading.loader import load_model
from batchgen.engine.memory.model_use import ModelUse
from batchgen.kernels.moe.experts_cpu import grouped_mlp_cpu
from batchgen.kernels.moe.router.routing import route

TinyModel = Callable[..., Path]
KINDS = ["qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"]
"""Models with a shared expert: with a gate, and two without one."""


class FakeStream:
    """A stream that writes down what it waits for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def wait_stream(self, other: FakeStream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self._events.append(f"{self.name} forks")
        return f"{self.name}'s fork"

    def wait_event(self, event: str) -> None:
        self._events.append(f"{self.name} waits for {event}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in the streams, on a CPU."""
    found: list[str] = []

    @contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        found.append(f"to {chosen.name}")
        yield
        found.append("back")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream("main", found))
    return found


def side_stream(events: list[str]) -> Any:
    return with_side_stream(FakeStream("side", events))  # type: ignore[arg-type]


BEGUN = ["main forks", "first", "side waits for main's fork", "to side", "work", "back"]


def sums(events: list[str], x: Tensor) -> Callable[[], float]:
    """The sum of x, first, beside that of its double."""

    def first(x: Tensor) -> float:
        events.append("first")
        return float(x.sum())

    def work(x: Tensor) -> float:
        events.append("work")
        return float(2 * x.sum())

    found, later = beside(x, first, work)
    assert found == x.sum()
    return later


def test_without_a_capture_work_is_done_when_it_is_asked_for(events: list[str]) -> None:
    result = sums(events, torch.ones(3, 2))
    assert events == ["first"]
    assert result() == 12
    assert events == ["first", "work"]


def test_in_a_capture_work_is_begun_at_once_and_waited_for(events: list[str]) -> None:
    with side_stream(events):
        result = sums(events, torch.ones(MOST_TOKENS, 1))
        assert events == BEGUN
        assert result() == 2 * MOST_TOKENS
        assert events == [*BEGUN, "main waits for side"]


def test_many_tokens_leave_no_room_beside_them(events: list[str]) -> None:
    with side_stream(events):
        result = sums(events, torch.ones(MOST_TOKENS + 1, 1))
        assert events == ["first"]
        result()
    assert events == ["first", "work"]


def test_captures_end(events: list[str]) -> None:
    with side_stream(events):
        pass
    sums(events, torch.ones(3, 2))
    assert events == ["first"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_expert_is_computed_beside_the_routed_ones(
    kind: str, tiny_model: TinyModel, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, and the router goes first. It adds the same bits as elsewhere."""

    def told(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any, **options: Any) -> Any:
            events.append(name)
            return run(*args, **options)

        return tell

    monkeypatch.setattr("batchgen.engine.layers.feed_forward.moe.route", told("route", route))
    routed = told("experts", grouped_mlp_cpu)
    monkeypatch.setattr("batchgen.kernels.moe.experts.grouped_mlp_cpu", routed)
    model = load_model(tiny_model(kind), device=torch.device("cpu"))
    moe = next(module for module in model.modules() if isinstance(module, SparseMoE))
    assert moe.shared_expert is not None
    for name, part in (("router", moe.gate), ("shared", moe.shared_expert.down_proj)):
        part.register_forward_hook(lambda *_, name=name: events.append(name))
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    residual, context = x.flip(0), ForwardContext((), torch.ones(20, dtype=torch.int64), ())
    with torch.inference_mode():
        expected = moe(x, residual.clone(), context)
        events.clear()
        with side_stream(events):
            found = moe(x, residual.clone(), context)
    assert torch.equal(found, expected)
    begun = ["main forks", "router", "side waits for main's fork", "to side", "shared", "back"]
    assert events == [*begun, "route", "experts", "main waits for side"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_forwards_have_the_bits_of_eager_ones(kind: str, tiny_model: TinyModel) -> None:
    device, most, blocks = torch.device("cuda"), 8, 2
    model = load_model(tiny_model(kind), device=device, dtype=torch.bfloat16)
    model.pack()

    def runner() -> ModelRunner:
        return ModelRunner(model, ModelUse(model, (1,)).caches(CacheSizes(most + 1, 4, 0)))

    def inputs(rows: int, first_id: int) -> ModelInputs:
        tables = torch.zeros((rows, blocks), dtype=torch.int64, device=device)
        tables[:, 0] = torch.arange(1, rows + 1)
        ones = np.ones(rows, np.int64)
        ids = torch.arange(first_id, first_id + rows, device=device)
        return ModelInputs(ids, torch.zeros_like(ids), tables, ones, ones)

    eager, captured = runner(), runner()
    captured.capture(GraphShapes(most, blocks, 0, 0))
    # A batch that is padded to more rows than these may be rounded in another way.
    captured.capture_all()
    for round_ in range(3):
        for rows in (8, 1, 4, 2):
            batch = inputs(rows, 10 * round_ + rows)
            found = captured.hidden_states(batch)
            assert torch.equal(found, eager.hidden_states(batch))
