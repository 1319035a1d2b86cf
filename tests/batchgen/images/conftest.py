from pathlib import Path

import pytest
from image_job import save_model


@pytest.fixture(scope="session")
def vl_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads images; tests must not change its folder."""
    return save_model(tmp_path_factory.mktemp("vl"))
