"""Chooses how a job separates answers from the model's other text, and finds the date that prompts
name. `open_job.py` calls both functions."""

from __future__ import annotations

import sys
from contextlib import closing

from batchgen.config.groups.constraint_config import NoConstraintConfig
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.prompt_config import TextPromptConfig, answer_key
from batchgen.engine.constraint.harmony import HarmonyTokens
from batchgen.inputs.model.open_model import OpenedModel
from batchgen.inputs.prompts.chat_templates import today
from batchgen.pages.tokens.channels import HarmonyChannels
from batchgen.pages.tokens.reasoning import ReasoningMarkers
from batchgen.storage.folder.refused_folder import written_manifest
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError


def answers_of(config: JobConfig, model: OpenedModel) -> ReasoningMarkers | HarmonyChannels | None:
    """Make the object that separates answers from reasoning and channels.

    Returns:
        None if the whole text is the answer.

    Raises:
        ConfigError: an option does not fit the way the model answers.
    """
    start, end = config.output.reasoning_start, config.output.reasoning_end
    if end is not None:
        size = model.config.vocab_size
        return ReasoningMarkers(model.tokenizer, size, model.eos_token_ids, start=start, end=end)
    tokens = None if model.tokenizer is None else HarmonyTokens.of(model.tokenizer)
    if tokens is None or answer_key(config.prompt) is not None:
        return None
    assert model.tokenizer is not None
    _check_constraint(config)
    prompt = config.prompt
    if isinstance(prompt, TextPromptConfig) and "<|start|>" not in (prompt.text or ""):
        print(
            "batchgen: warning: prompt=text leaves out the chat format of the model (Harmony), "
            "without which its answers are far worse: use prompt=chat",
            file=sys.stderr,
        )
    return None if config.output.whole_text else HarmonyChannels(tokens, model.tokenizer)


def _check_constraint(config: JobConfig) -> None:
    """Refuse options that do not fit a constraint on a model with channels, where the constraint
    holds in the final channel only."""
    if not config.constrained:
        return
    constraint = config.constraint
    if not isinstance(constraint, NoConstraintConfig) and constraint.start_after is not None:
        raise ConfigError(
            "constraint.start_after must be null with this model, which names the channel of its "
            "answer (Harmony): a constraint holds in the final channel"
        )
    if config.output.whole_text:
        raise ConfigError(
            "output.whole_text=true writes all channels as one text, but a constraint holds only "
            "in the final channel: leave one out"
        )
    if config.scores_choices:
        raise ConfigError(
            "constraint.scores gives the probabilities of choices directly after the prompt, but "
            "this model begins each answer with a channel (Harmony): leave it out"
        )


def day_of(config: JobConfig) -> str:
    """The day that prompts name, as YYYY-MM-DD: the day on which the job in the folder began, or
    today."""
    try:
        with closing(open_storage(config.output.dir, config.workers)) as storage:
            old = written_manifest(storage)
    except (ConfigError, JobError, OSError):  # the folder is checked later
        old = None
    known = None if old is None else old.identity.get("prompt", {}).get("date")
    return known or today()
