"""Keeps a model's weights in memory between jobs of one process that use the same model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.models.causal_lm import CausalLM


class KeptWeights:
    """Holds the last loaded model with its weights on their device. The engine's caches are not
    held: they are freed with the engine of each job."""

    def __init__(self) -> None:
        self._made_of: object = None
        self._model: CausalLM | None = None

    def load(self, made_of: object, load: Callable[[], CausalLM]) -> CausalLM:
        """Return the held model if it was made from an equal recipe; otherwise free it and load a
        new one.

        Args:
            made_of: the recipe of the model: all that decides its weights.
            load: loads the model of this recipe.
        """
        # The engine of the last job is a cycle of references, which only this frees.
        gc.collect()
        if self._model is None or self._made_of != made_of:
            self._model = None
            self._model, self._made_of = load(), made_of
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """Pickle nothing: a process that a launcher starts loads its own weights."""
        return {"_made_of": None, "_model": None}
