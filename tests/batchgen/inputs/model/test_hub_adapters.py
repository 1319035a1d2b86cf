"""Adapters on the hub, which may be named with a revision."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import RevisionNotFoundError

from batchgen.inputs.model import model_adapters
from batchgen.inputs.model.model_adapters import with_adapters
from batchgen.inputs.model.open_model import open_model
from batchgen.util.errors import ConfigError
from tests.support.engine.lora_files import write_adapter


def test_an_adapter_of_a_revision(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an adapter's own files are fetched, and those of a tokenizer."""
    folder, asked = write_adapter(tmp_path / "snapshot", model), list[tuple[str, Any]]()

    def snapshot(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert {"adapter_config.json", "adapter_model.safetensors"} < {*allow_patterns}
        assert not any("*" in name or name.endswith((".py", ".bin")) for name in allow_patterns)
        if revision == "gone":
            raise RevisionNotFoundError(
                "no such revision",
                response=SimpleNamespace(  # type: ignore[arg-type]
                    headers={}, request=None, status_code=404
                ),
            )
        return str(folder)

    monkeypatch.setattr(model_adapters, "snapshot_download", snapshot)
    opened = open_model(str(model), None, "auto")
    found = with_adapters(opened, {"a": "owner/name@v1.2", "b": "owner/name", "base": "base"})
    assert asked == [("owner/name", "v1.2"), ("owner/name", None)]
    assert {name: adapter.folder for name, adapter in found.adapters.items()} == {
        "a": folder,
        "b": folder,
    }
    with pytest.raises(ConfigError, match="adapter name: owner/name@gone is not a folder here"):
        with_adapters(opened, "owner/name@gone")
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"name is not an adapter: it has no adapter_config"):
        with_adapters(opened, "owner/name")
    assert len(asked) == 3
