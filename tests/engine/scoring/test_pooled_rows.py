"""Embeddings, classes and hidden states of rows that are only read, against transformers'."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.rows.pooling import pooled_columns
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.cases import some_slow
from tests.support.engine.engine_rows import Request, Scored, expect_short_rows, run
from tests.support.engine.pooled_rows import (
    LABELS,
    Reference,
    bare_folder,
    classifier_folder,
    read,
)
from tests.support.engine.ranked_engines import Case, run_divided
from tests.support.engine.scored_rows import make_engine, scored

TinyModel = Callable[..., Path]
KINDS = (
    "llama",
    "qwen3",
    "gemma3_text",
    "qwen3_next",
    "deepseek_v3",
    "qwen3_moe",
    "mistral3_small",
)
CLASSIFIERS = ("llama", "qwen3", "gemma3_text", "qwen3_next", "deepseek_v3", "qwen3_moe", "gemma3")
ASKING = RequestParams(ignore_eos=True, columns=("hidden_states",))
SMALL = {"initializer_range": 0.03}


def options(kind: str) -> dict[str, Any]:
    return SMALL | {"pad_token_id": 0} if kind == "qwen3_next" else {"pad_token_id": 0}


def chunk_of(kind: str) -> int:
    return 64 if kind == "qwen3_next" else 5


def prompts() -> list[list[int]]:
    """Several beginnings of one text, of one token up to many blocks."""
    rng = random.Random(1)
    text = [rng.randrange(3, 120) for _ in range(90)]
    return [text[:n] for n in (90, 1, 37, 70, 16, 89, 64)]


def embeddings() -> list[Request]:
    """The prompts with each way of pooling, normalised or not."""
    ways = [("last", {}), ("mean", {"normalise": True}), ("cls", {}), ("last", {"normalise": True})]
    return [
        read(prompt, *ways[i % 4][:1], **ways[i % 4][1])  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts() * 2)
    ]


def close(values: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert values.dtype == np.float32 and values.shape == expected.shape
    assert np.abs(values - expected).max() < 1e-5 * np.abs(expected).max()


def check(found: Sequence[RequestOutput], asked: Sequence[Request], reference: Reference) -> None:
    for output, request in zip(found, asked, strict=True):
        assert output.finish_reason == "read" and output.token_ids == [] and output.text == ""
        assert output.prompt_token_ids == request[0] and output.answer_token_ids is None
        close(output.columns["embedding"], reference.embedding(request))


def same(one: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.columns.keys() == b.columns.keys()
        for name in a.columns:
            np.testing.assert_array_equal(a.columns[name], b.columns[name])


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_equal_transformers(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = bare_folder(tiny_model(kind, **options(kind)), tmp_path / "bare")
    reference, asked = Reference(folder, classifies=False), embeddings()
    found = run(make_engine(folder, prefix_caching=False), asked)
    check(found, asked, reference)
    chunked = make_engine(folder, max_batched_tokens=chunk_of(kind), block_size=4, overlap=True)
    check(run(chunked, asked), asked, reference)
    check(run(chunked, asked), asked, reference)
    assert chunked.stats.cached_tokens > 60, "rows with the state of the last token share the rest"


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_class_scores_equal_transformers(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = classifier_folder(tiny_model(kind, **options(kind)), tmp_path / "classes")
    reference = Reference(folder, classifies=True)
    engine = make_engine(folder, max_batched_tokens=64, block_size=4)
    _, column = pooled_columns(load_model_config(folder))
    assert dict(column.metadata) == {f"label_{i}": name for i, name in enumerate(LABELS)}
    asked = [read(prompt, "mean", "class_scores") for prompt in prompts()]
    for output, (prompt, _) in zip(run(engine, asked), asked, strict=True):
        assert output.columns.keys() == {"class_scores"}
        close(output.columns["class_scores"], reference.scores(prompt))


def mixed(vocab: int = 120) -> list[Request | Scored]:
    """Rows that are read, rows with answers, and rows that generate, in all ways."""
    rng = random.Random(3)
    found: list[Request | Scored] = []
    for i, prompt in enumerate(prompts()):
        found.append(read(prompt, ("last", "mean", "cls")[i % 3], normalise=i % 2 == 0))
        found.append(scored(prompt[:30], [rng.randrange(3, vocab) for _ in range(9)]))
        found.append((prompt[:40], RequestParams(max_new_tokens=6, seed=i, ignore_eos=True)))
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_rows_of_a_mixed_batch_equal_each_alone(
    kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(kind)
    asked = mixed()
    alone = make_engine(folder, prefix_caching=False)
    expected = [run(alone, [request])[0] for request in asked]
    expect_short_rows(monkeypatch)
    engine = make_engine(
        folder, max_batched_tokens=64, block_size=4, kv_cache_gib=0.0006, max_model_len=100
    )
    found = run(engine, asked)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    same(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", some_slow([False, True], quick=[True]))
def test_preempted_rows_keep_what_was_read(
    overlap: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that decode take the blocks of a row whose tokens are half read."""
    folder = tiny_model("llama")
    request = read(range(4, 84), "mean")
    (alone,) = run(make_engine(folder), [request])
    expect_short_rows(monkeypatch)
    engine = make_engine(
        folder, chunk_tokens=5, kv_cache_gib=0.00009, max_model_len=100, block_size=4,
        overlap=overlap,
    )  # fmt: skip
    for i in range(3):
        engine.add_request(str(i), [5 + i], RequestParams(max_new_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request("read", *request)
    outputs = {output.request_id: output for _ in range(200) for output in engine.step()}
    assert not engine.has_unfinished() and outputs["read"].num_preemptions
    same([outputs["read"]], [alone])


@pytest.mark.thorough
def test_ranks_read_what_one_process_reads(tiny_model: TinyModel, tmp_path: Path) -> None:
    kinds = ("qwen3", "deepseek_v3")
    folders = [
        classifier_folder(tiny_model(kind, **options(kind)), tmp_path / kind) for kind in kinds
    ]
    asked = [read(p, "mean", "class_scores", "embedding") for p in prompts()]
    cases = [Case(folder, asked, config={"block_size": 4}) for folder in folders]
    for folder, (found, _) in zip(folders, run_divided(cases, 2), strict=True):
        reference = Reference(folder, classifies=True)
        for output, (prompt, _) in zip(found, asked, strict=True):
            close(output.columns["class_scores"], reference.scores(prompt))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_hidden_states_equal_transformers(kind: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(kind)
    layers = (0, 1, 3)
    engine = make_engine(
        folder, columns=("hidden_states",), hidden_layers=layers, max_batched_tokens=7, block_size=4
    )
    reference = Reference(folder, classifies=False)
    prompt = prompts()[3]
    asked = [
        read(prompt, "last", "hidden_states"),
        (
            prompt[:20],
            RequestParams(max_new_tokens=9, ignore_eos=True, columns=("hidden_states",)),
        ),
        (prompt, replace(ASKING, max_new_tokens=1)),
    ]
    for output, tokens in zip(run(engine, asked), (70, 28, 70), strict=True):
        ids = [*output.prompt_token_ids, *output.token_ids][:tokens]
        expected = reference.states(ids)[list(layers)].transpose(1, 0, 2)
        values = output.columns["hidden_states"]
        assert values.shape == (tokens, 3, 64)
        close(values, expected)


def test_what_cannot_be_read_is_refused_by_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    engine = make_engine(tiny_model("llama"), ARSpecStrategy("ngram"), max_model_len=40)
    prompt, params = read([3] * 10)
    bad: dict[str, list[int]] = {
        "prompt_too_long": [3] * 41, "empty_prompt": [], "bad_token_ids": [128],
    }  # fmt: skip
    for error, ids in bad.items():
        with pytest.raises(RequestError) as refused:
            engine.add_request("0", ids, params)
        assert refused.value.type == error
    for message, changes in (
        ("class_scores needs a classifier, and the model is Llama", {"columns": ("class_scores",)}),
        ("column embedding needs a row that is only read", {"pooling": None}),
        ("column step_map describes generated tokens", {"columns": ("step_map",)}),
        ("logprobs and entropy describe tokens that are generated", {"logprobs": True}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            engine.add_request("0", prompt, replace(params, **changes))
    with pytest.raises(ValueError, match="or pools hidden states"):
        engine.add_request("0", prompt, params, [4])
    with pytest.raises(ValueError, match="max_new_tokens must be 0 with pooling"):
        RequestParams(pooling="mean")
    with pytest.raises(ValueError, match="pooling must be last, mean, cls or None"):
        RequestParams(max_new_tokens=0, pooling="max")  # type: ignore[arg-type]
    assert not engine.has_unfinished()
    (output,) = run(engine, [([3] * 40, params)])  # as long as the model allows
    assert output.finish_reason == "read"
    diffusion = make_engine(tiny_model("sdar"), DLLMStrategy(block_length=4))
    with pytest.raises(ValueError, match="sees blocks in both directions"):
        diffusion.add_request("0", [3, 4], params)
    bare = make_engine(bare_folder(tiny_model("llama"), tmp_path / "bare"))
    with pytest.raises(ValueError, match="the model is an embedding model"):
        bare.add_request("0", [3, 4], RequestParams(max_new_tokens=4))
    with pytest.raises(ValueError, match="the model is an embedding model"):
        bare.add_request("0", [3, 4], RequestParams(max_new_tokens=0), [5])


def test_an_embedding_model_may_be_named_a_language_model(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """As Qwen3-Embedding-8B, whose files have neither `lm_head` nor the prefix `model.`."""
    folder = bare_folder(tiny_model("qwen3"), tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"] and not config["tie_word_embeddings"]
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]})
    )
    (folder / "modules.json").write_text("[]")
    assert not load_model_config(folder).has_logits
    asked = [read(prompts()[2])]
    check(run(make_engine(folder), asked), asked, Reference(folder, classifies=False))


@pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaForSequenceClassification"])
def test_encoders_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(ValueError, match=f"'{architecture}' is not supported: it is an encoder"):
        model_class(architecture, Path("x"))


def test_states_that_are_no_numbers_end_a_row_with_an_error(
    tiny_model: TinyModel,
) -> None:
    engine = make_engine(tiny_model("llama"))
    model = engine._runner.model
    assert isinstance(model, CausalLM)
    model.model.norm.weight.data[3] = float("nan")
    (output,) = run(engine, [read([3, 4, 5], "mean")])
    assert output.error is not None and output.error.type == "non_finite_logits"
    assert "hidden states at 3 of the prompt's 3 tokens" in str(output.error)
