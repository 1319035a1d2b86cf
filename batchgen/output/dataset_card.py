"""README.md of an output folder: a dataset card that the Hub and `load_dataset` understand."""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchgen.output.metrics import OUTCOMES, Totals

_MOST_SHOWN = 500
_HEADER = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
- batchgen
- synthetic
---
"""


def dataset_card(
    config: Mapping[str, Mapping[str, Any]],
    fingerprints: Mapping[str, str],
    schema: pa.Schema,
    totals: Totals,
) -> str:
    """The card of a complete job.

    Args:
        config: the resolved configuration, by group.
        fingerprints: of the dataset and the model.
    """
    model, dataset, sampling = config["model"], config["dataset"], config["sampling"]
    name = model.get("name") or model["path"]
    source = dataset.get("path") or "the demo rows of batchgen"
    set_sampling = [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sampling.items()
    ]
    columns = [
        f"| `{field.name}` | `{field.type}` | {_meta(field, 'shape')} | {_meta(field, 'meaning')} |"
        for field in schema
    ]
    counts = [
        f"{totals.rows:,} rows: "
        + (", ".join(f"{n:,} {reason}" for reason, n in totals.finish_reasons.items()) or "none")
        + ".",
        f"{totals.prompt_tokens:,} prompt tokens, {totals.generated_tokens:,} generated tokens.",
    ]
    if totals.errors:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in totals.errors.items())
        counts.append(f"{totals.error_rows:,} rows have an `error` and no text: {kinds}.")
    return "\n".join(
        [
            _HEADER,
            f"# Answers of {name} to {source}",
            "",
            "Written by batchgen: one row per input row and sample, in the order of the input.",
            "",
            *(f"- {line}" for line in counts),
            f"- Model: `{model['path']}`"
            + (f", revision `{model['revision']}`" if model.get("revision") else ""),
            f"- Dataset: `{source}`"
            + (f", split `{dataset['split']}`" if dataset.get("split") else ""),
            *(f"- {line}" for line in _constraint(config["constraint"], totals)),
            f"- Sampling: {', '.join(f'`{text}`' for text in set_sampling)}",
            *(f"- Fingerprint of {what}: `{digest}`" for what, digest in fingerprints.items()),
            "",
            "## Columns",
            "",
            "| column | type | shape | meaning |",
            "|---|---|---|---|",
            *columns,
            "",
            "## How to reproduce",
            "",
            "`config.yaml` holds every key of the job, `manifest.json` the fingerprints of its "
            "model and dataset and the package versions. With the absolute path of this folder, "
            "where the job was started (its paths may be relative to that place):",
            "",
            "```",
            "batchgen --config-path /path/of/this/folder output.dir=again",
            "```",
            "",
        ]
    )


def _constraint(constraint: Mapping[str, Any], totals: Totals) -> list[str]:
    """What the text of the rows was held to, if to anything."""
    if not totals.constraint:
        return []
    given = {key: value for key, value in constraint.items() if value and key != "kind"}
    text = json.dumps(given, ensure_ascii=False)
    what = f"`{text}`" if len(text) <= _MOST_SHOWN and "`" not in text else "see `config.yaml`"
    counts = ", ".join(
        f"{totals.constraint[name]:,} {name} ({meaning})"
        for name, meaning in OUTCOMES.items()
        if totals.constraint[name]
    )
    return [
        f"Constraint: {constraint['kind']}, {what}",
        f"Rows by constraint: {counts or 'none'}. `python -m batchgen.validate FOLDER` checks them "
        "again.",
    ]


def _meta(field: pa.Field, key: str) -> str:
    value: bytes = (field.metadata or {}).get(key.encode(), b"")
    return value.decode()
