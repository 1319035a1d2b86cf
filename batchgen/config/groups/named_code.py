"""Imports the classes and functions that a configuration names, and reads the options they declare.

Only this module imports something by a name from a configuration. Before that,
`config.compose.trust` decides whether the configuration may name it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

from batchgen.config.groups.class_names import OWN, SHORT_NAMES, class_path
from batchgen.config.groups.convert_value import UnsupportedType, check_keys, convert
from batchgen.util.errors import ConfigError


def named_code(name: str, key: str) -> Any:
    """Import a class or function by its short name (`config.groups.class_names`) or import path
    `package.module.Class`. Its module may also be in the working directory.

    `key` is the key that holds the name, for messages.

    Raises:
        ConfigError: it does not exist, or its path begins with `batchgen.` but it is defined
            elsewhere, as `batchgen.jobs.run.run_job.os.system` is.
    """
    path = class_path(name)
    is_own = path.startswith(OWN)
    if not is_own and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        near = get_close_matches(path.rpartition(".")[2], list(SHORT_NAMES), 1)
        hint = f": did you mean {near[0]}?" if is_own and near else f": {error}"
        raise ConfigError(f"{key}: {path} does not exist{hint}") from None
    if is_own and not str(getattr(code, "__module__", "")).startswith(OWN):
        raise ConfigError(f"{key}: {path} is not batchgen's own: give the module that defines it")
    return code


def strategy_options(
    cls: type, options: Mapping[str, Any], where: str = "strategy"
) -> dict[str, Any]:
    """The keyword arguments for a class whose options are in the group `where` of the
    configuration.

    A parameter with an annotation gets a value of that type; one without gets the plain value.

    Raises:
        ConfigError: an option is unknown, missing or of another type, or a configuration cannot set
            it.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    parameters = _parameters(cls, name, where)
    required = [key for key, p in parameters.items() if p.default is inspect.Parameter.empty]
    check_keys(options, allowed=list(parameters), required=required, prefix=f"{where}.")
    return {
        key: _option(value, parameters[key].annotation, f"{where}.{key}", name)
        for key, value in options.items()
    }


def _parameters(cls: type, name: str, where: str) -> dict[str, inspect.Parameter]:
    """The parameters that can be set by name. *args and **kwargs are left out, because they would
    accept any typo."""
    try:
        signature = inspect.signature(cls, eval_str=True)
    except (ArithmeticError, AttributeError, LookupError, NameError, SyntaxError) as error:
        raise ConfigError(f"{where}._target_: an annotation of {name} is wrong: {error}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}._target_: the parameters of {name} cannot be read: {error}"
        ) from None
    by_name = {}
    for key, parameter in signature.parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            by_name[key] = parameter
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"{where}._target_: {name} takes {key} by position only, and a configuration "
                "gives options by name: drop the / from the constructor"
            )
    return by_name


def _option(value: Any, hint: Any, key: str, cls: str) -> Any:
    """The value of an option as its declared type, see `convert`."""
    try:
        return convert(value, hint, key)
    except UnsupportedType:
        raise ConfigError(
            f"{key}: {cls} declares it as {inspect.formatannotation(hint)}, which a "
            "configuration cannot give: declare it as bool, int, float, str, Literal, list, tuple "
            "or dict of these, or a union of these with None, or leave it without an annotation"
        ) from None
