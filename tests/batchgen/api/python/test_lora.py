"""Adapters of an `LLM`: which one a prompt has, and what is refused before weights load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchgen import LLM, SamplingParams
from tests.support.engine.lora_files import merge, write_adapter

PARAMS = SamplingParams(max_tokens=8, seed=5)
SMALL: dict[str, Any] = {"device": "cpu", "kv_cache_gib": 0.01, "max_num_seqs": 8}


@dataclass
class LoRARequest:
    """As vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "first", model, strength=0.2)


def ids(llm: LLM, **given: Any) -> list[int]:
    found: list[int] = llm.generate("abc", **{"params": PARAMS, **given})[0].token_ids
    return found


def test_all_prompts_have_the_only_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    with LLM(str(model), **SMALL) as llm:
        base = ids(llm)
    with LLM(str(merge(model, adapter, tmp_path / "merged")), **SMALL) as llm:
        merged = ids(llm)
    with LLM(str(model), lora=str(adapter), **SMALL) as llm:
        assert ids(llm) == ids(llm, lora="first") == merged != base
        assert ids(llm, lora="base") == base
        assert llm.chat([{"role": "user", "content": "hi"}], PARAMS, lora="base")
    with LLM(str(model), lora={"one": str(adapter), "base": "base"}, **SMALL) as llm:
        assert ids(llm) == ids(llm, params=PARAMS.replace(lora="base")) == base
        assert ids(llm, params=PARAMS.replace(lora="one")) == merged
        assert ids(llm, lora_request=LoRARequest("one", 1, "")) == merged
        (output,) = llm.generate("abc", PARAMS, lora="two")
        assert output.error is not None and output.error.type == "unknown_adapter"
        score = llm.score("abc", "def", lora="one")
        assert score.logprob != llm.score("abc", "def").logprob


def copied(adapter: Path, folder: Path) -> Path:
    return shutil.copytree(adapter, folder / "copy")


def with_vocabulary(adapter: Path, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 9999, "content": "<new>"})
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))


def with_template(adapter: Path, model: Path) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}!")


def with_damage(adapter: Path, model: Path) -> None:
    (adapter / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_vocabulary, "has another vocabulary than the model (token '<new>')"),
        (with_template, "has another chat template than the model"),
        (with_damage, "tokenizer.json is damaged"),
    ],
)
def test_another_tokenizer_is_refused(
    change: Callable[[Path, Path], None], says: str, model: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = copied(adapter, tmp_path)
    shutil.copy(model / "tokenizer.json", folder)
    with LLM(str(model), lora=str(folder), **SMALL):
        pass
    change(folder, model)
    with pytest.raises(ValueError) as error:
        LLM(str(model), lora=str(folder), **SMALL)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere", "adapter nowhere: nowhere does not exist"),
        (["a/x", "b/x"], "two adapters named x (a/x and b/x): name them"),
        ({"base": "a/x"}, "base is the model without an adapter"),
        ({"a b": "a/x"}, "an adapter's name has letters"),
    ],
)
def test_names_of_adapters(given: Any, says: str, model: Path) -> None:
    with pytest.raises(ValueError) as error:
        LLM(str(model), lora=given, **SMALL)
    assert says in str(error.value)


def test_another_base_is_told(
    model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(adapter, tmp_path)
    path = folder / "adapter_config.json"
    base = {"base_model_name_or_path": "org/Other-7B"}
    path.write_text(json.dumps(json.loads(path.read_text()) | base))
    with LLM(str(model), lora=str(folder), **SMALL):
        pass
    assert "adapter copy was trained on org/Other-7B" in capsys.readouterr().err
