"""Forwards that are gone through without a device."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from batchgen.engine.device.transfer import upload
from batchgen.engine.memory import kernel_warmup
from batchgen.engine.memory.kernel_warmup import ShapesOnly, compiling_kernels

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda", 0)


def test_tensors_of_the_device_have_shapes_and_no_values() -> None:
    with ShapesOnly(GPU):
        x = torch.zeros(6, 4, device=GPU)
        assert x.is_cuda and torch.device(x.device) == GPU
        assert upload([1, 2, 3], torch.int64, GPU).is_cuda
        rows = x[upload([2, 0], torch.int64, GPU)]
        assert rows.shape == (2, 4) and rows.is_cuda
        assert x[1:3, 0].shape == (2,)
        assert F.linear(x, torch.ones(5, 4, device=GPU)).shape == (6, 5)
        assert torch.cat([x, rows]).shape == (8, 4)
        assert torch.cat((x, x[:, :1]), dim=-1).shape == (6, 5)
        assert F.linear(rows[0], torch.ones(5, 4, device=GPU), torch.ones(5, device=GPU)).is_cuda
        assert x.addmm_(torch.zeros(6, 2, device=GPU), torch.zeros(2, 4, device=GPU)) is x
    assert x.is_meta and not x.is_cuda


@pytest.mark.thorough
def test_usual_operations_import_nothing() -> None:
    """Shapes alone would let torch import a thousand modules: its compiler and sympy."""
    program = """if True:
        import sys
        import torch
        import torch.nn.functional as F
        from batchgen.engine.memory.kernel_warmup import ShapesOnly

        gpu, before = torch.device("cuda", 0), set(sys.modules)
        with torch.inference_mode(), ShapesOnly(gpu):
            x = torch.zeros(6, 4, device=gpu)
            y = F.linear(torch.cat([x, x[1:2]]), torch.zeros(5, 4, device=gpu))
            assert y.addmm_(x[:1].new_empty(7, 2), x.new_empty(2, 5))[x.new_empty(3)].is_cuda
        print(len(sys.modules.keys() - before))
    """
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 20


def test_tensors_of_the_host_keep_their_values() -> None:
    with ShapesOnly(GPU):
        x = torch.arange(6.0).view(3, 2)
        assert not x.is_cuda and x.device.type == "cpu"
        assert x[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]
        assert x.addmm_(torch.ones(3, 1), torch.ones(1, 2)).tolist() == [[1, 2], [3, 4], [5, 6]]
        assert torch.cat([x, x[:1]])[3].tolist() == [1, 2]
        assert torch.cat([x, x], dim=-1).shape == (3, 4)
        assert F.linear(x, torch.ones(1, 2), bias=torch.ones(1)).tolist() == [[4], [8], [12]]


def no_plan() -> Any:
    raise AssertionError


@pytest.mark.parametrize(("device", "can_compile"), [("cpu", True), ("cuda", False)])
def test_where_nothing_is_compiled_ahead(
    device: str, can_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_warmup, "can_compile_ahead", lambda: can_compile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiling_kernels(torch.device(device), no_plan):
            pass


@pytest.fixture
def gpu_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_warmup, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


@pytest.mark.usefixtures("gpu_that_compiles")
def test_kernels_are_compiled_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, warmed_up = threading.Event(), threading.Event()

    def warm_up(*_: Any) -> None:
        assert loading.wait(10)
        warmed_up.set()

    monkeypatch.setattr(kernel_warmup, "warm_up", warm_up)
    with compiling_kernels(GPU, lambda: ((), SimpleNamespace())):  # type: ignore[arg-type,return-value]
        loading.set()
    assert warmed_up.is_set()


@pytest.mark.usefixtures("gpu_that_compiles")
def test_a_warm_up_that_fails_is_only_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("no such operation on meta")

    monkeypatch.setattr(kernel_warmup, "warm_up", fail)
    with (
        pytest.warns(RuntimeWarning, match="one after another.*no such operation"),
        compiling_kernels(GPU, lambda: ((), SimpleNamespace())),  # type: ignore[arg-type,return-value]
    ):
        pass


@pytest.mark.usefixtures("gpu_that_compiles")
def test_models_that_cannot_be_made_are_only_warned_of() -> None:
    def plan() -> Any:
        raise ImportError("cannot import name 'Config'")

    with pytest.warns(RuntimeWarning, match="cannot import"), compiling_kernels(GPU, plan):
        pass


@pytest.mark.usefixtures("gpu_that_compiles")
def test_of_mistakes_in_the_settings_the_engine_tells() -> None:
    def plan() -> Any:
        raise ValueError("max_model_len is too large")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiling_kernels(GPU, plan):
            pass


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tiny-moe", "tiny-hybrid", "tiny-latent", "tiny-gpt-oss")
        ),
    ],
)
def test_all_kernels_of_the_start_are_compiled_ahead(model: str) -> None:
    pytest.importorskip("triton.backends.nvidia")
    script = ROOT / "scripts" / "check" / "check_kernels.py"
    found = subprocess.run(
        [sys.executable, script, "--model", model, "--threads", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "variants in" in found.stdout and "missing" not in found.stdout
