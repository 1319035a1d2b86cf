"""Makes the vision tower for a configuration. `CausalLM` calls `make_tower`."""

from __future__ import annotations

from batchgen.engine.parallel.placement import Placement
from batchgen.engine.vision.axial_tower import AxialTower
from batchgen.engine.vision.deepstack_tower import DeepstackTower
from batchgen.engine.vision.square_tower import SquareTower
from batchgen.engine.vision.vision_config import (
    AxialConfig,
    DeepstackConfig,
    SquareConfig,
    VisionConfig,
    WindowedConfig,
)
from batchgen.engine.vision.vision_tower import VisionTower
from batchgen.engine.vision.windowed_tower import WindowedTower


def make_tower(config: VisionConfig, *, where: Placement) -> VisionTower:
    """Make the tower for the type of `config`, with uninitialised weights."""
    if isinstance(config, SquareConfig):
        return SquareTower(config, where=where)
    if isinstance(config, AxialConfig):
        return AxialTower(config, where=where)
    if isinstance(config, WindowedConfig):
        return WindowedTower(config, where=where)
    assert isinstance(config, DeepstackConfig)
    return DeepstackTower(config, where=where)
