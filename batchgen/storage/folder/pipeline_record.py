"""The file pipeline.json of a pipeline's folder: the folder in which each step writes, and the
folders of earlier versions of the step.

A step's folder is `OUT/NAME.ADDRESS`. The address is a digest of everything that the step depends
on (`batchgen.pipelines.run.addresses`). The file may come from a stranger, so names and addresses
that could lead out of the pipeline's folder are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from batchgen.util.errors import JobError

FORMAT_VERSION = 1
RECORD = "pipeline.json"
PIPELINE_FILE = "pipeline.yaml"
"""A copy of the pipeline file that was run."""
STEP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,40}")
_ADDRESS = re.compile(r"[0-9a-f]{10}")
_STEP_FOLDER = re.compile(rf"({STEP_NAME.pattern})\.({_ADDRESS.pattern})")


@dataclass(frozen=True)
class Version:
    """A version of a step.

    Attributes:
        base: the address that follows from configuration, models and parents alone.
        edition: the number of times that the rows of the data set have changed under this base.
        parents: the addresses of the steps that it reads, by name.
    """

    base: str
    edition: int = 0
    parents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepVersions:
    """The versions of a step.

    Attributes:
        current: the address of the current version; None if the pipeline has no such step any more.
        versions: the versions by address, the oldest first.
    """

    current: str | None
    versions: Mapping[str, Version]

    @property
    def older(self) -> list[str]:
        """The addresses of the versions that are not current, the newest first."""
        return [address for address in [*self.versions][::-1] if address != self.current]


@dataclass(frozen=True)
class PipelineRecord:
    """The content of pipeline.json.

    Attributes:
        steps: the steps by name, each after the steps that it reads.
        format_version: the version of the file's format.
    """

    steps: Mapping[str, StepVersions] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def parse(cls, content: bytes, name: str) -> Self:
        """Parse the content of the file. `name` names the file in the message.

        Raises:
            JobError: the file is damaged or of another version.
        """
        try:
            values = json.loads(content)
            if values["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {values['format_version']}")
            return cls({step: _step(step, value) for step, value in values["steps"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise JobError(
                f"{name} is not a record of batchgen ({type(error).__name__}: {error}): remove "
                "it, and run the pipeline again, which writes it again"
            ) from None

    def text(self) -> str:
        """The text of the file."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def current(self) -> dict[str, str]:
        """The names of the current folders, by step."""
        current = {name: step.current for name, step in self.steps.items()}
        return {
            name: step_folder_name(name, address)
            for name, address in current.items()
            if address is not None
        }


def step_folder_name(step: str, address: str) -> str:
    """The name of the folder of a step's version."""
    return f"{step}.{address}"


def step_of(folder: str) -> str | None:
    """The step that a folder of this name belongs to; None if it is not the name of a step's
    folder."""
    match = _STEP_FOLDER.fullmatch(folder)
    return None if match is None else match[1]


def _step(name: str, value: Mapping[str, Any]) -> StepVersions:
    """The versions of a step from their JSON.

    Raises:
        ValueError: a name or an address has a wrong form.
    """
    if not STEP_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a step")
    versions = {}
    for address, version in value["versions"].items():
        parsed = Version(**version)
        for digest in (address, parsed.base, *parsed.parents.values()):
            if not _ADDRESS.fullmatch(digest):
                raise ValueError(f"{digest!r} is not an address")
        versions[address] = parsed
    current = value["current"]
    if current is not None and current not in versions:
        raise ValueError(f"{current!r} is not a version of {name}")
    return StepVersions(current, versions)
