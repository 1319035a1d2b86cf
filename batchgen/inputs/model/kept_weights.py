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
        self._recipe: object = None
        self._model: CausalLM | None = None

    def load(self, recipe: object, load: Callable[[], CausalLM]) -> CausalLM:
        """Return the held model if it was made from an equal recipe; otherwise free it and load a
        new one.

        Args:
            recipe: all that decides the weights of the model.
            load: loads the model of this recipe.
        """
        # The engine of the last job is a cycle of references, which only this frees.
        gc.collect()
        if self._model is None or self._recipe != recipe:
            self._model = None  # frees the old weights before the new ones need the memory
            self._model, self._recipe = load(), recipe
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """Pickle nothing: a process that a launcher starts loads its own weights."""
        return {"_recipe": None, "_model": None}
