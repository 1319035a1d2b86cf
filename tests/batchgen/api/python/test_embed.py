"""Embeddings, classes and hidden states from Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from batchgen import LLM, SamplingParams
from tests.support.engine.pooled_rows import LABELS, Reference, classifier_folder, read
from tests.support.engine.tiny_models import random_model
from tests.support.jobs.real_job import VOCAB, save_tokenizer

TEXTS = ["What is 1 + 1?", "Two.", "x" * 400]


def test_a_language_model_embeds_beside_generating(model: Path) -> None:
    options = {"device": "cpu", "kv_cache_gib": 0.01, "hidden_layers": [0, -1]}
    reference = Reference(model, classifies=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with LLM(str(model), **options) as llm:  # type: ignore[arg-type]
        assert llm.labels is None
        found = llm.embed(TEXTS, pooling="mean", normalise=True)
        assert isinstance(found, list)
        for output, text in zip(found[:2], TEXTS, strict=False):
            asked = read(tokenizer(text).input_ids, "mean", normalise=True)
            assert output.embedding is not None
            np.testing.assert_allclose(output.embedding, reference.embedding(asked), atol=1e-5)
        assert found[2].error is not None and found[2].error.type == "prompt_too_long"
        lazy = llm.embed(text for text in TEXTS)
        assert isinstance(lazy, list) and len(lazy) == len(TEXTS)
        one = llm.embed(TEXTS[0])
        assert not isinstance(one, list) and one.embedding is not None
        params = SamplingParams(max_tokens=3, columns=["hidden_states"], ignore_eos=True)
        (generated,) = llm.generate(TEXTS[0], params)
        states = generated.columns["hidden_states"]
        ids = [*generated.prompt_token_ids, *generated.token_ids][:-1]
        expected = reference.states(ids)[[0, -1]].transpose(1, 0, 2)
        np.testing.assert_allclose(states, expected, atol=2e-5)
        np.testing.assert_array_equal(states[len(generated.prompt_token_ids) - 1, 1], one.embedding)
        with pytest.raises(ValueError, match="class_scores needs a classifier"):
            llm.classify(TEXTS[0])
    with pytest.raises(ValueError, match="hidden_layers has 9"):
        LLM(str(model), device="cpu", hidden_layers=[9])


def test_a_classifier_classifies(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "classifier"
    random_model("qwen3", VOCAB | {"pad_token_id": 0}).save_pretrained(base)
    classifier_folder(base, folder)
    save_tokenizer(folder)
    reference = Reference(folder, classifies=True)
    with LLM(str(folder), device="cpu", kv_cache_gib=0.01) as llm:
        assert llm.labels == LABELS
        output = llm.classify([5, 6, 7])
        assert not isinstance(output, list) and output.class_scores is not None
        np.testing.assert_allclose(output.class_scores, reference.scores([5, 6, 7]), atol=1e-5)
        talk = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1."}]
        told = llm.classify(talk)
        assert not isinstance(told, list) and told.error is None
        with pytest.raises(ValueError, match="the model is a classifier"):
            llm.generate("x")
