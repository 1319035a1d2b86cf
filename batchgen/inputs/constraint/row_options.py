"""Reads each row's sampling options from a mapping, under batchgen's names or those of OpenAI's
API. `RowParams` uses `RowOptions`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from batchgen.config.groups.convert_value import convert
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.json_text import compact_json
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import RequestParams, SharedSampling
from batchgen.util.errors import ConfigError

BAD_OPTION = "bad_option"
"""The error type of a row whose options cannot be honoured."""
SAME_OPTIONS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
"""Names of OpenAI and vLLM → batchgen's names with the same meaning."""
IGNORED_OPTIONS = (
    *("model", "user", "metadata", "store", "stream", "stream_options", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Keys of OpenAI's API that have no effect on the generated text."""
HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
"""Keys that are accepted only with these values, which have no effect."""
# batchgen's name of an option → its type.
_HINTS = get_type_hints(SharedSampling)
OPTIONS = tuple(_HINTS)
"""batchgen's names of the options that a row may have."""

MakeConstraint = Callable[[str], Constraint]
"""Makes a constraint from the JSON text of a schema. Raises ConstraintError."""
MakeDecoding = Callable[[Mapping[str, Any]], object]
"""Makes the strategy's options of a row from a mapping. Raises ValueError."""


class RowOptions:
    """Converts the options of a row to sampling parameters.

    Args:
        params: the job's parameters, which options override.
        samples: the job's `sampling.n`, which rows cannot change.
        prompt_keys: keys among the options that the prompt reads, such as `messages`.
        make_schema: makes the constraint of a `response_format`.
        make_decoding: makes the value of the option `strategy`.
        marker: the text after which a `response_format` applies; before it, text is free.
    """

    def __init__(
        self,
        params: RequestParams,
        *,
        samples: int,
        prompt_keys: Collection[str] = (),
        make_schema: MakeConstraint,
        make_decoding: MakeDecoding,
        marker: str = "",
    ) -> None:
        self._params, self._samples = params, samples
        self._prompt_keys = frozenset(prompt_keys)
        self._make_schema, self._marker = make_schema, marker
        self._make_decoding = make_decoding

    def params(self, values: Mapping[str, Any]) -> RequestParams:
        """Return the job's parameters with the changes of a row's options. A null value counts as
        absent.

        Raises:
            RequestError: an option cannot be honoured (`bad_option`, `bad_constraint`).
        """
        changes: dict[str, Any] = {}
        names: dict[str, str] = {}
        for key, value in values.items():
            if value is None or key in self._prompt_keys or key in IGNORED_OPTIONS:
                continue
            name = SAME_OPTIONS.get(key, key)
            if name in _HINTS:
                if name in names:
                    raise _refused(f"{names[name]} and {key} are the same: give one")
                names[name], changes[name] = key, _converted(key, value, _HINTS[name])
            elif key == "response_format":
                changes |= self._constraint(value)
            elif key == "strategy":
                changes["decoding"] = self._decoding(value)
            else:
                self._refuse_other(key, value, values)
        if not changes:
            return self._params
        try:
            if changes.get("max_new_tokens") == 0:
                raise ValueError("max_new_tokens must be at least 1, got 0")
            return replace(self._params, **changes)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            raise _refused(f"{names.get(name, name)} {rest}") from None

    def _decoding(self, value: Any) -> object:
        """Convert the option `strategy`."""
        if not isinstance(value, Mapping):
            raise _refused(f"strategy must have options by name, got {value!r:.100}")
        try:
            return self._make_decoding(value)
        except ValueError as error:
            raise _refused(f"strategy: {error}") from None

    def _constraint(self, value: Any) -> dict[str, Any]:
        """Return the parameter that a `response_format` sets; none for plain text."""
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "text":
            return {}
        if kind not in ("json_object", "json_schema"):
            allowed = "{type: text}, {type: json_object} or {type: json_schema, json_schema: …}"
            raise _refused(f"response_format must be {allowed}, got {value!r:.100}")
        if self._params.constraint is not None:
            raise _refused("response_format: the job has a constraint for all rows: drop one")
        try:
            if kind == "json_object":
                constraint = Constraint.make("json", None, start_after=self._marker)
            else:
                constraint = self._make_schema(_schema_text(value))
        except ConstraintError as error:
            raise RequestError("bad_constraint", f"response_format: {error}") from None
        return {"constraint": constraint}

    def _refuse_other(self, key: str, value: Any, values: Mapping[str, Any]) -> None:
        """Raise RequestError for an option that is not a sampling parameter, unless its value has
        no effect."""
        if any(value == harmless and type(value) is type(harmless) for harmless in _harmless(key)):
            return
        if key == "n":
            if value != self._samples:
                raise _refused(
                    f"n={value!r} differs from sampling.n={self._samples}, which all rows share"
                )
        elif key in ("logprobs", "top_logprobs"):
            self._check_logprobs(key, value)
        elif key in HARMLESS_VALUES:
            allowed = " or ".join(f"{harmless!r}" for harmless in _harmless(key))
            raise _refused(f"{key} can only be {allowed} here, got {value!r:.100}")
        else:
            raise _refused(
                f"unknown option {key!r}: a row may have {', '.join((*OPTIONS, *SAME_OPTIONS))}, "
                "n, response_format, strategy, logprobs and top_logprobs"
            )

    def _check_logprobs(self, key: str, value: Any) -> None:
        """Raise RequestError if the row asks for log-probabilities that the job does not write.
        They are columns, which all rows have or none."""
        counts = key == "top_logprobs" or type(value) is int  # in completions, logprobs is a number
        number = _converted(key, value, int if counts else bool)
        if not self._params.logprobs:
            raise _refused(f"{key}: the job writes no logprobs: set output.columns=[logprobs]")
        if counts and number > self._params.top_logprobs:
            raise _refused(
                f"{key}={number} is more than the job writes ({self._params.top_logprobs}): set "
                f"output.columns=[logprobs,top_logprobs] output.top_logprobs={number}"
            )


def _harmless(key: str) -> tuple[Any, ...]:
    """Return the values with which a key has no effect."""
    return HARMLESS_VALUES.get(key, ())


def _converted(key: str, value: Any, hint: Any) -> Any:
    """Convert an option's value to its type. JSON may write an integer as 16.0, and -1 turns top_k
    off."""
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if key == "top_k" and value == -1:
        value = 0
    try:
        return convert(value, hint, key)
    except ConfigError as error:
        raise _refused(str(error)) from None


def _schema_text(value: Mapping[str, Any]) -> str:
    """Return the JSON text of the schema in a `response_format`. Raises ConstraintError without
    one."""
    format = value.get("json_schema")
    schema = format.get("schema") if isinstance(format, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConstraintError(f"json_schema must have a schema, got {format!r:.100}")
    try:
        return compact_json(dict(schema))
    except RecursionError:
        raise ConstraintError("is nested too deeply") from None


def _refused(message: str) -> RequestError:
    return RequestError(BAD_OPTION, message)
