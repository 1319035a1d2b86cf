"""Makes a job's configuration of what a user gives: a job file, a mapping, `key=value` texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config.groups import JobConfig


def compose(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration of one job.

    Args:
        values: the job as a job file has it. A key is a group with its choice ("model": "hf"), a
            group with its keys ("model": {"path": "…"}), or one key with its full name
            ("sampling.n": 4). What is not given is as it is for the command without arguments.
        overrides: arguments `key=value` as on the command line; they go before `values`.

    Raises:
        ConfigError: a key or choice is unknown, or a value is missing, of a wrong type or out of
            range.
    """
    raise NotImplementedError
