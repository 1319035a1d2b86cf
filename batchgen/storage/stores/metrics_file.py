"""Reads the file metrics.json of a job."""

from __future__ import annotations

import json
from typing import Any

from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import JobError

METRICS = "metrics.json"


def parse_metrics(content: bytes, name: str) -> dict[str, Any]:
    """Parse the content of metrics.json. `name` names the file in the message.

    Raises:
        JobError: the file is damaged. The message says what to do.
    """
    try:
        metrics: dict[str, Any] = json.loads(content)
        for values in (metrics, *metrics.get("attempts", ())):
            values["status"]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise JobError(
            f"{name} is damaged ({type(error).__name__}: {error}): remove it; rows are readable "
            "without it, and the job's next attempt writes it again"
        ) from None
    return metrics


def read_metrics(storage: Storage) -> dict[str, Any] | None:
    """Read metrics.json of the job in a storage; None if there is none. Raises JobError if the file
    is damaged."""
    content = storage.read(storage.path / METRICS)
    return None if content is None else parse_metrics(content, f"{storage.display_name}/{METRICS}")
