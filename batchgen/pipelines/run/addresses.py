"""The address of a pipeline's step: a digest of everything that decides its rows.

A step writes into OUT/NAME.ADDRESS, so a changed step gets a new folder. The address stays the same
if only keys change under which finished rows stay valid (such as the number of rows), or the
location of files. Any other change of a step changes its address, and those of all steps that read
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.class_names import with_lasting_names
from batchgen.config.groups.job_config import JobConfig
from batchgen.pipelines.run.pipeline import PipelineStep
from batchgen.storage.folder.pipeline_record import Version
from batchgen.util.fingerprint import fingerprint_text

_LENGTH = 10
Prints = Mapping[str, str]
"""Fingerprints of the models of a step, and of files that belong to them, by name."""


def addresses(
    steps: Mapping[str, PipelineStep],
    prints: Mapping[str, Prints],
    edition: Callable[[str, str], int] = lambda name, base: 0,
) -> dict[str, tuple[str, Version]]:
    """The address and the version of each step, by its name.

    Args:
        steps: the steps, each behind those that it reads.
        prints: the fingerprints of each step's models.
        edition: returns, for a step and its base address, how often its data have changed under it.
    """
    results: dict[str, tuple[str, Version]] = {}
    for name, step in steps.items():
        parents = {other: results[other][0] for other in step.reads}
        inputs = [[other, at, _decides_answers(steps[other])] for other, at in parents.items()]
        base = _digest([_decides_rows(step, prints[name]), inputs])
        number = edition(name, base)
        address = _digest([base, number]) if number else base
        results[name] = address, Version(base, number, parents)
    return results


def _decides_rows(step: PipelineStep, prints: Prints) -> Any:
    """Everything that decides the rows of a step, except the steps that it reads."""
    # Other steps go by their names: where they lie decides nothing.
    config = step.within({name: name for name in [step.name, *step.reads]})
    models = [name for name in prints if name.endswith("_model")]
    decides = [config_identity(config, models), dict(prints)]
    if config.sampling.until is not None:  # these steps may say when a row has enough samples
        decides.append(_resolved(config)["post"])
    return decides


def _decides_answers(step: PipelineStep) -> Any:
    """Settings of a step that are not part of its address, because they do not change its rows, but
    that change the input of steps that read it: the number of samples, and the grades."""
    groups = _resolved(step.config)
    sampling = {key: groups["sampling"][key] for key in ("n", "until")}
    if sampling["until"]:  # keys at their defaults do not count
        kept = {key: value for key, value in sampling["until"].items() if value is not None}
        sampling["until"] = kept
    return [{key: value for key, value in sampling.items() if value}, groups["post"]]


def _resolved(config: JobConfig) -> dict[str, Any]:
    """All keys of a configuration, with names of classes that stay the same in later versions."""
    return with_lasting_names(resolved(config))


def _digest(value: Any) -> str:
    return fingerprint_text(json.dumps(value, sort_keys=True, ensure_ascii=False))[:_LENGTH]
