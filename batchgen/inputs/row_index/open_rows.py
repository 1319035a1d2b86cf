"""Applies the row steps of a configuration to a data set. A job calls `behind_steps` when it opens
its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config.groups.job_config import StepConfig
from batchgen.evals.graders.build_steps import step_descriptions
from batchgen.inputs.dataset.row_steps import SteppedSource
from batchgen.inputs.dataset.source import Source
from batchgen.inputs.row_index.build_rows import build_rows, changes_rows, step_fingerprints
from batchgen.inputs.row_index.chain import Chain
from batchgen.inputs.row_index.indexed_source import IndexedSource
from batchgen.inputs.steps.table_step import TableStep
from batchgen.util.fingerprint import fingerprint_text


def behind_steps(
    data: Source, configs: Sequence[StepConfig], dataset: Mapping[str, Any], tokenizer: Any
) -> tuple[Source, Mapping[str, str]]:
    """Return the rows after the steps, and digests of what the steps depend on besides their
    options.

    Args:
        data: the rows before the steps.
        dataset: the configuration keys that determine the rows of `data`.
        tokenizer: that of the job's model; None without one.

    Raises:
        ConfigError: a step has a mistake, or reads a column that does not exist.
    """
    steps = build_rows(configs)
    if not steps:
        return data, {}
    fingerprints = step_fingerprints(configs, steps)
    if not changes_rows(steps):
        added = [s for s in steps if not isinstance(s, TableStep)]
        return SteppedSource(data, added), fingerprints
    chain = Chain(steps, data.features)
    facts = [step_descriptions(configs, steps), fingerprints, dict(dataset)]
    key = fingerprint_text(json.dumps(facts, sort_keys=True, default=str))
    return IndexedSource(data, chain, key, tokenizer), fingerprints
