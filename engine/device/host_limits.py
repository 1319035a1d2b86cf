"""Finds out how much memory and how many cores of the host this process may use.

In a container that is less than the host has. The limits come from control groups (version 2,
https://docs.kernel.org/admin-guide/cgroup-v2.html, and version 1) and from the process's CPU
affinity. All files are read below `root`, so that tests can imitate a host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int:
    """Return how many bytes the process can still allocate. This many fit without swapping and
    without exceeding the limit of any control group that the process is in."""
    bounds = [_free_memory(root)]
    for version, folder in _groups(root, "memory"):
        names = ("memory.max", "memory.current")
        inactive = "inactive_file"
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            inactive = "total_inactive_file"
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and used is not None:
            # Before it kills a process, the kernel drops cached pages of files not read lately.
            bounds.append(limit - used + _fields(folder / "memory.stat").get(inactive, 0))
    return max(min(bounds), 0)


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many threads of the process can run at once, at least 1. This is the number of
    cores that the affinity allows, or the quota of a control group if that is smaller. Quotas are
    rounded up: 1.5 processors allow 2 threads."""
    cores = [_affinity()]
    for version, folder in _groups(root, "cpu"):
        quota, period = _quota(folder, version)
        if quota is not None and quota > 0 and period:
            cores.append(math.ceil(quota / period))
    return max(min(cores), 1)


def _affinity() -> int:
    """Return the number of cores that the process's affinity allows."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(folder: Path, version: int) -> tuple[int | None, int | None]:
    """Read a control group's processor time per period, and the period, both in microseconds. The
    processor time is negative (version 1) or None (version 2) if there is no limit."""
    if version == 1:
        return _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
    return _integer(quota), _integer(period)


def _free_memory(root: Path) -> int:
    """Return the bytes that are free without swapping, or all memory where that is not known."""
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the version (1 or 2) and the folder of each control group that limits the process,
    from its own group outwards. `controller` is "memory" or "cpu"."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            version, mount = 2, root / "sys/fs/cgroup"
            # Where both versions are in use, version 2 lies in a folder of its own.
            if not (mount / "cgroup.controllers").exists():
                mount /= "unified"
        elif controller in names.split(","):
            version, mount = 1, _v1_mount(root, names, controller)
        else:
            continue
        # A container may see its own group as the root, but read its path on the host.
        folder = mount / path.lstrip("/")
        if not folder.is_dir():
            folder = mount
        yield version, folder
        while folder != mount:
            folder = folder.parent
            yield version, folder


def _v1_mount(root: Path, names: str, controller: str) -> Path:
    """Return the folder where a version 1 hierarchy with these controllers is mounted."""
    # Controllers that share a hierarchy usually share a folder too, such as `cpu,cpuacct`.
    together = root / "sys/fs/cgroup" / names
    return together if together.is_dir() else root / "sys/fs/cgroup" / controller


def _fields(file: Path) -> dict[str, int]:
    """Parse a file of lines `name number …` into numbers by name; other lines are left out."""
    fields = {}
    for line in (_text(file) or "").splitlines():
        name, _, rest = line.partition(" ")
        value = _integer(rest.split()[0]) if rest.split() else None
        if value is not None:
            fields[name] = value
    return fields


def _number(file: Path) -> int | None:
    """Read a file that holds one number; None if it holds no number or cannot be read."""
    text = _text(file)
    return None if text is None else _integer(text)


def _integer(text: str) -> int | None:
    """Parse a limit; None if there is none."""
    try:
        return int(text)
    except ValueError:  # Version 2 writes "max" where there is no limit.
        return None


def _text(file: Path) -> str | None:
    """Read a file; None if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return None
