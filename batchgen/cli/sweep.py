"""`batchgen --multirun`: a job for each combination of the values that arguments list.

The jobs run one after the other, each in a folder that is named by what it sets. A sweep with
`output.dir` has its folders there, and the same command goes on with it. Without one the folder has
the date and time for its name; the same command finds it again by the arguments that it holds.
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
_ARGUMENTS = "sweep.yaml"
_LONGEST_NAME = 100
_CALL = re.compile(r"([^=]+)=\s*([a-z]+)\s*\((.*)\)\s*", re.DOTALL)
"""An argument whose value is a function of Hydra: the key, the function, and what it is given."""


@dataclass
class SweepJob:
    """One job of a sweep: the settings in which it differs from others as its name, its
    configuration if it was not refused, and its exit code once it has run."""

    name: str
    config: JobConfig | None
    code: int | None = None


def worst(codes: Sequence[int]) -> int:
    """The exit code of a sweep: a signal goes before all, a job that failed (1) before one that was
    refused (2), then one whose budget was spent (4), and that before error rows (3)."""
    if (highest := max(codes, default=0)) > 128:
        return highest
    return next((code for code in (1, 2, 4, 3) if code in codes), 0)


def swept_values(argument: str) -> list[str] | None:
    """The arguments that one argument of a sweep stands for; None if it lists no values.

    Values are listed as Hydra does: a,b or choice(a,b), range(1,9), and glob(*) for the choices of
    a group. A text with commas needs double quotes. ConfigError for values that cannot be counted.
    """
    override = swept(argument)
    if override is None:
        return None
    from hydra.core.override_parser.types import Glob

    if re.search("['\"]", argument) and (call := _CALL.fullmatch(argument)):
        # Hydra takes the quotes away in its functions, so that nobody knows what they held.
        if call[2] != "choice":
            raise ConfigError(f"{argument}: {call[2]} takes no quotes: list the values as a,b")
        listed = f"{call[1]}={call[3]}"
        return swept_values(listed) or [listed]
    key, value = argument.partition("=")[0], override.value()
    if isinstance(value, Glob):
        return [f"{key}={name}" for name in value.filter(choices(key.lstrip("+")))]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{argument}: a sweep needs a finite list of values: a,b or range(…)")
    return [f"{key}={one}" for one in override.sweep_string_iterator()]


def swept(argument: str) -> HydraOverride | None:
    """What Hydra reads in an argument that lists values, or a range of them; None for others."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    _, equals, text = argument.partition("=")
    if not equals or not ("," in text or "glob(" in text):
        return None
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:  # a text that Hydra does not know is what was typed
        return None
    return override if override.is_sweep_override() else None


def dated_folder(options: Options) -> Path:
    """The folder of a sweep without output.dir: an earlier one with the same arguments, or new."""
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
    """Make the folder of a sweep, with the arguments by which the same command finds it again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"arguments": _arguments(options)}, allow_unicode=True)
        write_atomic(folder / _ARGUMENTS, text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None


def _arguments(options: Options) -> list[str]:
    """The arguments by which a sweep's folder is found again."""
    file = [] if options.job_file is None else [str(options.job_file)]
    folders = options.values.get("--config-dir", [])
    return [*file, *folders, *options.overrides, *options.hydra]


def job_folder_name(overrides: Sequence[str], taken: Sequence[str]) -> str:
    """A short name, safe in every shell and file system, that no other job has."""
    parts = [re.sub(r"[^\w.+=-]+", "-", override).strip("-") for override in overrides]
    name = ",".join(parts) or "job"
    if len(name.encode()) > _LONGEST_NAME or name in taken:
        digest = blake2b("\0".join(overrides).encode(), digest_size=4).hexdigest()
        name = f"{name.encode()[:_LONGEST_NAME].decode(errors='ignore')}-{digest}"
    return name


class FolderNames:
    """The names of the folders of a sweep's jobs. Jobs that differ only in what their worker is
    called are one job, and have one folder."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}

    def of(self, overrides: Sequence[str]) -> str:
        """The name for the arguments in which a job differs; empty if it has the parent folder."""
        key = tuple(argument for argument in overrides if not names_worker(argument))
        if key not in self._names:
            alone = overrides and not key
            self._names[key] = "" if alone else job_folder_name(key, list(self._names.values()))
        return self._names[key]


def sweep_table(jobs: Sequence[SweepJob]) -> str:
    """A table of the results of all jobs, for people."""
    header = ("job", "exit", "rows", "errors", "tokens/s", "folder")
    rows = [header, *((job.name, *_facts(job)) for job in jobs)]
    return "\n".join(["", *columns(rows)])


def _facts(job: SweepJob) -> tuple[str, ...]:
    """Exit code, rows, error rows, tokens per second and folder."""
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
