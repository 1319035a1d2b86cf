"""From Hydra's DictConfig to a JobConfig, once, with an error a user can read."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchgen.config.constraint import (
    CONSTRAINT_KINDS,
    ConstraintConfig,
    NoConstraintConfig,
    job_constraint,
    with_contents,
)
from batchgen.config.groups import (
    PROMPT_KINDS,
    DatasetConfig,
    EngineGroup,
    JobConfig,
    ModelGroup,
    OutputConfig,
    PromptConfig,
    SamplingConfig,
    StrategyConfig,
)
from batchgen.engine.constraint.constraint import ConstraintError
from batchgen.engine.sampling.params import SamplingParams
from batchgen.errors import ConfigError

T = TypeVar("T")
MISSING = "???"
PARSED = "parsed"
COMMON_COLUMNS = ("logprobs", "top_logprobs", "prompt_token_ids", PARSED)
"""Columns of every strategy; others are declared by one (`Strategy.columns`)."""
NUMBERS = {int: "an integer", float: "a number", bool: "true or false"}


def load_config(cfg: DictConfig) -> JobConfig:
    """The checked configuration of one job.

    Under Hydra's `--multirun` a job whose `output.dir` is not given on the command line writes to
    its own folder, `hydra.sweep.dir`/`hydra.sweep.subdir`.

    Raises:
        ConfigError: a key is unknown, missing, of a wrong type or out of range.
    """
    try:
        groups = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key, reason = error.full_key, str(error).splitlines()[0]
        raise ConfigError(f"{key or 'the configuration'} cannot be resolved: {reason}") from None
    if not isinstance(groups, dict):
        raise ConfigError("the configuration must be a mapping of groups (model, dataset, …)")
    names = [f.name for f in dataclasses.fields(JobConfig)]
    groups.setdefault("constraint", {"kind": "none"})  # jobs of earlier versions have none
    _check_keys(groups, known=names, required=names, prefix="")
    for name in names:
        if not isinstance(groups[name], dict):
            raise ConfigError(
                f"{name} must be a group of keys, got {groups[name]!r}: see conf/{name}/"
            )
    config = JobConfig(
        model=_build(ModelGroup, groups["model"], "model"),
        dataset=_build(DatasetConfig, groups["dataset"], "dataset"),
        prompt=_build_prompt(groups["prompt"]),
        sampling=_build(SamplingConfig, groups["sampling"], "sampling"),
        strategy=_build_strategy(groups["strategy"]),
        constraint=constraint_config(groups["constraint"]),
        engine=_build(EngineGroup, groups["engine"], "engine"),
        output=_build(OutputConfig, _own_sweep_folder(groups["output"]), "output"),
    )
    _check_constrained(config)
    sampling_params(config)  # its ranges are errors of the configuration too
    return config


def sampling_params(config: JobConfig) -> SamplingParams:
    """The parameters of every request of the job.

    To be replaced per row: `seed`, which is the job's, and `constraint` if rows have their own.

    Raises:
        ConfigError: a value is out of range, or the job's constraint is not one.
    """
    values = dataclasses.asdict(config.sampling)
    del values["n"]
    columns = config.output.columns
    try:
        constraint = job_constraint(config.constraint)
    except ConstraintError as error:
        raise ConfigError(f"constraint: {error}") from None
    try:
        return SamplingParams(
            **values,
            logprobs="logprobs" in columns,
            top_logprobs=config.output.top_logprobs if "top_logprobs" in columns else 0,
            logprobs_mode=config.output.logprobs_mode,
            columns=tuple(name for name in columns if name not in COMMON_COLUMNS),
            constraint=constraint,
        )
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from None


def strategy_options(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the class's constructor declares them, by name and with a type.

    Raises:
        ConfigError: the constructor has no such parameter, lacks one, or declares another type.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(cls, eval_str=True).parameters.items()
        if parameter.kind
        in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    _check_keys(options, known=list(parameters), required=required, prefix="strategy.")
    return {
        name: _convert(value, parameters[name].annotation, f"strategy.{name}")
        for name, value in options.items()
    }


def constraint_config(values: dict[str, Any]) -> ConstraintConfig:
    """The group `constraint` from its plain values.

    Raises:
        ConfigError: as `load_config`.
    """
    kind = values.get("kind", MISSING)
    if kind not in CONSTRAINT_KINDS:
        raise ConfigError(
            f"constraint.kind must be one of {', '.join(CONSTRAINT_KINDS)}, got {kind!r}"
        )
    return _build(CONSTRAINT_KINDS[kind], with_contents(values), "constraint")


def resolved(config: JobConfig) -> dict[str, dict[str, Any]]:
    """The configuration as plain values under the keys that users write."""
    groups = dataclasses.asdict(config)
    strategy = groups["strategy"]
    groups["strategy"] = {"_target_": strategy["target"], **strategy["options"]}
    return {name: _plain(group) for name, group in groups.items()}


def identity(config: JobConfig) -> dict[str, dict[str, Any]]:
    """The part of `resolved` that decides what is in the output files.

    Two jobs with one identity (and the same model and data files) write the same shards. Of the
    engine only `max_model_len` is part of it: rows are refused, cut or ended at that length.
    """
    groups = resolved(config)
    groups["engine"] = {"max_model_len": groups["engine"]["max_model_len"]}
    if isinstance(config.constraint, NoConstraintConfig):
        del groups["constraint"]  # as in manifests from before there were constraints
    del groups["model"]["name"], groups["output"]["dir"], groups["output"]["overwrite"]
    return groups


def _own_sweep_folder(output: dict[str, Any]) -> dict[str, Any]:
    if not HydraConfig.initialized():
        return output
    hydra = HydraConfig.get()
    given = any(o.lstrip("+").startswith("output.dir=") for o in hydra.overrides.task)
    if hydra.mode != RunMode.MULTIRUN or given:
        return output
    return {**output, "dir": f"{hydra.sweep.dir}/{hydra.sweep.subdir}"}


def _build_prompt(values: dict[str, Any]) -> PromptConfig:
    kind = values.get("kind", MISSING)
    if kind not in PROMPT_KINDS:
        raise ConfigError(f"prompt.kind must be one of {', '.join(PROMPT_KINDS)}, got {kind!r}")
    return _build(PROMPT_KINDS[kind], values, "prompt")


def _check_constrained(config: JobConfig) -> None:
    """What other groups may say depends on the kind of constraint."""
    kind = config.constraint.kind
    if kind != "none" and config.sampling.ignore_eos:
        raise ConfigError(
            "sampling.ignore_eos must be false with a constraint: a constrained row ends with EOS"
        )
    if PARSED in config.output.columns and kind not in ("json_schema", "json"):
        raise ConfigError(
            f"output.columns: {PARSED} is for JSON, and the constraint is {kind}: use "
            "constraint=json_schema or constraint=json, or leave the column out"
        )


def _build_strategy(values: dict[str, Any]) -> StrategyConfig:
    _check_keys(values, known=list(values), required=["_target_"], prefix="strategy.")
    target = _convert(values["_target_"], str, "strategy._target_")
    options = {str(key): value for key, value in values.items() if key != "_target_"}
    return StrategyConfig(target=target, options=options)


def _build(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    assert dataclasses.is_dataclass(cls)
    hints = get_type_hints(cls)
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    _check_keys(values, known=list(hints), required=required, prefix=f"{prefix}.")
    return cls(**{key: _convert(v, hints[key], f"{prefix}.{key}") for key, v in values.items()})


def _check_keys(
    values: Mapping[Any, Any], *, known: list[str], required: list[str], prefix: str
) -> None:
    for key, value in values.items():
        if key not in known:
            choice = f"choose among {', '.join(known)}" if known else "there are none"
            raise ConfigError(f"{prefix}{key} is not a key: {choice}")
        if value == MISSING:
            raise ConfigError(f"{prefix}{key} has no value: set it with {prefix}{key}=…")
    for key in required:
        if key not in values:
            raise ConfigError(f"{prefix}{key} is missing: set it with {prefix}{key}=…")


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as `hint`, or ConfigError; integers pass as floats, nothing else is converted."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (arg for arg in args if arg is not type(None))
        return _convert(value, hint, key)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            raise ConfigError(f"{key} must be one of {', '.join(args)}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{key} must be a list such as [a,b], got {value!r}")
        return tuple(_convert(item, args[0], f"{key}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not (isinstance(value, dict) and all(isinstance(name, str) for name in value)):
            raise ConfigError(f"{key} must be a mapping of names to values, got {value!r}")
        return value
    if hint is str:
        if not isinstance(value, str):
            # What was typed as [A-D] is a list by now.
            typed = "…" if isinstance(value, (list, dict)) else value
            hint_text = "" if value is None else f": to give it as text, quote it as '\"{typed}\"'"
            raise ConfigError(f"{key} must be a string, got {value!r}{hint_text}")
        return value
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{key} must be {NUMBERS[hint]}, got {value!r}")
    return float(value) if hint is float else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
