"""Makes the decoding strategy that a configuration names (`decoding._target_`)."""

from __future__ import annotations

import inspect

from batchgen.config.groups.job_config import StrategyConfig
from batchgen.config.groups.named_code import named_code, strategy_options
from batchgen.engine.strategy import Strategy
from batchgen.util.errors import ConfigError, mistakes_in

_SAID_BY_CLASS = ("name", "step_inputs", "decide")
"""Attributes that every strategy must define itself."""
_BASE = "batchgen.engine.strategy.Strategy"
"""The base class under the name that users know it by."""


def build_strategy(config: StrategyConfig) -> Strategy:
    """The decoding strategy that the configuration names, with its options."""
    target = f"strategy._target_: {config.target}"
    cls = named_code(config.target, "strategy._target_")
    if not isinstance(cls, type):
        raise ConfigError(f"{target} is not a Strategy: it is not a class")
    # A class of something else must not be called at all: who knows what it does.
    abstract = getattr(cls, "__abstractmethods__", ())
    if lacks := [n for n in _SAID_BY_CLASS if not hasattr(cls, n) or n in abstract]:
        raise ConfigError(f"{target} is not a Strategy: the class has no {', '.join(lacks)}")
    with mistakes_in("strategy"):
        strategy: Strategy = cls(**strategy_options(cls, config.options))
    members = [name for name in dir(Strategy) if not name.startswith("_")]
    if lacks := [name for name in members if not _has(strategy, name)]:
        raise ConfigError(
            f"{target} is not a Strategy: it has no {', '.join(lacks)}: derive it from {_BASE}, "
            "which has what most need"
        )
    return strategy


def _has(strategy: Strategy, name: str) -> bool:
    """Whether the object has the attribute; a property is not computed."""
    try:
        inspect.getattr_static(strategy, name)
    except AttributeError:
        return False
    return True
