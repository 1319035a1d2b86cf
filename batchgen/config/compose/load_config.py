"""Turns composed groups into a JobConfig, and a JobConfig back into plain values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchgen.config.compose.trust import Trust
from batchgen.config.compose.value_references import refuse_endless, refuse_resolvers
from batchgen.config.groups.class_names import CLASSES, short_step, with_lasting_names
from batchgen.config.groups.config_keys import STEP_LISTS, choice_values, choices
from batchgen.config.groups.constraint_config import (
    CONSTRAINT_KINDS,
    ConstraintConfig,
    NoConstraintConfig,
    with_contents,
)
from batchgen.config.groups.convert_value import (
    MISSING,
    build,
    check_keys,
    convert,
    key_of,
    plain_value,
)
from batchgen.config.groups.dataset_config import is_usual
from batchgen.config.groups.job_config import (
    PROMPT_KINDS,
    DatasetConfig,
    EngineGroup,
    JobConfig,
    LauncherConfig,
    ModelGroup,
    OutputConfig,
    ProgressConfig,
    PromptConfig,
    ScoreConfig,
    StepConfig,
    StrategyConfig,
)
from batchgen.config.groups.launcher_config import job_launcher
from batchgen.config.groups.model_sampling import with_model_values
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.config.groups.workers_config import BudgetConfig, WorkersConfig
from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import yaml_text

_NOT_DECIDING: Mapping[str, Collection[str]] = {
    "model": {"name", "path", "revision", "lora"},
    "dataset": {"path", "limit", "follow"},
    "prompt": {"image_root", "constant"},
    "sampling": {"n"},
    "engine": {
        *("device", "tensor_parallel", "max_num_seqs", "max_batched_tokens", "chunk_tokens"),
        *("image_tokens", "block_size", "prefix_caching", "kv_cache_gib", "state_checkpoints"),
        *("row_tokens", "gpu_memory_utilization", "cuda_graph", "overlap"),
        "lora_slots",
        "deterministic",  # the contract of a job with it is a fingerprint
    },
    "output": {
        *("dir", "overwrite", "retry_errors", "on_all_errors", "report", "reuse", "begun_every"),
    },
}
"""Keys of each group that decide nothing about the content of a row, up to rounding on a GPU."""
_FIRST: Mapping[str, Collection[str]] = {
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
"""Keys that identities have at any value, since those of version 0.1.0 have them. All others are in
an identity only at another value than their default; this table gets no new ones."""
_READ_TABLES = ("Join", "Against")
"""Steps of `rows` whose `path` says where a table lies."""
_REMEMBERED = (("dataset", "path"), ("dataset", "limit"), ("sampling", "n"), ("model", "path"))


def load_config(
    values: dict[str, Any], trust: Trust, *, resolvers: Collection[str] = ()
) -> JobConfig:
    """The configuration of one job, with all types and ranges checked. `values` are its groups, the
    word of `trust`, which may use these `resolvers`; ConfigError for any mistake, and for code that
    needs the user's word."""
    refuse_resolvers(values, resolvers)
    refuse_endless(values)
    _check_kinds(values)
    try:
        groups = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key, reason = error.full_key, str(error).splitlines()[0]
        raise ConfigError(
            f"{key or 'the configuration'} cannot be resolved: {reason}: ${{KEY}} takes the value "
            "of another key; write \\${ for the text"
        ) from None
    if not isinstance(groups, dict):
        raise ConfigError("the configuration must be a mapping of groups (model, dataset, …)")
    names = [f.name for f in dataclasses.fields(JobConfig)]
    # The config.yaml of a job from before there were these groups does not have them.
    groups.setdefault("constraint", {"kind": "none"})
    groups.setdefault("launcher", {"_target_": None})
    for name in ("progress", "score", "workers", "budget"):
        groups.setdefault(name, {})
    for name in STEP_LISTS:
        groups.setdefault(name, [])
    check_keys(groups, allowed=names, required=names, prefix="")
    for name in names:
        if name not in STEP_LISTS and not isinstance(groups[name], dict):
            raise ConfigError(
                f"{name} must be a group of keys, got {groups[name]!r}: see conf/{name}/"
            )
    if isinstance(path := groups["model"].get("path"), str):
        revision = groups["model"].get("revision")
        groups["sampling"] = with_model_values(groups["sampling"], path, revision)
    config = JobConfig(
        model=build(ModelGroup, groups["model"], "model"),
        dataset=build(DatasetConfig, groups["dataset"], "dataset"),
        rows=step_configs(groups["rows"], "rows"),
        prompt=_build_prompt(groups["prompt"]),
        sampling=build(SamplingConfig, groups["sampling"], "sampling"),
        strategy=StrategyConfig(**_target_and_options(groups["strategy"], "strategy.")),
        constraint=constraint_config(groups["constraint"]),
        engine=build(EngineGroup, groups["engine"], "engine"),
        workers=build(WorkersConfig, groups["workers"], "workers"),
        launcher=_build_launcher(groups["launcher"]),
        post=step_configs(groups["post"], "post"),
        score=build(ScoreConfig, groups["score"], "score"),
        budget=build(BudgetConfig, groups["budget"], "budget"),
        output=build(OutputConfig, groups["output"], "output"),
        progress=build(ProgressConfig, groups["progress"], "progress"),
    )
    trust.check(resolved(config))
    job_launcher(config)  # checks its keys, now that its class may be imported
    return config


