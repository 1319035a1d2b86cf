"""Writes a command line in Hydra's grammar, for `hydra_app.py`, which lets Hydra run it.

Arguments are first read by batchgen's own rules, so that a text stays exactly as typed. Then Hydra
gets each choice and each key as a separate argument, quoted by Hydra's rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from batchgen.cli.options import Options, choice_folders
from batchgen.cli.run_options import compose_options, job_file
from batchgen.cli.sweep import FolderNames, swept, swept_values
from batchgen.config.compose.compose_config import collect_values
from batchgen.config.compose.overrides import Override, parse_override
from batchgen.config.compose.value_references import RESOLVERS_OF_HYDRA, refuse_resolvers
from batchgen.config.groups.config_keys import EXPERIMENT, STEP_LISTS, choice_values
from batchgen.util.errors import ConfigError


@dataclass
class HydraArguments:
    """A command line in Hydra's grammar.

    For `model.path=m sampling.seed=1,2`: fixed is ["model=hf", "++model.path='m'"], swept is
    ["++sampling.seed=1,2"], typed is {"++sampling.seed=1": "sampling.seed=1", …}, and names is
    {("++sampling.seed=1",): "sampling.seed=1", …}.

    Attributes:
        fixed: the arguments that all jobs share.
        output_dir: the value of `output.dir`, of the first job if it differs between jobs.
        swept: the arguments that list values.
        typed: maps an argument of one job to the text that the user typed for it.
        names: maps the swept arguments of a job to the name of its folder; empty if an argument has
            values that cannot be listed in advance.
    """

    fixed: list[str]
    output_dir: Any
    swept: list[str] = field(default_factory=list)
    typed: dict[str, str] = field(default_factory=dict)
    names: dict[tuple[str, ...], str] = field(default_factory=dict)

    def fixed_keys(self) -> set[str]:
        """Return the keys of `fixed`, as Hydra writes them in the arguments of a job."""
        return {argument.partition("=")[0] for argument in self.fixed}

    def varies(self, key: str) -> bool:
        """Whether the jobs of a sweep have different values of a key."""
        return any(argument.partition("=")[0].lstrip("+") == key for argument in self.swept)


def hydra_arguments(options: Options, sweep: bool) -> HydraArguments:
    """Convert a command line, without Hydra's own arguments. Raises ConfigError for a mistake in
    it.

    Args:
        sweep: whether arguments may list values.
    """
    varied = [argument for argument in options.overrides if sweep and swept(argument) is not None]
    # The first job of the sweep is composed, so that mistakes show before Hydra runs.
    first = [_with_first_value(a) if a in varied else a for a in options.overrides]
    composed = compose_options(options, first)
    refuse_resolvers(_in_hydras_words(composed.groups), RESOLVERS_OF_HYDRA)
    result = HydraArguments(
        _fixed_arguments(options, first, varied), composed.groups["output"]["dir"]
    )
    parts: list[list[str]] = []  # for each swept argument, its values as arguments of one job
    for argument in varied:
        text, typed = _swept_argument(argument)
        result.swept.append(text)
        result.typed.update(typed)
        parts.append(list(typed))
    if all(parts):  # every argument's values can be listed
        names = FolderNames()
        for job in itertools.product(*parts):
            result.names[job] = names.of([result.typed[part] for part in job])
    return result


def parent_of_jobs(arguments: HydraArguments, options: Options, *, sweep: bool) -> str:
    """Return what decides the parent of the jobs' folders: "sweep.dir" or "run.dir" of Hydra,
    "output.dir", or "" if `output.dir` is a job's own folder."""
    folder = arguments.output_dir
    if arguments.varies("output.dir"):
        return ""
    if folder == choice_values("output", "parquet")["dir"]:  # the default: the user sets none
        if sweep:
            return "sweep.dir"
        return "run.dir" if hydra_value(options.hydra, "hydra.run.dir") is not None else ""
    # A reference to another key (`${…}`) can make the folders differ, as the user intends.
    return "output.dir" if sweep and isinstance(folder, str) and "${" not in folder else ""


def hydra_value(arguments: Sequence[str], key: str) -> str | None:
    """Return the text of the last argument for a key of Hydra; None if there is none."""
    values = [a.partition("=")[2] for a in arguments if a.lstrip("+").partition("=")[0] == key]
    return values[-1] if values else None


