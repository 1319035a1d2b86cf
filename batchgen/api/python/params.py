"""`SamplingParams`: the sampling parameters of the Python interface."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack, get_type_hints

from batchgen.api.python.given_constraints import ConstraintLike, as_constraint
from batchgen.api.python.unknown_names import SAME, KeywordNames
from batchgen.config.groups.convert_value import convert
from batchgen.engine.interface.hidden_columns import Pooling
from batchgen.engine.sampling.sampling_params import LogprobsMode, RequestParams

NO_LIMIT = 2**31 - 1
"""The `max_new_tokens` that None stands for; no model has as many positions."""
# The types and the defaults of the parameters of a request, by name.
_HINTS = get_type_hints(RequestParams)
_DEFAULTS = {f.name: f.default for f in fields(RequestParams) if f.default is not MISSING}
_NAMES = KeywordNames("SamplingParams", ("n", *_HINTS), SAME["SamplingParams"])
PARAMETER_NAMES = frozenset((*_NAMES.keywords, *_NAMES.same))
"""The keywords of `SamplingParams`: our names, and vLLM's names for the same things."""
_NULL_MEANS: dict[str, Any] = {
    "stop": (),
    "stop_token_ids": (),
    "columns": (),
    "logprobs": False,
    "max_new_tokens": NO_LIMIT,
}
"""What None stands for, where it is allowed."""


class SamplingOptions(TypedDict, total=False):
    """The arguments of `SamplingParams` with their types."""

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_new_tokens: int | None
    max_tokens: int | None
    min_new_tokens: int
    min_tokens: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    seed: int | None
    logprobs: bool | int | None
    top_logprobs: int
    logprobs_mode: LogprobsMode
    columns: Sequence[str] | None
    constraint: ConstraintLike | None
    lora: str | None
    pooling: Pooling | None
    normalise: bool
    decoding: object | None


@dataclass(frozen=True, slots=True, init=False, repr=False)
class SamplingParams:
    """How many outputs a prompt gets, how they are sampled, and when they stop.

        SamplingParams(temperature=0.7, max_tokens=64, n=4, stop="\\n", logprobs=5)

    The arguments are those of `batchgen.engine.sampling.sampling_params.RequestParams`, with these
    additions; each can be read as an attribute (`params.temperature`).

    - `n` is the number of outputs of each prompt, 1 by default. Each has random numbers of its own.
    - `max_tokens` and `min_tokens` are other names of `max_new_tokens` (256 by default) and
      `min_new_tokens`. None generates up to the longest row that the model allows.
    - `stop` may be one string. None means no stop strings.
    - `seed` None draws a seed, which `params.seed` then tells; the default is 0.
    - `logprobs` may be a number K: the log-probabilities of the K most likely tokens are returned
      besides those of the generated ones. It is short for `logprobs=True, top_logprobs=K`.
    - `top_k` may be -1, which turns it off as 0 does.
    - `constraint` may be a mapping such as `{"json_schema": schema}`, `{"regex": "[0-9]+"}`,
      `{"choice": ["yes", "no"]}`, `{"grammar": ebnf}` or `{"json": True}`, or a pydantic model
      class; `as_constraint` says more.

    Arguments of vLLM's `SamplingParams` that mean something else here are refused, and the message
    says what to write.

    Attributes:
        n: the number of outputs of each prompt.
        request: the parameters of each of them, as the engine takes them.

    Raises:
        ValueError: an argument is unknown, of a wrong type or out of range.
    """

    n: int
    request: RequestParams

    def __init__(self, **options: Unpack[SamplingOptions]) -> None:
        values = {name: _plain(value) for name, value in _NAMES.ours(options).items()}
        n = convert(values.pop("n", 1), int, "n")
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "request", _request(values))

    def replace(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """These parameters with some replaced."""
        return SamplingParams(**{**self._non_defaults(), **_NAMES.ours(options)})

    def __getattr__(self, name: str) -> Any:
        if name not in _HINTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.request, name)

    def __repr__(self) -> str:
        values = self._non_defaults()
        return f"SamplingParams({', '.join(f'{name}={values[name]!r}' for name in values)})"

    def _non_defaults(self) -> dict[str, Any]:
        """The arguments that make these parameters, without those that have their default."""
        values = {"n": self.n, **{name: getattr(self.request, name) for name in _HINTS}}
        if self.request.max_new_tokens == NO_LIMIT:
            values["max_new_tokens"] = None
        defaults = {"n": 1, **_DEFAULTS}
        return {name: value for name, value in values.items() if value != defaults[name]}


def _plain(value: Any) -> Any:
    """The value with numbers of numpy and the like as Python's, and tuples as lists."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _request(values: dict[str, Any]) -> RequestParams:
    """The engine's parameters for what a user gave under our names."""
    for name, meant in _NULL_MEANS.items():
        if name in values and values[name] is None:
            values[name] = meant
    if "seed" in values and values["seed"] is None:
        values["seed"] = secrets.randbits(32)
    for name in ("stop", "columns"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    if values.get("top_k") == -1:
        values["top_k"] = 0
    logprobs = values.get("logprobs")
    if isinstance(logprobs, int) and not isinstance(logprobs, bool):
        if values.setdefault("top_logprobs", logprobs) != logprobs:
            raise ValueError(
                f"logprobs={logprobs} and top_logprobs={values['top_logprobs']} differ: give one, "
                "or logprobs=True"
            )
        values["logprobs"] = True
    constraint = as_constraint(values.pop("constraint", None))
    checked = {
        name: convert(list(value) if isinstance(value, tuple) else value, _HINTS[name], name)
        for name, value in values.items()
    }
    return RequestParams(**checked, constraint=constraint)
