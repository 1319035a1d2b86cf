"""The group `constraint`: what a row's output must look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchgen.constraint.json_text import parse_unique_json
from batchgen.engine.constraint.constraint import Constraint, Kind
from batchgen.errors import ConfigError

_JSON_KEYS = ("schema", "tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoConstraintConfig:
    """Any text."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonConstraintConfig:
    """Any JSON object."""

    kind: Literal["json"] = "json"
    max_whitespace: int = 0
    start_after: str | None = None

    def __post_init__(self) -> None:
        _check_max_whitespace(self.max_whitespace)
        _check_start_after(self.start_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenConstraint:
    """A constraint that the job gives under `key`, or each row in a column."""

    key = ""

    kind: Kind
    column: str | None = None
    start_after: str | None = None

    def __post_init__(self) -> None:
        _check_start_after(self.start_after)
        if self.value is None and self.column is None:
            raise ConfigError(
                f"constraint.{self.key} is null: set it, or set constraint.column to the dataset "
                f"column that holds each row's own"
            )
        if self.value is not None and self.column is not None:
            raise ConfigError(
                f"constraint.{self.key} and constraint.column are both set: choose one for all "
                "rows, or a column of each row's own"
            )

    @property
    def value(self) -> Any:
        """What the user gives for all rows; None if each row has its own."""
        return getattr(self, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchemaConstraintConfig(_GivenConstraint):
    """JSON of a schema."""

    key = "schema"

    kind: Literal["json_schema"] = "json_schema"
    schema: Mapping[str, Any] | None = None
    max_whitespace: int = 0

    def __post_init__(self) -> None:
        _GivenConstraint.__post_init__(self)
        _check_max_whitespace(self.max_whitespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexConstraintConfig(_GivenConstraint):
    """Text that a regular expression matches as a whole."""

    key = "pattern"

    kind: Literal["regex"] = "regex"
    pattern: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConstraintConfig(_GivenConstraint):
    """One of several texts."""

    key = "choices"

    kind: Literal["choice"] = "choice"
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConstraintConfig(_GivenConstraint):
    """Text of a context-free grammar in EBNF."""

    key = "grammar"

    kind: Literal["grammar"] = "grammar"
    grammar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagConstraintConfig(_GivenConstraint):
    """Free text with constrained parts between tags."""

    key = "tag"

    kind: Literal["structural_tag"] = "structural_tag"
    tag: Mapping[str, Any] | None = None


AnyConstraintConfig = (
    JsonConstraintConfig
    | JsonSchemaConstraintConfig
    | RegexConstraintConfig
    | ChoiceConstraintConfig
    | GrammarConstraintConfig
    | TagConstraintConfig
)
ConstraintConfig = NoConstraintConfig | AnyConstraintConfig
CONSTRAINT_KINDS: dict[str, type[ConstraintConfig]] = {
    "none": NoConstraintConfig,
    "json_schema": JsonSchemaConstraintConfig,
    "json": JsonConstraintConfig,
    "regex": RegexConstraintConfig,
    "choice": ChoiceConstraintConfig,
    "grammar": GrammarConstraintConfig,
    "structural_tag": TagConstraintConfig,
}


def constraint_column(config: ConstraintConfig) -> str | None:
    """The dataset column that holds each row's own constraint, if the job says one."""
    return config.column if isinstance(config, _GivenConstraint) else None


def job_value(config: AnyConstraintConfig) -> Any:
    """What the job gives for all its rows; None if nothing."""
    return config.value if isinstance(config, _GivenConstraint) else None


def make_constraint(config: AnyConstraintConfig, value: Any) -> Constraint:
    """The constraint of a job's rows with a value for it, which may be a row's own.

    Raises:
        ConstraintError: the value is none of this kind.
    """
    whitespace = (
        config.max_whitespace
        if isinstance(config, (JsonConstraintConfig, JsonSchemaConstraintConfig))
        else 0
    )
    return Constraint.make(
        config.kind, value, max_whitespace=whitespace, start_after=config.start_after or ""
    )


def job_constraint(config: ConstraintConfig) -> Constraint | None:
    """Of all rows; None if there is none or each row has its own.

    Raises:
        ConstraintError: as `make_constraint`.
    """
    if isinstance(config, NoConstraintConfig) or constraint_column(config) is not None:
        return None
    return make_constraint(config, job_value(config))


def with_contents(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The group's values with what is in a file instead of its path, and JSON text as a mapping.

    So the job's manifest holds the constraint itself and a changed file is a different job.

    Raises:
        ConfigError: a file cannot be read, or is not JSON.
    """
    contents = dict(values)
    for key in _JSON_KEYS:
        value = values.get(key)
        if isinstance(value, str):
            contents[key] = _json_object(f"constraint.{key}", value)
        elif isinstance(value, dict):
            _check_names(f"constraint.{key}", value)
    grammar = values.get("grammar")
    if isinstance(grammar, str) and "::=" not in grammar:
        contents["grammar"] = _read("constraint.grammar", grammar, "EBNF (root ::= …)")
    return contents


def _json_object(key: str, value: str) -> dict[str, Any]:
    is_text = value.lstrip().startswith("{")
    text = value if is_text else _read(key, value, "JSON text (which begins with {) or a mapping")
    where = key if is_text else f"{key}: {value}"
    try:
        found = parse_unique_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} must hold a JSON object, got {type(found).__name__}")
    return found


def _read(key: str, path: str, otherwise: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"{key}: the file {path!r} cannot be read ({why}): give the path of a file, or "
            f"{otherwise}"
        ) from None


def _check_names(key: str, value: Any) -> None:
    """YAML has keys that are numbers, and JSON has not."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{key} has the key {name!r}, which must be text: quote it")
            _check_names(f"{key}.{name}", item)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _check_names(f"{key}[{position}]", item)


def _check_max_whitespace(value: int) -> None:
    if value < 0:
        raise ConfigError(f"constraint.max_whitespace must be at least 0, got {value}")


def _check_start_after(value: str | None) -> None:
    if value == "":
        raise ConfigError(
            "constraint.start_after must be null or a text such as '</think>', got ''"
        )
