"""Limits of containers, on hosts that are laid out as files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from batchgen.engine.device.host_limits import available_memory, usable_cores

GIB = 2**30
HOST = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {48 * 2**20} kB\nHugePages: 0"}
V2 = HOST | {
    "sys/fs/cgroup/cgroup.controllers": "cpu memory",
    "proc/self/cgroup": "0::/jobs/mine\n",
}
V1 = HOST | {
    "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n"
}
V1_MINE = "sys/fs/cgroup/memory/docker/abc"
V2_MINE = "sys/fs/cgroup/jobs/mine"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def lay_out(root: Path, *files: Mapping[str, str]) -> Path:
    for name, text in {k: v for layer in files for k, v in layer.items()}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def v2(limit: str, used: int, inactive: int = 0, folder: str = V2_MINE) -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"anon {used}\ninactive_file {inactive}\nfile 5",
    }


def test_memory_without_groups(tmp_path: Path) -> None:
    assert available_memory(lay_out(tmp_path, HOST)) == 48 * GIB


def test_memory_of_version_2(tmp_path: Path) -> None:
    root = lay_out(tmp_path, V2, v2(str(8 * GIB), 3 * GIB, GIB))
    assert available_memory(root) == 6 * GIB


def test_memory_without_a_limit(tmp_path: Path) -> None:
    assert available_memory(lay_out(tmp_path, V2, v2("max", 3 * GIB))) == 48 * GIB


def test_memory_of_a_group_around_the_own_one(tmp_path: Path) -> None:
    outer = v2(str(4 * GIB), 3 * GIB, folder="sys/fs/cgroup/jobs")
    root = lay_out(tmp_path, V2, v2(str(8 * GIB), GIB), outer)
    assert available_memory(root) == GIB


def test_memory_of_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root = lay_out(tmp_path, V2, v2(str(8 * GIB), 3 * GIB, folder="sys/fs/cgroup"))
    assert available_memory(root) == 5 * GIB


def test_memory_above_the_limit_is_none(tmp_path: Path) -> None:
    assert available_memory(lay_out(tmp_path, V2, v2(str(GIB), 2 * GIB))) == 0


def test_memory_of_version_1(tmp_path: Path) -> None:
    mine = {
        f"{V1_MINE}/memory.limit_in_bytes": str(8 * GIB),
        f"{V1_MINE}/memory.usage_in_bytes": str(5 * GIB),
        f"{V1_MINE}/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(5 * GIB),
    }
    assert available_memory(lay_out(tmp_path, V1, mine)) == 5 * GIB


def test_memory_where_version_2_lies_beside_version_1(tmp_path: Path) -> None:
    unified = "sys/fs/cgroup/unified"
    files = HOST | {"proc/self/cgroup": "0::/jobs/mine"}
    root = lay_out(tmp_path, files, v2(str(GIB), 0, folder=f"{unified}/jobs/mine"))
    assert available_memory(root) == GIB


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    root = lay_out(tmp_path, V2)
    for name in ("memory.max", "cpu.max", "memory.stat"):
        (root / V2_MINE / name).mkdir(parents=True)  # whoever reads it, root too, gets an OSError
    assert available_memory(root) == 48 * GIB
    assert usable_cores(root) == 8


def test_a_system_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert available_memory(tmp_path) == 4 * GIB
    assert usable_cores(tmp_path) == 6


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("150000 100000", 2), ("20000 100000", 1), ("3200000 100000", 8)],
)
def test_cores_of_version_2(quota: str, cores: int, tmp_path: Path) -> None:
    assert usable_cores(lay_out(tmp_path, V2, {f"{V2_MINE}/cpu.max": quota})) == cores


def test_cores_of_a_group_around_the_own_one(tmp_path: Path) -> None:
    files = {
        f"{V2_MINE}/cpu.max": "max 100000",
        "sys/fs/cgroup/jobs/cpu.max": "300000 100000",
    }
    assert usable_cores(lay_out(tmp_path, V2, files)) == 3


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("150000", 2)])
def test_cores_of_version_1(mount: str, quota: str, cores: int, tmp_path: Path) -> None:
    folder = f"sys/fs/cgroup/{mount}/docker/abc"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    assert usable_cores(lay_out(tmp_path, V1, files)) == cores


def test_cores_of_the_affinity_alone(tmp_path: Path) -> None:
    assert usable_cores(lay_out(tmp_path, HOST)) == 8
