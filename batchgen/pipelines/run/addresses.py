"""The address of a step: a digest of all that decides its rows.

Two versions of a step have one address if they differ in what may grow alone, such as the number of
rows, or where files lie. Whatever else changes in a step moves its address, and those of all steps
behind it.
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
"""Digests of the models of a step and of what goes with them, by name."""


def addresses(
    steps: Mapping[str, PipelineStep],
    prints: Mapping[str, Prints],
    edition: Callable[[str, str], int] = lambda name, base: 0,
) -> dict[str, tuple[str, Version]]:
    """Address and version of each step.

    Args:
        steps: in topological order.
        edition: how often a step's data have changed under the same base address.
    """
    found: dict[str, tuple[str, Version]] = {}
    for name, step in steps.items():
        parents = {other: found[other][0] for other in step.reads}
        read = [[other, at, _decides_answers(steps[other])] for other, at in parents.items()]
        base = _digest([_decides_rows(step, prints[name]), read])
        number = edition(name, base)
        address = _digest([base, number]) if number else base
        found[name] = address, Version(base, number, parents)
    return found


def _decides_rows(step: PipelineStep, prints: Prints) -> Any:
    """What decides the rows of a step, besides those that it reads."""
    # Other steps go by their names: where they lie decides nothing.
    config = step.within({name: name for name in [step.name, *step.reads]})
    models = [name for name in prints if name.endswith("_model")]
    decides = [config_identity(config, models), dict(prints)]
    if config.sampling.until is not None:  # these steps may say when a row has enough samples
        decides.append(_resolved(config)["post"])
    return decides


def _decides_answers(step: PipelineStep) -> Any:
    """What decides which answers a step shows to its readers, and is no part of its address: more
    samples come between others, and other grades choose other rows."""
    groups = _resolved(step.config)
    sampling = {key: groups["sampling"][key] for key in ("n", "until")}
    if sampling["until"]:  # a key at its default is part of nothing
        kept = {key: value for key, value in sampling["until"].items() if value is not None}
        sampling["until"] = kept
    return [{key: value for key, value in sampling.items() if value}, groups["post"]]


def _resolved(config: JobConfig) -> dict[str, Any]:
    """All keys, with classes under names that give one address in all versions."""
    return with_lasting_names(resolved(config))


def _digest(value: Any) -> str:
    return fingerprint_text(json.dumps(value, sort_keys=True, ensure_ascii=False))[:_LENGTH]
