"""The identity of a job: the part of its configuration that decides the content of its output
files.

The manifest of an output folder records it. A job may go on in a folder only if the identities are
equal. The keys under which rows are reused (`reuse/row_key.py`) digest it too. An identity has, for
example, {"sampling": {"temperature": 0.7, "seed": 0, …}, …}, but neither `output.dir` nor
`dataset.path`, because the content of the data is compared by a fingerprint (a digest).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.class_names import with_lasting_names
from batchgen.config.groups.config_keys import choice_values, choices
from batchgen.config.groups.constraint_config import (
    NoConstraintConfig,
)
from batchgen.config.groups.convert_value import (
    MISSING,
    key_of,
    plain_value,
)
from batchgen.config.groups.dataset_config import is_usual
from batchgen.config.groups.job_config import (
    JobConfig,
)

_NOT_DECIDING: Mapping[str, Collection[str]] = {
    "model": {"name", "path", "revision", "lora"},
    "dataset": {"path", "limit", "follow"},
    "prompt": {"image_root", "constant"},
    "sampling": {"n"},
    "engine": {
        *("device", "tensor_parallel", "max_num_seqs", "max_batched_tokens", "chunk_tokens"),
        *("image_tokens", "block_size", "prefix_caching", "kv_cache_gib", "state_checkpoints"),
        *("gpu_memory_utilization", "cuda_graph", "overlap"),
        "lora_slots",
        "deterministic",  # the manifest records what it promises as a fingerprint
    },
    "output": {
        *("dir", "overwrite", "retry_errors", "on_all_errors", "report", "reuse", "begun_every"),
    },
}
"""Keys of each group that do not decide the content of a row, up to rounding on a GPU."""
_IN_FIRST_VERSION: Mapping[str, Collection[str]] = {
    "model": {"dtype", "load_format", "trust_remote_code"},
    "dataset": {
        *("kind", "name", "split", "revision", "streaming", "id_column", "columns", "types"),
        *("delimiter", "encoding"),
    },
    "prompt": {
        *("kind", "user", "user_file", "system", "system_file", "messages_column"),
        *("template_kwargs", "text", "text_file", "add_special_tokens", "token_ids_column"),
        *("answer_ids_column", "body_column", "too_long"),
    },
    "sampling": {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids"),
        *("ignore_eos", "seed"),
    },
    "strategy": {
        *("_target_", "proposer", "num_spec_tokens", "verifier", "adaptive", "ngram_min"),
        *("ngram_max", "ngram_pool", "draft_model", "acceptance_floor", "block_length"),
        *("unmasking", "confidence_threshold", "denoising_steps", "fused_commit"),
    },
    "constraint": {
        *("kind", "column", "start_after", "schema", "max_whitespace", "pattern", "choices"),
        *("grammar", "tag"),
    },
    "engine": {"max_model_len"},
    "output": {"columns", "top_logprobs", "logprobs_mode", "rows_per_shard", "text_column"},
}
"""Keys that identities contain at any value, because those of version 0.1.0 contain them. All other
keys are in an identity only if they differ from their default. This table never grows."""
_READ_TABLES = ("Join", "Against")
"""Steps of `rows` whose `path` is that of a table."""
_GROWING = (("dataset", "path"), ("dataset", "limit"), ("sampling", "n"), ("model", "path"))
"""Keys that may change when a job is resumed, and that the manifest records."""


def config_identity(config: JobConfig, fingerprinted: Collection[str] = ()) -> dict[str, Any]:
    """The part of `resolved` that decides the content of the output files.

    Two jobs with the same identity, model files and data write the same rows, as far as both have
    them. A key is part of it unless it is in _NOT_DECIDING or has its default; so a key that a
    later version adds changes no identity (but see _IN_FIRST_VERSION). The paths of data, models
    and the `fingerprinted` files of the strategy (the options that name files) are not part of it,
    because the fingerprints of their content are compared.
    """
    # Classes have the names of version 0.1.0, so that moving a file changes no identity.
    groups, defaults = with_lasting_names(resolved(config)), _defaults(config)
    if isinstance(config.constraint, NoConstraintConfig):
        del groups["constraint"]
    if config.rows:
        groups["rows"] = [_without_path(step) for step in groups["rows"]]
    else:
        del groups["rows"]
    if config.sampling.until is not None:  # the number of samples may grow
        until = config.sampling.until
        rule = {} if until.width is None else {"rule": "width"}
        groups["sampling"]["until"] = {"where": until.where, **rule}
    # These groups do not change the rows themselves.
    for name in ("post", "score", "budget", "progress", "workers", "launcher"):
        del groups[name]
    for name in groups.keys() - {"rows"}:
        left_out = {*_NOT_DECIDING.get(name, ()), *(fingerprinted if name == "strategy" else ())}
        groups[name] = {
            key: value
            for key, value in groups[name].items()
            if key not in left_out
            and (
                _is_in_first_version(name, key, groups[name])
                or not _is_default(value, defaults[name].get(key, MISSING))
            )
            and not (name == "dataset" and is_usual(key, value))
        }
    return groups


def _is_in_first_version(name: str, key: str, group: Mapping[str, Any]) -> bool:
    """Whether identities contain a key at any value. `answer_ids_column` was at first a key of
    prompt=tokens only."""
    if (name, key) == ("prompt", "answer_ids_column") and group["kind"] != "tokens":
        return False
    return key in _IN_FIRST_VERSION[name]


def _defaults(config: JobConfig) -> dict[str, dict[str, Any]]:
    """The defaults of all keys that have one, by group.

    The defaults of a user's strategy are not known: its keys are in the identity if they are set.
    """
    defaults = {}
    for part in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, part.name)):
            fields = [f for f in dataclasses.fields(value) if f.default is not dataclasses.MISSING]
            defaults[part.name] = {key_of(f.name): plain_value(f.default) for f in fields}
    is_named = config.strategy.target in choices("strategy")
    defaults["strategy"] = choice_values("strategy", config.strategy.target) if is_named else {}
    return defaults


def _is_default(value: Any, default: Any) -> bool:
    """Whether a key has its default. If the default is None, an empty value or false counts as the
    same."""
    return bool(value == default) or (default is None and (value is False or value in ("", [], {})))


def _without_path(step: dict[str, Any]) -> dict[str, Any]:
    """A step of `rows` without the path of the table that it reads; the table's content counts
    instead."""
    return {
        name: {key: value for key, value in options.items() if key != "path"}
        if name in _READ_TABLES
        else options
        for name, options in step.items()
    }


def growing(config: JobConfig) -> dict[str, Any]:
    """The settings that may change when a job is resumed, for the manifest."""
    groups = resolved(config)
    values = {f"{name}.{key}": groups[name].get(key) for name, key in _GROWING}
    if (until := config.sampling.until) is not None:
        name, value = ("valid", until.valid) if until.width is None else ("width", until.width)
        values |= {f"sampling.until.{name}": value, "sampling.until.most": until.most}
    return values
