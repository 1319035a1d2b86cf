"""Weights that jobs of one process load once, though each has an engine of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.models.causal_lm import CausalLM


class KeptWeights:
    """The model that was loaded last, with its weights on their device. It is packed for its first
    engine, and stays so; the caches are those of an engine, and go with it."""

    def __init__(self) -> None:
        self._made_of: object = None
        self._model: CausalLM | None = None

    def load(self, made_of: object, load: Callable[[], CausalLM]) -> CausalLM:
        """The model: the one that is there if it is made of the same, else a new one, for which
        the old one makes room."""
        gc.collect()  # the engine of the job before has references in a circle
        if self._model is None or self._made_of != made_of:
            self._model = None
            self._model, self._made_of = load(), made_of
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a process that a launcher starts loads its own."""
        return {"_made_of": None, "_model": None}
