"""Computes the address of each step of a pipeline: a digest of everything that decides the step's
rows.

A step writes into OUT/NAME.ADDRESS, so a changed step gets a new folder. Two kinds of change keep
the address: a change after which finished rows stay valid (such as the number of rows), and a new
location of files. Any other change gives a new address to the step and to all steps that read it,
directly or through other steps.
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

_LENGTH = 10  # characters of an address
Prints = Mapping[str, str]
"""Name → fingerprint of the models of a step, and of files that belong to the models."""


def addresses(
    steps: Mapping[str, PipelineStep],
    prints: Mapping[str, Prints],
    edition: Callable[[str, str], int] = lambda name, base: 0,
) -> dict[str, tuple[str, Version]]:
    """Return the address and the version of each step, by its name.

    Args:
        steps: the steps, each after the steps that it reads.
        prints: the fingerprints of each step's models.
        edition: returns, for a step and its base address, how often the step's data changed without
            a change of the configuration.
    """
    results: dict[str, tuple[str, Version]] = {}
    for name, step in steps.items():
        parents = {}  # name of a step that this one reads → its address
        for parent in step.reads:
            parents[parent], _ = results[parent]
        inputs = [
            [parent, address, _decides_answers(steps[parent])]
            for parent, address in parents.items()
        ]
        base = _digest([_decides_rows(step, prints[name]), inputs])
        number = edition(name, base)
        address = _digest([base, number]) if number else base
        results[name] = address, Version(base, number, parents)
    return results


def _decides_rows(step: PipelineStep, prints: Prints) -> Any:
    """Return everything that decides the rows of a step, except the steps that it reads."""
    # Folders of other steps are replaced by the steps' names, because locations do not matter.
    config = step.within({name: name for name in [step.name, *step.reads]})
    models = [name for name in prints if name.endswith("_model")]
    decides = [config_identity(config, models), dict(prints)]
    if config.sampling.until is not None:  # `post` steps may decide when a row has enough samples
        decides.append(_resolved(config)["post"])
    return decides


def _decides_answers(step: PipelineStep) -> Any:
    """Return the settings of a step that change the input of its readers but not its own rows: the
    number of samples, and the grades. They are not part of the step's own address."""
    groups = _resolved(step.config)
    sampling = {key: groups["sampling"][key] for key in ("n", "until")}
    if sampling["until"]:  # keys without a value do not count
        until = {key: value for key, value in sampling["until"].items() if value is not None}
        sampling["until"] = until
    return [{key: value for key, value in sampling.items() if value}, groups["post"]]


def _resolved(config: JobConfig) -> dict[str, Any]:
    """Return all keys of a configuration. Classes have names that later versions of batchgen
    keep."""
    return with_lasting_names(resolved(config))


def _digest(value: Any) -> str:
    return fingerprint_text(json.dumps(value, sort_keys=True, ensure_ascii=False))[:_LENGTH]
