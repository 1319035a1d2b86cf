"""Reads the keys `export` and `push` of a pipeline file, for `compose_pipeline`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from batchgen.config.compose.trust import Trust
from batchgen.config.groups.config_keys import nearest
from batchgen.pipelines.run.pipeline_values import EXPORT, FROM, PUSH, PipelineValues
from batchgen.storage.folder.export_record import EXPORTS, RECORD_FILE
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

if TYPE_CHECKING:
    from batchgen.pipelines.publish.trainers.trainer_rows import ExportRequest

_OUT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}")
"""The names that an export may have."""
_BYTES = ("kd-packed", "rl")
"""Formats that cannot be written as JSON lines."""


@dataclass(frozen=True)
class Export:
    """A file or folder that is written after the steps.

    Attributes:
        step: the step whose rows are exported.
        to: the trainer's format; None for unchanged columns.
        out: the name in the folder EXPORTS.
        options: further options of `batchgen export`.
    """

    step: str
    to: str | None
    out: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Return the export in the form of a pipeline file."""
        to = {} if self.to is None else {"to": self.to}
        return {FROM: self.step, **to, "out": self.out, **self.options}

    def request(self) -> ExportRequest:
        """Return the request for a trainer's format. Raises ConfigError for options that do not fit
        the format."""
        from batchgen.pipelines.publish.trainers.trainer_rows import (
            ExportRequest,  # it loads pyarrow
        )

        assert self.to is not None
        return ExportRequest(to=self.to, **self.options)


@dataclass(frozen=True)
class Push:
    """A push to the hub.

    Attributes:
        source: the step or the exported folder to push.
        repo: the repository, USER/SET.
        private: whether to create the repository as a private one.
    """

    source: str
    repo: str
    private: bool = False

    def values(self) -> dict[str, Any]:
        """Return the push in the form of a pipeline file."""
        return {FROM: self.source, "to": self.repo, "private": self.private}


def read_exports(pipeline: PipelineValues, steps: Collection[str]) -> list[Export]:
    """Read the exports of a pipeline. Raises ConfigError for an unknown step, an option that does
    not fit, or two exports with one name."""
    start = pipeline.at(EXPORT)
    exports = [_export(values, start, steps) for values in _list_of(pipeline, EXPORT)]
    if exports and is_url(pipeline.out):
        raise ConfigError(
            f"{start}it writes files on this machine, but output.dir is in an object store: "
            f"leave it out, and run `batchgen export {pipeline.out}/STEP --out FILE` afterwards"
        )
    for number, export in enumerate(exports):
        if export.out in [other.out for other in exports[:number]]:
            raise ConfigError(
                f"{start}two exports write {export.out}: give one of them another `out`"
            )
        if export.to is not None:
            try:
                export.request()
            except ConfigError as error:
                raise ConfigError(f"{start}{str(error).replace('--', '')}") from None
    return exports


def _export(values: Any, start: str, steps: Collection[str]) -> Export:
    from batchgen.pipelines.publish.trainers.text_export import export_format
    from batchgen.pipelines.publish.trainers.trainer_rows import FORMATS, ExportRequest

    if not isinstance(values, dict):
        raise ConfigError(f"{start}give {{from: STEP, to: sft}}, or a list of these")
    options = dict(values)
    step, to = options.pop(FROM, None), options.pop("to", None)
    _refuse_unknown_step(step, start, steps)
    if to is not None and to not in FORMATS:
        raise ConfigError(f"{start}to must be one of {', '.join(FORMATS)}, got {to!r}")
    of_trainers = {f.name for f in fields(ExportRequest)} - {"to"}
    allowed = of_trainers if to is not None else {"where", "columns"}
    for name in options:
        if name not in allowed | {"out"}:
            guess = nearest(name, allowed)
            hint = (
                f"did you mean {guess}?" if guess else f"choose among {', '.join(sorted(allowed))}"
            )
            raise ConfigError(f"{start}there is no option {name!r} here: {hint}")
    suffix = ".parquet" if to in _BYTES else ".jsonl"
    out = options.pop("out", f"{step}{'' if to is None else f'.{to}'}{suffix}")
    if not isinstance(out, str) or not _OUT.fullmatch(out) or out == RECORD_FILE:
        raise ConfigError(
            f"{start}out must be the name of a file in the folder {EXPORTS}, without a path, got "
            f"{out!r}"
        )
    if to is None:
        from pathlib import Path

        export_format(Path(out))
    if isinstance(options.get("messages"), list):
        options["messages"] = json.dumps(options["messages"], ensure_ascii=False)
    return Export(step, to, out, options)


def read_pushes(
    pipeline: PipelineValues, steps: Mapping[str, Any], exports: Sequence[Export], trust: Trust
) -> list[Push]:
    """Read the pushes of a pipeline.

    A push publishes rows with the user's login. A pipeline file from a stranger may therefore push
    only if the user trusts the file or types the push.

    Raises:
        ConfigError: the user has not confirmed the push, or its source cannot be pushed.
    """
    start = pipeline.at(PUSH)
    entries = _list_of(pipeline, PUSH)
    if entries and trust.sources and PUSH not in pipeline.typed:
        flags = " ".join(f"--trust {source}" for source in trust.sources)
        raise ConfigError(
            f"{start}the file would push rows to the hub with your login: confirm it with "
            f"{flags}, or leave it out of the file and type push=USER/SET"
        )
    if entries and is_url(pipeline.out):
        raise ConfigError(f"{start}push works on a folder of this machine")
    folders = [one.out for one in exports if "." not in one.out]
    read = {name for step in steps.values() for name in step.reads}
    last = [name for name in steps if name not in read]
    return [_push(values, start, steps, folders, last) for values in entries]


def _push(
    values: Any, start: str, steps: Collection[str], folders: list[str], last: list[str]
) -> Push:
    if isinstance(values, str):
        if len(last) > 1:
            raise ConfigError(
                f"{start}several steps are the last ones ({', '.join(last)}): say which is meant, "
                f"{{from: {last[0]}, to: {values}}}"
            )
        return Push(last[0], values)
    form = "USER/SET, or {from: STEP, to: USER/SET, private: true}"
    if not isinstance(values, dict) or not isinstance(values.get("to"), str):
        raise ConfigError(f"{start}give {form}")
    if unknown := sorted(values.keys() - {FROM, "to", "private"}):
        raise ConfigError(f"{start}there is no option {unknown[0]!r} here: give {form}")
    source, private = values.get(FROM), values.get("private", False)
    if source not in folders:
        _refuse_unknown_step(source, start, [*steps, *folders])
    if not isinstance(private, bool):
        raise ConfigError(f"{start}private must be true or false, got {private!r}")
    return Push(str(source), values["to"], private)


def _refuse_unknown_step(step: Any, start: str, steps: Collection[str]) -> None:
    if step not in steps:
        raise ConfigError(
            f"{start}there is no step {step!r} to take rows {FROM}: choose among {', '.join(steps)}"
        )


def _list_of(pipeline: PipelineValues, key: str) -> list[Any]:
    """Return the value of a key as a list; a single entry may be given without one."""
    value = pipeline.keys.get(key)
    return [] if value is None else value if isinstance(value, list) else [value]


def export_settings(export: Export) -> dict[str, Any]:
    """Return the settings that decide an export's content, besides the rows of its step."""
    return {key: value for key, value in asdict(export).items() if key != "out"}
