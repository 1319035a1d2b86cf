"""Converts the arguments of `LLM` and its methods, including vLLM's names for them, to their
internal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast, get_args, get_type_hints, runtime_checkable

import torch

from batchgen.api.python.params import PARAMETER_NAMES, SamplingOptions, SamplingParams
from batchgen.api.python.unknown_names import SAME, KeywordNames
from batchgen.config.groups.convert_value import convert
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.inputs.model.open_model import DtypeName

Params = SamplingParams | Sequence[SamplingParams] | None
"""The parameters of a call: one for all prompts, or a list with one for each. None is
`SamplingParams()`."""


@runtime_checkable
class NamesAdapter(Protocol):
    """An object that names an adapter, as vLLM's `LoRARequest` does."""

    lora_name: str


AdapterName = str | NamesAdapter | None
"""The LoRA adapter for all prompts of a call: its name, or an object that names it."""
_ENGINE_KEYS = tuple(field.name for field in fields(EngineConfig))
# vLLM's names that have no single key of EngineConfig with the same meaning.
_SWITCHES = ("enforce_eager", "kv_cache_memory_bytes")
_ENGINE_NAMES = KeywordNames("LLM", (*_ENGINE_KEYS, *_SWITCHES), SAME["LLM"])


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call of `generate`, `chat`, `stream` and the like, under batchgen's
    names."""

    params: Params = None
    n: int | None = None
    progress: bool | None = None
    template_kwargs: Mapping[str, Any] | None = None
    lora: AdapterName = None

    def params_of(self, number: int) -> list[SamplingParams]:
        """Return the parameters of each of `number` prompts. Raises ValueError if `params` does not
        have one for each, or they are no `SamplingParams`."""
        shared = SamplingParams() if self.params is None else self.params
        params = [shared] * number if isinstance(shared, SamplingParams) else shared
        if not isinstance(params, Sequence) or len(params) != number:
            what = f"{len(params)} params" if isinstance(params, Sequence) else repr(params)
            raise ValueError(
                f"{what} for {number} prompts: give one SamplingParams for all, or a list with "
                "one for each"
            )
        for prompt_params in params:
            if not isinstance(prompt_params, SamplingParams):
                raise ValueError(
                    f"params must be batchgen.SamplingParams, got {prompt_params!r:.100}"
                )
        changes: SamplingOptions = {} if self.n is None else {"n": self.n}
        if (lora := self.lora) is not None:
            changes["lora"] = lora.lora_name if isinstance(lora, NamesAdapter) else lora
        return [
            prompt_params.replace(**changes) if changes else prompt_params
            for prompt_params in params
        ]


def arguments_of(
    function: str, values: Mapping[str, Any], others: Mapping[str, Any]
) -> CallArguments:
    """Convert the arguments of a call.

    Args:
        function: the function's name in error messages.
        values: the arguments that the function declares; None means not passed.
        others: its other keyword arguments, which may have vLLM's names.

    Raises:
        ValueError: an argument is unknown.
    """
    elsewhere = {
        name: f"write params=SamplingParams({name}=…)" for name in PARAMETER_NAMES - values.keys()
    }
    names = KeywordNames(function, values.keys(), SAME["call"], elsewhere)
    arguments = {name: value for name, value in values.items() if value is not None}
    return CallArguments(**names.ours({**arguments, **others}))


def engine_config(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's settings: those of `config`, with single keys replaced by `options`.
    Raises ValueError for an unknown key or a wrong type."""
    values = _ENGINE_NAMES.ours(options)
    if values.pop("enforce_eager", False):
        values["cuda_graph"] = False
    if (size := values.pop("kv_cache_memory_bytes", None)) is not None:
        values["kv_cache_gib"] = size / 2**30
    hints = get_type_hints(EngineConfig)
    checked = {name: convert(value, hints[name], name) for name, value in values.items()}
    return replace(config or EngineConfig(), **checked)


def dtype_name(dtype: DtypeName | torch.dtype) -> DtypeName:
    """Return the name of a dtype that the user passed as a name or a torch dtype. Raises ValueError
    for an unsupported one."""
    name = str(dtype).removeprefix("torch.")
    if name not in get_args(DtypeName):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DtypeName))}, got {dtype!r}")
    return cast("DtypeName", name)
