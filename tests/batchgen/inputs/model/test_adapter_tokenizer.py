"""The tokenizer and template of an adapter's folder: refused if they are others than the model's,
and taken if the adapter is the only one and the user says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.inputs.model.model_adapters import adapter_files, with_adapters
from batchgen.inputs.model.open_model import OpenedModel, open_model
from tests.support.engine.lora_files import write_adapter

OWN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def opened(model: Path) -> OpenedModel:
    return open_model(str(model), None, "auto")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a", model)


def give_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(OWN)


def give_template_list(folder: Path) -> None:
    listed = [{"name": "default", "template": OWN}, {"name": "tool_use", "template": "{}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))


def give_token(number: int) -> Callable[[Path, Path], None]:
    def give(model: Path, folder: Path) -> None:
        found: dict[str, Any] = json.loads((model / "tokenizer.json").read_text())
        token = {
            "id": number, "content": "<new>", "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False,
        }  # fmt: skip
        found["added_tokens"].append(token)
        (folder / "tokenizer.json").write_text(json.dumps(found))
        shutil.copy(model / "tokenizer_config.json", folder)

    return give


@pytest.mark.parametrize("give", [give_template, give_template_list])
def test_a_template_of_the_adapter(
    give: Callable[[Path], None], adapter: Path, opened: OpenedModel
) -> None:
    give(adapter)
    with pytest.raises(ValueError, match=r"another chat template .* with lora_template=adapter"):
        with_adapters(opened, str(adapter))
    found = with_adapters(opened, str(adapter), template="adapter")
    assert found.tokenizer is not None and opened.tokenizer is not None
    assert found.tokenizer.chat_template == OWN != opened.tokenizer.chat_template
    assert found.tokenizer.get_vocab() == opened.tokenizer.get_vocab()
    (only,) = found.adapters.values()
    assert len(adapter_files(only, with_template=True)) == 3
    for fold in (False, True):
        assert with_adapters(opened, str(adapter), fold=fold, template="adapter").folds == fold


def test_a_vocabulary_of_the_adapter(adapter: Path, model: Path, opened: OpenedModel) -> None:
    assert opened.tokenizer is not None
    size, own = len(opened.tokenizer), opened.tokenizer.chat_template
    opened = replace(opened, config=replace(opened.config, vocab_size=size + 3))
    give_token(size)(model, adapter)
    with pytest.raises(ValueError, match=r"another vocabulary .* \(token '<new>'\)"):
        with_adapters(opened, str(adapter))
    found = with_adapters(opened, str(adapter), template="adapter")
    assert found.tokenizer is not None
    assert found.tokenizer.convert_tokens_to_ids("<new>") == size
    assert found.tokenizer.chat_template == own


def test_a_vocabulary_beyond_the_embedding(adapter: Path, model: Path, opened: OpenedModel) -> None:
    assert opened.tokenizer is not None
    found: dict[str, Any] = json.loads((model / "tokenizer.json").read_text())
    start, most = len(opened.tokenizer), opened.config.vocab_size
    for number in range(start, most + 1):
        token = {
            "id": number, "content": f"<new{number}>", "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False,
        }  # fmt: skip
        found["added_tokens"].append(token)
    (adapter / "tokenizer.json").write_text(json.dumps(found))
    shutil.copy(model / "tokenizer_config.json", adapter)
    with pytest.raises(ValueError, match=rf"'<new{most}>' with id {most}, .* has {most} rows"):
        with_adapters(opened, str(adapter), template="adapter")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has none of tokenizer.json"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json is damaged"),
        ({"tokenizer_config.json": "[1]"}, "tokenizer_config.json is damaged: it holds no object"),
        ({"tokenizer.json": "[" * 100_000}, "tokenizer.json is damaged"),
        ({"tokenizer.json": '{"model": 3}'}, "its tokenizer cannot be loaded"),
    ],
)
def test_files_that_give_no_tokenizer(
    files: dict[str, str], says: str, adapter: Path, opened: OpenedModel
) -> None:
    for name, text in files.items():
        (adapter / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        with_adapters(opened, str(adapter), template="adapter")


def test_several_adapters_have_the_tokenizer_of_the_model(
    adapter: Path, opened: OpenedModel
) -> None:
    with pytest.raises(ValueError, match="lora names several"):
        with_adapters(opened, [str(adapter), "base"], template="adapter")
    with pytest.raises(ValueError, match="lora names none"):
        with_adapters(opened, None, template="adapter")
    with pytest.raises(ValueError, match="lora_template must be base or adapter, got 'own'"):
        with_adapters(opened, str(adapter), template="own")  # type: ignore[arg-type]
