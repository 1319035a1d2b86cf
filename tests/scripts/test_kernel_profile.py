"""The summary of a profiler trace whose kernels are known."""

import gzip
import json
from pathlib import Path
from typing import Any

import kernel_profile
import pytest
import torch
from kernel_profile import KernelTime, KernelWindow, short_name


def event(name: str, start: float, length: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


EVENTS = [
    {"ph": "M", "name": "process_name", "args": {}},
    event("aten::mm", 0.0, 500.0, "cpu_op"),
    event("gemm", 150.0, 20.0),  # out of order, beside another stream's copy
    event("gemm", 100.0, 30.0),
    event("Memcpy DtoH", 160.0, 20.0, "gpu_memcpy"),
    event("norm", 130.0, 5.0),
    event("inside", 151.0, 1.0),
]


def test_a_window_is_the_union_of_what_ran_on_the_device() -> None:
    window = KernelWindow.from_events(EVENTS)
    assert window.length == 80
    assert window.busy == 35 + 30  # 100–135 and 150–180
    assert window.kernels == [
        KernelTime("gemm", 2, 50.0),
        KernelTime("Memcpy DtoH", 1, 20.0),
        KernelTime("norm", 1, 5.0),
        KernelTime("inside", 1, 1.0),
    ]


def test_the_table_is_per_step_and_sums_up_the_rest() -> None:
    lines = KernelWindow.from_events(EVENTS).table("decode", steps=2, top=2).splitlines()
    assert lines[0] == (
        "decode: 0.040 ms per step, busy 81.2%, idle 8 us between kernels, 2 launches"
    )
    assert [line.split() for line in lines[2:]] == [
        ["25.0", "62.5%", "1.0", "25.0", "gemm"],
        ["10.0", "25.0%", "0.5", "20.0", "Memcpy", "DtoH"],
        ["3.0", "7.5%", "1.0", "3.0", "(2", "other", "names)"],
    ]
    assert len(KernelWindow.from_events(EVENTS).table("decode", steps=2).splitlines()) == 6


def test_long_names_keep_both_ends() -> None:
    assert short_name("void at::native::(anonymous namespace)::add<c10::Half>(int)") == (
        "add<Half>(int)"
    )
    name = short_name("a" * 100 + "b" * 100)
    assert len(name) <= 72 and name.startswith("aaa") and name.endswith("bbb")


def test_a_trace_without_kernels_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernels"):
        KernelWindow.from_events(EVENTS[:2])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_of_torch_is_one_that_it_reads(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = torch.cuda.is_available()
    if not on_gpu:  # operators of the host stand in for kernels
        monkeypatch.setattr(kernel_profile, "_ON_DEVICE", {"cpu_op"})
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.ones(64, 64, device="cuda" if on_gpu else "cpu")
    window = kernel_profile.profile_window(lambda: [x @ x for _ in range(3)], tmp_path / name)
    assert 0 < window.busy <= window.length
    assert 3 in {kernel.launches for kernel in window.kernels}
    content = (tmp_path / name).read_bytes()
    json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
