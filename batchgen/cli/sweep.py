"""Sweeps (`batchgen --multirun`): the values that arguments list, the folders of jobs, and the
table of results. `hydra_app.py` runs the jobs.

A sweep has a job for each combination of the listed values. The jobs run one after another, each in
a folder that is named after its settings. With `output.dir`, the folders are in that folder, and
the same command resumes the sweep. Without it, they are in a folder named by date and time. The
arguments are recorded there, so the same command finds the folder again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from batchgen.cli.options import Options
from batchgen.config.compose.overrides import names_worker
from batchgen.config.groups.config_keys import choices
from batchgen.config.groups.job_config import JobConfig
from batchgen.storage.stores.open_storage import job_metrics
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import load_yaml
from batchgen.util.text.text_table import columns

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override as HydraOverride

_PARENT = Path("outputs/multirun")
"""The folder of sweeps without `output.dir`."""
_ARGUMENTS = "sweep.yaml"
"""The file in a sweep's folder that records its arguments."""
_LONGEST_NAME = 100
"""The maximum length in bytes of a job's folder name, before a digest is appended."""
_CALL = re.compile(r"([^=]+)=\s*([a-z]+)\s*\((.*)\)\s*", re.DOTALL)
"""An argument whose value is a call of a Hydra function. Groups: the key, the function, and its
arguments."""


@dataclass
class SweepJob:
    """One job of a sweep.

    Attributes:
        name: the settings in which it differs from other jobs; the name of its folder.
        config: its configuration; None if it was refused.
        code: its exit code; None if it has not run.
    """

    name: str
    config: JobConfig | None
    code: int | None = None


def worst(codes: Sequence[int]) -> int:
    """Return the exit code of a sweep, given those of its jobs. A signal (above 128) has priority,
    then 1 (failed), 2 (configuration refused), 4 (budget spent), 3 (error rows), and 0."""
    if (highest := max(codes, default=0)) > 128:
        return highest
    return next((code for code in (1, 2, 4, 3) if code in codes), 0)


def swept_values(argument: str) -> list[str] | None:
    """Return the arguments that one argument of a sweep stands for, one per value; None if it lists
    no values.

    Values are listed as in Hydra: a,b or choice(a,b), range(1,9), and glob(*) for the choices of a
    group. A text with commas needs double quotes.

    Raises:
        ConfigError: the values cannot be listed.
    """
    override = swept(argument)
    if override is None:
        return None
    from hydra.core.override_parser.types import Glob

    if re.search("['\"]", argument) and (call := _CALL.fullmatch(argument)):
        # Inside its functions Hydra removes quotes, so that quoted commas would be lost.
        if call[2] != "choice":
            raise ConfigError(f"{argument}: {call[2]} takes no quotes: list the values as a,b")
        listed = f"{call[1]}={call[3]}"
        return swept_values(listed) or [listed]
    key, value = argument.partition("=")[0], override.value()
    if isinstance(value, Glob):
        return [f"{key}={name}" for name in value.filter(choices(key.lstrip("+")))]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{argument}: a sweep needs a finite list of values: a,b or range(…)")
    return [f"{key}={text}" for text in override.sweep_string_iterator()]


def swept(argument: str) -> HydraOverride | None:
    """Return Hydra's parse of an argument that lists values or gives a range; None for any other
    argument."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    _, equals, text = argument.partition("=")
    if not equals or not ("," in text or "glob(" in text):
        return None
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:  # not in Hydra's grammar: a plain text
        return None
    return override if override.is_sweep_override() else None


def dated_folder(options: Options) -> Path:
    """Return the folder of a sweep without `output.dir`: that of an earlier sweep with the same
    arguments, or a new name."""
    arguments = _arguments(options)
    for path in sorted(_PARENT.glob(f"*/{_ARGUMENTS}"), reverse=True):
        if load_yaml(path.read_bytes(), str(path))["arguments"] == arguments:
            return path.parent
    stem = _PARENT / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = stem, 1
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}_{number}")
    return folder


def record(folder: Path, options: Options) -> None:
    """Make the folder of a sweep, and record the arguments by which `dated_folder` finds it. Raises
    ConfigError if this fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"arguments": _arguments(options)}, allow_unicode=True)
        write_atomic(folder / _ARGUMENTS, text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None


def _arguments(options: Options) -> list[str]:
    """Return the arguments that identify a sweep."""
    file = [] if options.job_file is None else [str(options.job_file)]
    folders = options.values.get("--config-dir", [])
    return [*file, *folders, *options.overrides, *options.hydra]


def job_folder_name(overrides: Sequence[str], taken: Sequence[str]) -> str:
    """Return a short folder name, safe in every shell and file system.

    Args:
        overrides: the arguments in which the job differs from others.
        taken: the names of other jobs' folders.
    """
    parts = [re.sub(r"[^\w.+=-]+", "-", override).strip("-") for override in overrides]
    name = ",".join(parts) or "job"
    if len(name.encode()) > _LONGEST_NAME or name in taken:
        digest = blake2b("\0".join(overrides).encode(), digest_size=4).hexdigest()
        name = f"{name.encode()[:_LONGEST_NAME].decode(errors='ignore')}-{digest}"
    return name


class FolderNames:
    """Names the folders of a sweep's jobs. Jobs that differ only in the worker's name are one job,
    and share a folder."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}

    def of(self, overrides: Sequence[str]) -> str:
        """Return the name for the arguments in which a job differs; empty if the job uses the
        parent folder."""
        key = tuple(argument for argument in overrides if not names_worker(argument))
        if key not in self._names:
            only_worker = overrides and not key  # the jobs differ in nothing else
            taken = list(self._names.values())
            self._names[key] = "" if only_worker else job_folder_name(key, taken)
        return self._names[key]


def sweep_table(jobs: Sequence[SweepJob]) -> str:
    """Return a table of the results of all jobs as text."""
    header = ("job", "exit", "rows", "errors", "tokens/s", "folder")
    rows = [header, *((job.name, *_facts(job)) for job in jobs)]
    return "\n".join(["", *columns(rows)])


def _facts(job: SweepJob) -> tuple[str, ...]:
    """Return a job's cells of the table: exit code, rows, error rows, tokens per second and
    folder."""
    if job.config is None or job.code is None:
        return ("not run" if job.code is None else str(job.code), "–", "–", "–", "–")
    folder = job.config.output.dir
    metrics = None if job.code == 2 else job_metrics(folder)
    if metrics is None:
        return (str(job.code), "–", "–", "–", folder)
    last = metrics["attempts"][-1]
    rows = metrics.get("rows", last["rows"] + last["rows_resumed"])
    errors = metrics.get("error_rows", last["error_rows"])
    speed = f"{metrics['tokens_per_s']:,.0f}"
    return (str(job.code), f"{rows:,}", f"{errors:,}", speed, folder)
