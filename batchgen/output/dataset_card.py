"""The README.md of an output folder: a data set card, which the hub and `load_dataset` read."""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchgen.output.metrics import OUTCOMES, Totals

_MOST_SHOWN = 500
_IN_TABLE = (b"meaning", b"scope", b"dtype", b"shape")
"""Keys of a field's metadata that the table of columns shows, or that its type says."""
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


_MADE_FROM = """\
## How it was made

`config.yaml` is the configuration that the job ran with, key by key. `manifest.json` has the \
fingerprints of its model and data set and the versions of the packages.

Whoever made these files can make them again. This is run where the job was started, because paths \
in the configuration may be relative to that place, and with the absolute path of this folder:

```
batchgen --config-path /path/of/this/folder output.dir=again
```

A configuration is as powerful as a program: it says which files and models are read and where the \
output goes, and it can name Python code to run. If you did not write `config.yaml` yourself, do \
not run it as it is: read it, and put what you need of it into a configuration of your own.
"""


def dataset_card(
    config: Mapping[str, Mapping[str, Any]],
    fingerprints: Mapping[str, str],
    schema: pa.Schema,
    totals: Totals,
) -> str:
    """The text of the card of a complete job.

    Args:
        config: the resolved configuration, by group.
        fingerprints: of the data set, the model and what else decides the answers, by name.
        schema: of the shards.
    """
    model, dataset = config["model"], config["dataset"]
    source = dataset.get("path") or "the demo rows of batchgen"
    columns = [
        f"| `{field.name}` | `{field.type}` | {_meta(field, 'shape')} | {_meta(field, 'meaning')} |"
        for field in schema
    ]
    facts = [
        *_rows(totals),
        f"Model: `{model['path']}`"
        + (f", revision `{model['revision']}`" if model.get("revision") else ""),
        f"Dataset: `{source}`" + (f", split `{dataset['split']}`" if dataset.get("split") else ""),
        *_constraint(config["constraint"], totals),
        f"Sampling: {', '.join(_assignments(config['sampling']))}",
        *(f"Fingerprint of {what}: `{digest}`" for what, digest in fingerprints.items()),
    ]
    return "\n".join(
        [
            _HEADER,
            f"# Answers of {model.get('name') or model['path']} to {source}",
            "",
            "Written by batchgen: one row per input row and sample, in the order of the input.",
            "",
            *(f"- {fact}" for fact in facts),
            "",
            "## Columns",
            "",
            "| column | type | shape | meaning |",
            "|---|---|---|---|",
            *columns,
            "",
            *_more(schema),
            _MADE_FROM,
        ]
    )


def _rows(totals: Totals) -> list[str]:
    """How many rows and tokens there are, and how the rows ended."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in totals.finish_reasons.items())
    facts = [
        f"{totals.rows:,} rows: {reasons or 'none'}.",
        f"{totals.prompt_tokens:,} prompt tokens, {totals.generated_tokens:,} generated tokens.",
    ]
    if totals.errors:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in totals.errors.items())
        facts.append(f"{totals.error_rows:,} rows have an `error` and no text: {kinds}.")
    return facts


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"`{key}={json.dumps(value, ensure_ascii=False)}`" for key, value in values.items()]


def _constraint(constraint: Mapping[str, Any], totals: Totals) -> list[str]:
    """Which constraint the rows had, and how many kept it; nothing for a job without one."""
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


def _more(schema: pa.Schema) -> list[str]:
    """What columns say of themselves besides what stands in the table."""
    lines = []
    for field in schema:
        given = (field.metadata or {}).items()
        more = [(key.decode(), value.decode()) for key, value in given if key not in _IN_TABLE]
        if _meta(field, "scope") and more:
            lines += [f"`{field.name}`:", "", *(f"- {key}: {value}" for key, value in more), ""]
    return lines


def _meta(field: pa.Field, key: str) -> str:
    value: bytes = (field.metadata or {}).get(key.encode(), b"")
    return value.decode()
