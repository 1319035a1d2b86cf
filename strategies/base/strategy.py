"""The base class of strategies, under the name by which strategies of other packages derive it."""

from batchgen.engine.strategy import Strategy as BaseStrategy

__all__ = ["BaseStrategy"]
