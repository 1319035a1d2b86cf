"""Files of a model whose sizes or nesting are absurd are refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine.loading.safetensors_files import read_json
from batchgen.engine.models.model_config import check_positive


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000])
def test_deep_json_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"config.json is not valid JSON: .*recursion"):
        read_json(file)


def test_an_absurd_size_is_named() -> None:
    check_positive(hidden_size=2**24, max_position_embeddings=2**40)
    with pytest.raises(ValueError, match="hidden_size is 1,099,511,627,776; no model has more"):
        check_positive(hidden_size=2**40)