def _check_kinds(groups: Any) -> None:
    """Raise ConfigError for a group that does not say which kind it is, as a choice of the user's
    own that begins with none of batchgen's."""
    for group, key, usual in (
        *(("dataset", "kind", "files"), ("prompt", "kind", "chat")),
        ("strategy", "_target_", "ar"),
    ):
        values = groups.get(group) if isinstance(groups, dict) else None
        if isinstance(values, dict) and values and key not in values:
            raise ConfigError(
                f"{group}.{key} is missing: a choice of your own begins with one of batchgen's, "
                f"such as by the line `defaults: [{usual}]`; there are {', '.join(choices(group))}"
            )


def constraint_config(values: dict[str, Any]) -> ConstraintConfig:
    """The group `constraint`, made from its plain values."""
    kind = values.get("kind", MISSING)
    if not isinstance(kind, str) or kind not in CONSTRAINT_KINDS:
        raise ConfigError(
            f"constraint.kind must be one of {', '.join(CONSTRAINT_KINDS)}, got {kind!r}"
        )
    return build(CONSTRAINT_KINDS[kind], with_contents(values), "constraint")


def resolved(config: JobConfig) -> dict[str, Any]:
    """The configuration as plain values, under the keys that users write."""
    groups = dataclasses.asdict(config)
    data = groups["dataset"]  # each kind has keys of its own
    groups["dataset"] = {key: data[key] for key in choice_values("dataset", data["kind"])}
    groups["prompt"] = {key_of(name): value for name, value in groups["prompt"].items()}
    for name in ("strategy", "launcher"):
        groups[name] = _with_target(groups[name] or {"target": None, "options": {}})
    for name in STEP_LISTS:
        groups[name] = [short_step(_with_target(step)) for step in groups[name]]
    return {name: plain_value(group) for name, group in groups.items()}


def config_identity(config: JobConfig, fingerprinted: Collection[str] = ()) -> dict[str, Any]:
    """The part of `resolved` that decides what is in the output files.

    Two jobs with the same identity, model files and data write the same rows, as far as both have
    them. A key is part of it unless it is among _NOT_DECIDING; at its default it is not, so that a
    key that a later version adds changes no identity (but see _FIRST). Where data, models, and the
    `fingerprinted` files of the strategy lie is no part: the fingerprints of their content are
    compared.
    """
    groups, defaults = with_lasting_names(resolved(config)), _defaults(config)
    if isinstance(config.constraint, NoConstraintConfig):
        del groups["constraint"]  # a job without one says no more about it than that
    if config.rows:
        groups["rows"] = [_without_place(step) for step in groups["rows"]]
    else:
        del groups["rows"]
    if config.sampling.until is not None:  # how many samples there are can grow
        until = config.sampling.until
        rule = {} if until.width is None else {"rule": "width"}
        groups["sampling"]["until"] = {"where": until.where, **rule}
    # What becomes of finished rows does not change them.
    for name in ("post", "score", "budget", "progress", "workers", "launcher"):
        del groups[name]
    for name in groups.keys() - {"rows"}:
        left_out = {*_NOT_DECIDING.get(name, ()), *(fingerprinted if name == "strategy" else ())}
        groups[name] = {
            key: value
            for key, value in groups[name].items()
            if key not in left_out
            and (
                _is_first(name, key, groups[name])
                or not _is_default(value, defaults[name].get(key, MISSING))
            )
            and not (name == "dataset" and is_usual(key, value))
        }
    return groups


def _is_first(name: str, key: str, group: Mapping[str, Any]) -> bool:
    """Whether identities have a key at any value. One of them was at first a key of prompt=tokens
    alone."""
    if (name, key) == ("prompt", "answer_ids_column") and group["kind"] != "tokens":
        return False
    return key in _FIRST[name]


