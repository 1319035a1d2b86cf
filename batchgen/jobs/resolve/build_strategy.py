"""Makes the decoding strategy that a configuration names (`strategy._target_`)."""

from __future__ import annotations

import inspect

from batchgen.config.groups.job_config import StrategyConfig
from batchgen.config.groups.named_code import named_code, strategy_options
from batchgen.engine.strategy import Strategy
from batchgen.util.errors import ConfigError, mistakes_in

_DEFINED_BY_CLASS = ("name", "step_inputs", "decide")
"""Attributes that every class of a strategy must define."""
_BASE = "batchgen.engine.strategy.Strategy"
"""The base class, by the name that users import."""


def build_strategy(config: StrategyConfig) -> Strategy:
    """Make the decoding strategy that the configuration names, with its options.

    Raises:
        ConfigError: the class is not a strategy, or refuses an option.
    """
    target = f"strategy._target_: {config.target}"
    cls = named_code(config.target, "strategy._target_")
    if not isinstance(cls, type):
        raise ConfigError(f"{target} is not a Strategy: it is not a class")
    # Check before the call: making an object of any other class could do anything.
    abstract = getattr(cls, "__abstractmethods__", ())
    if lacks := [n for n in _DEFINED_BY_CLASS if not hasattr(cls, n) or n in abstract]:
        raise ConfigError(f"{target} is not a Strategy: the class has no {', '.join(lacks)}")
    with mistakes_in("strategy"):
        strategy: Strategy = cls(**strategy_options(cls, config.options))
    members = [name for name in dir(Strategy) if not name.startswith("_")]
    if lacks := [name for name in members if not _has(strategy, name)]:
        raise ConfigError(
            f"{target} is not a Strategy: it has no {', '.join(lacks)}: derive it from {_BASE}, "
            "which defines most of them"
        )
    return strategy


def _has(strategy: Strategy, name: str) -> bool:
    """Whether the object has the attribute. The value of a property is not computed."""
    try:
        inspect.getattr_static(strategy, name)
    except AttributeError:
        return False
    return True