def hydra_argument(start: str, value: Any) -> str:
    """Write an argument in Hydra's grammar.

    Args:
        start: the key with its sign, such as `++model.path`.
        value: its value.

    Raises:
        ConfigError: Hydra's grammar cannot express the value.
    """
    value = _in_hydras_words(value)
    argument = f"{start}={hydra_text(value)}"
    try:  # Hydra must read the same value back
        if OverridesParser.create().parse_override(argument).value() == value:
            return argument
    except HydraException:
        pass
    raise ConfigError(
        f"{start.lstrip('+')}: Hydra's launchers cannot take {value!r}: leave out hydra.… and "
        "hydra/…, or put the value into a file"
    )


def _in_hydras_words(value: Any) -> Any:
    """Return a value in which references `${hydra.…}` are written as Hydra's resolver
    `${hydra:…}`."""
    if isinstance(value, Mapping):
        return {key: _in_hydras_words(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_hydras_words(item) for item in value]
    return value.replace("${hydra.", "${hydra:") if isinstance(value, str) else value


def hydra_text(value: Any) -> str:
    """Write a plain value in Hydra's grammar."""
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_text(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _with_first_value(argument: str) -> str:
    """Return a swept argument with its first value only."""
    override = swept(argument)
    assert override is not None
    if override.is_discrete_sweep():
        values = swept_values(argument)
        if not values:
            raise ConfigError(
                f"{argument}: nothing matches this pattern: correct it, or list the values as a,b"
            )
        return values[0]
    value = override.value()
    assert isinstance(value, IntervalSweep)
    return f"{argument.partition('=')[0]}={value.start}"


def _fixed_arguments(options: Options, first: list[str], varied: list[str]) -> list[str]:
    """Return the choices and keys that are the same for all jobs, as Hydra's arguments.

    Args:
        first: the arguments of the first job: swept ones with their first value.
        varied: the swept arguments.
    """
    values, locations = job_file(options)
    user_values, parsed = collect_values(
        values, first, folders=choice_folders(options), locations=locations
    )
    swept_keys = {argument.partition("=")[0].lstrip("+") for argument in varied}
    # A group that is a class of the user's has no choice: Hydra's default choice is removed, and
    # the keys of the class are added one by one.
    words = [f"~{group}" for group in user_values.whole]
    words += [
        f"{group}={name}" for group, name in user_values.choices.items() if group not in swept_keys
    ]
    if EXPERIMENT not in swept_keys:
        words += [f"+{EXPERIMENT}={name}" for name in user_values.experiments]
    for group, keys in user_values.whole.items():
        words += [hydra_argument(f"++{group}.{name}", value) for name, value in keys.items()]
    words += [hydra_argument(f"++{key}", value) for key, value in user_values.keys.items()]
    for name, steps in user_values.steps.items():
        if name not in swept_keys:
            words.append(hydra_argument(f"++{name}", steps))
    for override, argument in zip(parsed, options.overrides, strict=True):
        if override.group in STEP_LISTS:
            continue
        if override.sign == "~":
            words.append(f"~{override.key}")
        elif override.names and argument not in varied:
            words.append(_argument(override))
    return words


def _swept_argument(argument: str) -> tuple[str, dict[str, str]]:
    """Return a swept argument in Hydra's grammar, and a map of the argument that Hydra gives to
    each job to what the user typed. The map is empty if the values cannot be listed."""
    override = swept(argument)
    assert override is not None
    if not override.is_discrete_sweep():
        key, _, text = argument.partition("=")
        return f"++{key.lstrip('+')}={text}", {}
    typed = swept_values(argument) or []
    single = [_argument(parse_override(text)) for text in typed]
    start = single[0].partition("=")[0]
    listed = ",".join(text.partition("=")[2] for text in single)
    value = override.value()
    if isinstance(value, RangeSweep) and not value.shuffle:  # keep range(…): some sweepers need it
        listed = argument.partition("=")[2]
    parsed = OverridesParser.create().parse_override(f"{start}={listed}")
    if parsed.is_sweep_override():
        single = [f"{parsed.get_key_element()}={text}" for text in parsed.sweep_string_iterator()]
    return f"{start}={listed}", dict(zip(single, typed, strict=True))


def _argument(override: Override) -> str:
    """Write one argument with one value in Hydra's grammar."""
    if override.names:
        return hydra_argument(f"++{override.key}", override.value())
    return f"{'+' if override.group == EXPERIMENT else ''}{override.key}={override.value()}"
