"""The table of devices, and the rates of this CPU."""

from __future__ import annotations

import pytest
import torch

from batchgen.jobs.forecast.devices import DEVICES, device_named, gpu_like, measured_cpu
from batchgen.jobs.planning.plan_settings import PlanSettings, split_settings
from batchgen.util.errors import ConfigError


@pytest.mark.parametrize("name", ["H100", "h100", "h-100", " H100 "])
def test_names_are_found_as_people_write_them(name: str) -> None:
    assert device_named(name) is DEVICES["H100"]


def test_cpu_is_no_gpu_of_the_table() -> None:
    assert device_named("CPU") is None


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H100 PCIe", 79.2, "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA L4", 22.5, "L4"),
        ("Quadro P400", 2.0, "Quadro P400, taken as an A100,"),
    ],
)
def test_a_gpu_is_known_by_what_its_driver_calls_it(driver: str, gib: float, name: str) -> None:
    found = gpu_like(driver, int(gib * 2**30))
    assert found.name == name and found.memory == int(gib * 2**30)


def test_the_rates_of_a_cpu_are_those_of_work_that_it_did() -> None:
    cpu = measured_cpu(torch.float32, 0.01)
    assert not cpu.is_gpu
    assert 1e8 < cpu.bandwidth < 1e13 and 1e8 < cpu.rate < 1e14
    assert cpu.flops(torch.float32) == cpu.rate
    gpu = DEVICES["H100"]
    assert gpu.flops(torch.float32) < gpu.flops(torch.bfloat16) < gpu.flops(torch.float8_e4m3fn)


def test_the_settings_of_a_plan_are_told_from_the_keys_of_the_job() -> None:
    settings, others = split_settings(
        ["model=hf", "plan.device=H200", "job.yaml", "plan.most_bad=0.5", "plan.like=planes"]
    )
    assert settings == PlanSettings(device="H200", most_bad=0.5, like="planes")
    assert others == ["model=hf", "job.yaml"]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("plan.devise=H100", "did you mean plan.device"),
        ("plan.device=TPU", "choose among cpu, B200"),
        ("plan.probe=3", "plan has no key 'probe'"),
        ("plan.most_bad=2", "0 to 1"),
        ("plan.price_per_hour=2", "plan has no key 'price_per_hour'"),
        ("plan.like", "has no value"),
        (r"plan.like='a\nb'", "cannot be read: .* in single quotes may be the end of a line"),
    ],
)
def test_mistakes_in_the_settings_are_named(argument: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        split_settings([argument])
