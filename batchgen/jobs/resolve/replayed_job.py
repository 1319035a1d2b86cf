"""Checks that a job which replays the answers of another job decodes with the same settings as that
job.

A replay computes the probabilities with which a diffusion model unmasks the tokens of a stored
answer, in the steps in which they were unmasked. `open_job.py` calls `check_replay`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.groups.job_config import JobConfig
from batchgen.inputs.dataset.source import ReadJob
from batchgen.util.errors import ConfigError

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Keys that decide the probability distribution of a token."""
_WITHOUT_EFFECT = ("fused_commit",)
"""Options of the strategy that decide the number of forwards, but not the tokens."""


def check_replay(config: JobConfig, jobs: Sequence[ReadJob]) -> bool:
    """Check the settings of the jobs whose answers are replayed.

    Returns:
        Whether these jobs drew every token from the distribution whose log-probabilities this job
        writes. They did not if this job writes processed ones, and a constraint or a ban of stop
        ids changed the distribution then.

    Raises:
        ConfigError: the strategy, the sampling or the mode of log-probabilities differs.
    """
    deciding = _deciding(config_identity(config))
    same = True
    for job in jobs:
        theirs = _deciding(job.identity)
        for key in sorted(deciding.keys() | theirs.keys()):
            if deciding.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{key} is {_shown(deciding.get(key))} here and {_shown(theirs.get(key))} in "
                    f"{job.name}, whose answers are replayed: the same tokens would be scored "
                    "under other conditions; give the value of that job"
                )
        if config.output.logprobs_mode == "processed":
            sampling = job.identity.get("sampling", {})
            same = same and "constraint" not in job.identity
            same = same and not sampling.get("min_new_tokens") and not sampling.get("column")
    return same


def _deciding(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the distributions of a job's tokens, by key."""
    strategy, sampling = groups.get("strategy", {}), groups.get("sampling", {})
    values = {f"strategy.{key}": v for key, v in strategy.items() if key not in _WITHOUT_EFFECT}
    values |= {f"sampling.{key}": sampling.get(key) for key in _SAMPLING}
    values["output.logprobs_mode"] = groups.get("output", {}).get("logprobs_mode")
    return values


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
