"""Makes the sampling parameters of each row's requests: the job's parameters, changed by the row's
options, adapter and constraint. `RowParams` is the entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from batchgen.config.groups.constraint_config import JsonSchemaConstraintConfig
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.named_code import named_code
from batchgen.config.groups.prompt_config import ChatPromptConfig, OpenAIPromptConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.constraint.row_constraints import MAX_CACHED, RowConstraints
from batchgen.inputs.constraint.row_options import BAD_OPTION, RowOptions
from batchgen.inputs.constraint.timed_checks import TimedConstraints
from batchgen.inputs.dataset.dataset_columns import json_cell, named_path, value_at
from batchgen.inputs.dataset.source import Row

CheckParams = Callable[[RequestParams], None]
"""Raises ValueError for parameters that the strategy or the model cannot honour."""


class RowParams:
    """Makes the sampling parameters of each row. The seed is the job's or the row's; the seed of
    each sample is derived from it later."""

    def __init__(self, config: JobConfig, features: Mapping[str, Any], check: CheckParams) -> None:
        """Prepare the parameters that all rows share.

        Args:
            features: the types of the data set's columns.
            check: checks parameters that a row has changed.

        Raises:
            ConfigError: the data set lacks the column of constraints, options or adapters.
        """
        self._job, self._check = config.params, check
        self._adapters = config.model.adapters
        self._adapter_column = config.model.adapter_column
        if self._adapter_column is not None:
            self._adapter_path = named_path("model.lora_column", self._adapter_column, features)
        self._constraints = RowConstraints(config.constraint, features)
        self._column = config.sampling.column
        if self._column is None:
            return
        self._options_path = named_path("sampling.column", self._column, features)
        marker = config.constraint_marker
        schemas = TimedConstraints(
            JsonSchemaConstraintConfig(column=self._column, start_after=marker or None)
        )
        self._options = RowOptions(
            self._job,
            samples=config.sampling.n,
            prompt_keys=_prompt_keys(config, self._column),
            make_schema=lru_cache(MAX_CACHED)(schemas.make),
            make_decoding=partial(_decoding_of_row, config.strategy.target),
            marker=marker,
        )

    def sampling(self, row: Row) -> RequestParams:
        """Return the parameters of a row, without a constraint from a column (see `constrained`).

        Raises:
            RequestError: the row's options cannot be honoured (`bad_option`, `bad_constraint`), or
                its adapter does not exist (`unknown_adapter`).
        """
        params = self._job if self._column is None else self._sampled(row)
        if self._adapter_column is None:
            return params
        name = value_at(row.fields, self._adapter_path)
        if name not in self._adapters:
            raise RequestError(
                "unknown_adapter",
                f"column {self._adapter_column!r} must name an adapter of model.lora "
                f"({', '.join(self._adapters)}), got {name!r:.100}",
            )
        return replace(params, lora=name)

    def _sampled(self, row: Row) -> RequestParams:
        """Return the job's parameters, changed by the options in the row's cell; without the row's
        adapter."""
        try:
            options = json_cell(value_at(row.fields, self._options_path))
        except ValueError as error:
            raise RequestError(BAD_OPTION, f"column {self._column!r}: {error}") from None
        if options is None:
            return self._job
        if not isinstance(options, Mapping):
            raise RequestError(
                BAD_OPTION,
                f"column {self._column!r} must hold options by name, got {options!r:.100}",
            )
        try:
            params = self._options.params(options)
        except RequestError as error:
            raise RequestError(error.type, f"column {self._column!r}: {error}") from None
        try:
            self._check(params)
        except ValueError as error:
            raise RequestError(BAD_OPTION, f"column {self._column!r}: {error}") from None
        return params

    def constrained(self, row: Row, params: RequestParams) -> RequestParams:
        """Add the constraint from the row's cell, if there is one, to parameters from `sampling`.

        Raises:
            RequestError: the cell holds no valid constraint (`bad_constraint`), or the row's
                options have a constraint already (`bad_option`).
        """
        constraint = self._constraints.of(row)
        if constraint is None:
            return params
        if params.constraint is not None:
            raise RequestError(
                BAD_OPTION, "the row has a response_format and a constraint.column: choose one"
            )
        try:
            return replace(params, constraint=constraint)
        except ValueError as error:
            raise RequestError(BAD_OPTION, str(error)) from None


def _decoding_of_row(target: str, values: Mapping[str, Any]) -> object:
    """Convert a row's options for the strategy of class `target`. This imports the class, which
    loads torch."""
    decoding: object = named_code(target, "strategy._target_").decoding_of_row(values)
    return decoding


def _prompt_keys(config: JobConfig, column: str) -> list[str]:
    """Return the keys of the options that the prompt reads: the part of each prompt column's dotted
    name after `column`. For the prompt column `body.messages` and the column `body` it is
    `messages`."""
    prompt = config.prompt
    prompt_columns: list[str | None] = []
    if isinstance(prompt, ChatPromptConfig):
        prompt_columns = [prompt.messages_column, prompt.tools_column]
    if isinstance(prompt, OpenAIPromptConfig):
        prompt_columns = [f"{prompt.body_column}.{key}" for key in ("messages", "tools", "prompt")]
    start = f"{column}."
    return [name.removeprefix(start) for name in prompt_columns if name and name.startswith(start)]