def _defaults(config: JobConfig) -> dict[str, dict[str, Any]]:
    """The defaults of all keys that have one, by group. Those of a strategy of the user's own are
    not known: its keys are there only if they are given."""
    found = {}
    for part in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, part.name)):
            fields = [f for f in dataclasses.fields(value) if f.default is not dataclasses.MISSING]
            found[part.name] = {key_of(f.name): plain_value(f.default) for f in fields}
    own = config.strategy.target in choices("strategy")
    found["strategy"] = choice_values("strategy", config.strategy.target) if own else {}
    return found


def _is_default(value: Any, default: Any) -> bool:
    """Whether a key has its default; where that is none, an empty value or false says the same."""
    return bool(value == default) or (default is None and (value is False or value in ("", [], {})))


def _without_place(step: dict[str, Any]) -> dict[str, Any]:
    """A step of `rows` without the place of the table that it reads, whose content counts."""
    return {
        name: {key: value for key, value in options.items() if key != "path"}
        if name in _READ_TABLES
        else options
        for name, options in step.items()
    }


def growing(config: JobConfig) -> dict[str, Any]:
    """What may change while a job goes on in its folder, and is worth being remembered."""
    groups = resolved(config)
    found = {f"{name}.{key}": groups[name].get(key) for name, key in _REMEMBERED}
    if (until := config.sampling.until) is not None:
        name, value = ("valid", until.valid) if until.width is None else ("width", until.width)
        found |= {f"sampling.until.{name}": value, "sampling.until.most": until.most}
    return found


def job_file_text(config: JobConfig) -> str:
    """The text of config.yaml, which is a job file: `batchgen OUT/config.yaml` runs it."""
    groups = resolved(config)
    groups["workers"]["name"] = None  # that of one process
    return yaml_text(escaped_text(groups))


def escaped_text(value: Any) -> Any:
    """The value with every `${` escaped, so that OmegaConf reads it as text, not as a reference."""
    if isinstance(value, dict):
        return {key: escaped_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped_text(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _build_prompt(values: dict[str, Any]) -> PromptConfig:
    kind = values.get("kind", MISSING)
    if not isinstance(kind, str) or kind not in PROMPT_KINDS:
        raise ConfigError(f"prompt.kind must be one of {', '.join(PROMPT_KINDS)}, got {kind!r}")
    return build(PROMPT_KINDS[kind], values, "prompt")


def _build_launcher(values: dict[str, Any]) -> LauncherConfig | None:
    if values.get("_target_", MISSING) is None:
        check_keys(values, allowed=["_target_"], required=[], prefix="launcher.")
        return None
    return LauncherConfig(**_target_and_options(values, "launcher."))


def _target_and_options(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A class and its options as the dataclasses of the configuration have them."""
    check_keys(values, allowed=list(values), required=["_target_"], prefix=prefix)
    target = convert(values["_target_"], str, f"{prefix}_target_")
    options = {str(name): value for name, value in values.items() if name != "_target_"}
    return {"target": target, "options": options}


def step_configs(values: Any, key: str) -> tuple[StepConfig, ...]:
    """The steps of one of STEP_LISTS."""
    example = "Filter: {where: …}" if key == "rows" else "Extract: {methods: [boxed]}"
    form = (
        f"{key} must be a list of steps such as [{{{example}}}] or "
        "[{_target_: package.module.Class}]"
    )
    if not isinstance(values, list | None):
        raise ConfigError(f"{form}, got {values!r}")
    steps = []
    for number, step in enumerate(values or ()):
        if isinstance(step, str) and (bare := re.match(r"(\w+): *\{", step)):
            name = bare[1]
            raise ConfigError(f"{key}: each step stands in braces of its own: [{{{name}: {{…}}}}]")
        if not isinstance(step, dict):
            raise ConfigError(f"{form}, got {step!r} in it")
        if len(step) == 1 and "_target_" not in step:
            step = _long_form(step, key, f"{key}[{number}]")
        steps.append(StepConfig(**_target_and_options(step, f"{key}[{number}].")))
    return tuple(steps)


def _long_form(step: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """A step that is written `{NAME: options}` with `_target_` among its options."""
    ((name, options),) = step.items()
    other = "post" if key == "rows" else "rows"
    if name in CLASSES[other]:
        what = {"rows": "chooses or makes rows", "post": "grades answers"}[other]
        raise ConfigError(
            f"{where}: {name} {what}, and belongs into {other}: {other}=[{{{name}: …}}]"
        )
    if name not in CLASSES[key]:
        raise ConfigError(
            f"{where}: there is no step {name!r}: choose among {', '.join(CLASSES[key])}, or name "
            f"a class with _target_ (batchgen --help {key})"
        )
    if options is not None and not isinstance(options, dict):
        raise ConfigError(f"{where}.{name} must be a mapping of options, got {options!r}")
    return {"_target_": name, **(options or {})}


def _with_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """A class and its options as users write them."""
    return {"_target_": values["target"], **values["options"]}
