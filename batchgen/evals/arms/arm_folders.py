"""Finds the jobs that `batchgen compare` is to compare, from the folders that a user names.

An *arm* is one line of a comparison: a job, or jobs that differ only in their seed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.evals.arms.arm_table import ArmTable
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.step_folders import find_record, step_folder
from batchgen.storage.leases.job_files import MANIFEST
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import folder_here, user_path

_SWEEP_FILES = ("multirun.yaml", "sweep.yaml", "report.html")
"""Files that a sweep writes next to its jobs."""


@dataclass(frozen=True)
class ArmFolder:
    """A folder whose job is an arm, or one of several jobs that make an arm.

    Attributes:
        name: the job's name for people.
        folder: the folder, as the user typed it.
        listed: whether the user named a folder of jobs, such as a sweep's, that contains it.
    """

    name: str
    folder: str
    listed: bool = False


def arm_folders(paths: Sequence[str]) -> list[ArmFolder]:
    """The folders of the jobs that a user names. A folder of jobs, such as a sweep's, stands for
    the jobs directly in it, in the order in which they began.

    Raises:
        ConfigError: a name is not a path, or is in an object store.
    """
    arms: list[ArmFolder] = []
    for name in paths:
        path = Path(step_folder(str(user_path(folder_here(name, "batchgen compare"), "OUT"))))
        if path.name in _SWEEP_FILES and path.is_file():  # as in SWEEP/*
            continue
        is_job = (path / MANIFEST).exists() or find_record(str(path)) is not None
        below = [] if is_job or not path.is_dir() else _jobs_in(path)
        arms += [ArmFolder(job, str(Path(name) / job), listed=True) for job in below]
        arms += [] if below else [ArmFolder(name.rstrip("/") or name, name)]
    # Jobs in one folder are named without it; jobs whose names are equal, with the whole path.
    if len(arms) > 1 and len({Path(folder.folder).parent for folder in arms}) == 1:
        arms = [replace(folder, name=Path(folder.folder).name) for folder in arms]
    short = Counter(folder.name for folder in arms)
    return [
        replace(folder, name=folder.folder) if short[folder.name] > 1 else folder for folder in arms
    ]


def _jobs_in(folder: Path) -> list[str]:
    """The names of the folders of jobs directly in a folder. Links are not followed."""
    folders = []
    for path in folder.iterdir():
        if path.is_symlink() or not (path / MANIFEST).is_file():
            continue
        try:
            attempts = JobFolderReader(path).metrics.get("attempts") or [{}]
            began = str(attempts[0].get("started", "~"))
        except (ConfigError, JobError, AttributeError, LookupError, TypeError):
            began = "~"  # sorts behind all dates; its arm will say what is wrong
        folders.append((began, _natural(path.name), path.name))
    return [name for *_, name in sorted(folders)]


def _natural(name: str) -> list[tuple[float, str]]:
    """A sort key by which 9 comes before 10: "lr10" has the parts "lr", 10 and ""."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]


def refuse_nothing(table: ArmTable, folders: Sequence[ArmFolder]) -> None:
    """Check that there is something to compare, if the user named jobs one by one.

    Raises:
        JobError: no two jobs can be compared, because a file is damaged.
        ConfigError: no two jobs can be compared, for another reason.
    """
    if any(row.difference is not None for row in table.rows):
        return
    if any(folder.listed for folder in folders) or len(table.rows) < 2:
        if table.first is not None:
            return
    raise _first_fault(table)


def _first_fault(table: ArmTable) -> ConfigError | JobError:
    """The reason why the first arm without a comparison has none."""
    for row in table.rows:
        if row.arm.without:
            return (JobError if row.arm.damaged else ConfigError)(row.arm.without)
        if row.arm.other_exam:
            first = table.first
            assert first is not None
            names = f"{first.arm.folders[0]} and {row.arm.folders[0]}"
            return ConfigError(
                f"{names} are different exams: {row.arm.other_exam}: --anyway compares them"
            )
    return ConfigError("the jobs have no question with marks in both: nothing to compare")
