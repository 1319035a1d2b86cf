"""The configuration group `constraint`: the form that the output of rows must have. Each kind is a
class; the user's keys are its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.engine.constraint.constraint import Constraint, Kind
from batchgen.engine.constraint.json_schema.json_text import parse_unique_json
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path

_JSON_KEYS = ("schema", "tag")
"""The keys whose values are JSON: a mapping, JSON text, or the path of a file of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoConstraintConfig:
    """Rows may write any text."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonConstraintConfig:
    """Rows write a JSON object of any content.

    At most `max_whitespace` white space separates tokens. If there is a marker `start_after`, the
    object follows free text that ends with the marker.
    """

    kind: Literal["json"] = "json"
    max_whitespace: int = 0
    start_after: str | None = None

    def __post_init__(self) -> None:
        _check_max_whitespace(self.max_whitespace)
        _check_start_after(self.start_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ValueConstraint:
    """A constraint whose value is the key `key` for all rows, or comes from a column."""

    key = ""  # the field of the value; each subclass names its own

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
        """The value that the job sets for all rows; None if each row has another one."""
        return getattr(self, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchemaConstraintConfig(_ValueConstraint):
    """Rows write JSON that is valid under a JSON Schema."""

    key = "schema"

    kind: Literal["json_schema"] = "json_schema"
    schema: Mapping[str, Any] | None = None
    max_whitespace: int = 0

    def __post_init__(self) -> None:
        _ValueConstraint.__post_init__(self)
        _check_max_whitespace(self.max_whitespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexConstraintConfig(_ValueConstraint):
    """Rows write text that a regular expression matches as a whole."""

    key = "pattern"

    kind: Literal["regex"] = "regex"
    pattern: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConstraintConfig(_ValueConstraint):
    """Rows write one of several texts. `scores` scores the choices too, and `scores_end` includes
    the end of the text."""

    key = "choices"

    kind: Literal["choice"] = "choice"
    choices: tuple[str, ...] | None = None
    scores: bool = False
    scores_end: bool = False

    def __post_init__(self) -> None:
        _ValueConstraint.__post_init__(self)
        if self.scores_end and not self.scores:
            raise ConfigError("constraint.scores_end needs constraint.scores=true")
        if self.scores and self.start_after is not None:
            raise ConfigError(
                "constraint.scores gives the probabilities of choices directly after the prompt, "
                "but constraint.start_after puts free text before them: leave one out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConstraintConfig(_ValueConstraint):
    """Rows write text of a context-free grammar in EBNF."""

    key = "grammar"

    kind: Literal["grammar"] = "grammar"
    grammar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagConstraintConfig(_ValueConstraint):
    """Rows write free text with constrained parts between tags (see xgrammar's structural tags)."""

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
    """The dataset column with the constraint of each row; None if the job names none."""
    return config.column if isinstance(config, _ValueConstraint) else None


def job_value(config: AnyConstraintConfig) -> Any:
    """The value that the job sets for all rows; None if each row has another one, or the kind has
    no value."""
    return config.value if isinstance(config, _ValueConstraint) else None


def make_constraint(config: AnyConstraintConfig, value: Any) -> Constraint:
    """Make the constraint of a value, of the job or of a row.

    Raises:
        ConstraintError: it cannot be enforced.
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
    """The constraint that all rows share; None if rows have none, or different ones."""
    if isinstance(config, NoConstraintConfig) or constraint_column(config) is not None:
        return None
    return make_constraint(config, job_value(config))


def with_contents(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values of the group, with files replaced by their content and JSON text by mappings. So a
    job with a changed file is another job."""
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
    """The object of a JSON text, or of a file of JSON if the value is a path."""
    is_text = value.lstrip().startswith("{")
    text = value if is_text else _read(key, value, "JSON text (which begins with {) or a mapping")
    where = key if is_text else f"{key}: {value}"
    try:
        parsed = parse_unique_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{where} must hold a JSON object, got {type(parsed).__name__}")
    return parsed


def _read(key: str, path: str, otherwise: str) -> str:
    """The text of a file. `otherwise` says what the key may hold instead of a path."""
    try:
        return user_path(path, key).read_text(encoding="utf-8")
    except ConfigError as error:
        raise ConfigError(f"{error}: give the path of a file, or {otherwise}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"{key}: the file {path!r} cannot be read ({why}): give the path of a file, or "
            f"{otherwise}"
        ) from None


def _check_names(key: str, value: Any) -> None:
    """Refuse keys that are not text: YAML can have numbers as keys, and JSON cannot."""
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
