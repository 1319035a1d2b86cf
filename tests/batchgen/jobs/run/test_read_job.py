"""Jobs whose rows are only read: embeddings, scores of classes and hidden states."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.planner import make_plan
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from tests.support.engine.pooled_rows import LABELS, classifier_folder, embedder_files
from tests.support.engine.tiny_models import random_model
from tests.support.jobs.real_job import VOCAB, run, save_tokenizer

POOLED = "output.columns=[class_scores,embedding,prompt_token_ids]"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("classifier")
    random_model("llama", VOCAB | {"pad_token_id": 0}).save_pretrained(base)
    classifier_folder(base, folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with answers; one question is longer than the model allows."""
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    rows = [{"id": f"r{i}", "q": f"What is {i}?", "a": f"It is {i * i}."} for i in range(9)]
    rows[4]["q"] = "x" * 400
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def asked(model: Path, rows: Path, out: Path | str, *more: str) -> list[str]:
    return [
        "model=hf", f"model.path={model}", "dataset=files", f"dataset.path={rows}",
        "dataset.id_column=id", "sampling.max_new_tokens=0", "engine.kv_cache_gib=0.01",
        "prompt.messages=[{user: '{{ q }}'}, {assistant: '{{ a }}'}]", "engine.device=cpu",
        "output.rows_per_shard=2", "output.report=false", f"output.dir={out}", *more,
    ]  # fmt: skip


def table(folder: Path) -> pa.Table:
    return pq.read_table(folder / "data", partitioning=None)


def test_a_reward_model_scores_conversations_as_transformers_does(
    classifier: Path, talks: Path, tmp_path: Path
) -> None:
    pooling = ("output.pooling=mean", "output.normalise=true")
    run(asked(classifier, talks, tmp_path / "out", POOLED, *pooling, "output.report=true"))
    found = table(tmp_path / "out")
    field = found.schema.field("class_scores")
    assert field.type == pa.list_(pa.float32(), 3)
    assert [field.metadata[f"label_{i}".encode()].decode() for i in range(3)] == [*LABELS]
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), 64)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    for row in found.to_pylist():
        if row["row_id"] == "r4":
            assert row["error"]["type"] == "prompt_too_long"
            assert row["class_scores"] is None and row["embedding"] is None
            continue
        assert row["finish_reason"] == "read" and row["text"] == "" and row["token_ids"] == []
        ids = tokenizer(f"user: {row['q']}\nassistant: {row['a']}\nassistant:").input_ids
        # The template here always begins an answer; others are told that there is one.
        assert row["prompt_token_ids"] == ids
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(row["class_scores"], expected, atol=1e-5, rtol=1e-5)
        assert abs(np.linalg.norm(row["embedding"]) - 1) < 1e-5
    scores = np.array([one for one in found["class_scores"].to_pylist() if one is not None])
    best = np.bincount(scores.argmax(1), minlength=3)
    numbers = zip(scores.mean(0), scores.min(0), scores.max(0), strict=True)
    cells = [
        "|".join(["", label, str(count), *(f"{number:.3f}" for number in row), ""])
        for label, count, row in zip(LABELS, best, numbers, strict=True)
    ]
    report = html.unescape((tmp_path / "out" / "report.html").read_text())
    shown = re.sub(r"\s*</?t[dhr][^>]*>\s*", "|", report.partition("Scores of each class")[2])
    assert all(line in re.sub(r"\|+", "|", shown) for line in cells)


def test_embeddings_are_made_as_the_checkpoint_says(
    model: Path, talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the job does not say it; a folder of before goes on as it was begun."""
    few, columns = "dataset.limit=3", "output.columns=[embedding]"

    def vectors(out: str, *more: str, limit: str = few) -> pa.Table:
        run(asked(folder, talks, tmp_path / out, columns, limit, *more))
        return table(tmp_path / out)["embedding"]

    folder = tmp_path / "embedder"
    shutil.copytree(model, folder)
    plain = vectors("old", limit="dataset.limit=2")
    embedder_files(folder, {"pooling_mode_mean_tokens": True}, "Normalize")
    mean = vectors("mean", "output.pooling=mean", "output.normalise=true", "output.reuse=[]")
    capsys.readouterr()
    assert vectors("unset") == mean
    said = "as the checkpoint says: output.pooling=mean output.normalise=true"
    assert said in capsys.readouterr().err
    written = JobFolderReader(tmp_path / "unset").config["output"]
    assert (written["pooling"], written["normalise"]) == ("mean", True)
    last = vectors("last", "output.pooling=last", "output.normalise=false")
    assert vectors("old") == last and last[:2] == plain
    reuse = f"output.reuse=[{tmp_path / 'mean'}]"
    arguments = asked(folder, talks, tmp_path / "planned", columns, few, reuse)
    planned = make_plan(compose({}, arguments), PlanSettings()).reuse
    assert planned is not None and planned.answers == 3
    embedder_files(folder, {"pooling_mode": "max"}, "Dense")
    with pytest.raises(ConfigError, match=r"model: .* lists the modules Transformer, Po"):
        vectors("dense")


def test_nothing_follows_an_answer_that_is_read(
    classifier: Path, talks: Path, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    own = (POOLED, f"prompt.template_kwargs={{chat_template: {json.dumps(template)}}}")
    run(asked(classifier, talks, tmp_path / "out", *own, "dataset.limit=1"))
    (row,) = table(tmp_path / "out").to_pylist()
    text = AutoTokenizer.from_pretrained(classifier).decode(row["prompt_token_ids"])
    assert text == "<user>What is 0?<assistant>It is 0."


@pytest.mark.thorough
def test_a_job_that_is_cut_off_writes_the_same_values(
    classifier: Path, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = "output.columns=[embedding,hidden_states]"
    more = (columns, "output.pooling=mean", "output.hidden_layers=[0,-1]", "engine.max_num_seqs=2")
    run(asked(classifier, talks, tmp_path / "whole", *more, "engine.max_batched_tokens=2048"))
    step, calls = LLMEngine.step, 0

    def cut_off(self: LLMEngine) -> list[RequestOutput]:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise RuntimeError("the machine is gone")
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", cut_off)
    for _ in range(30):
        try:
            run(asked(classifier, talks, tmp_path / "cut", *more, "engine.max_batched_tokens=16"))
            break
        except RuntimeError:
            continue
    assert calls > 10, "the job was never cut off"
    whole, cut = table(tmp_path / "whole"), table(tmp_path / "cut")
    assert whole.equals(cut)
    field = whole.schema.field("hidden_states")
    assert field.type == pa.list_(pa.list_(pa.list_(pa.float32(), 64), 2))
    assert field.metadata[b"layers"] == b"[0, 3]"
    row = whole.to_pylist()[0]
    assert len(row["hidden_states"]) == row["num_prompt_tokens"]
    last = np.array(row["hidden_states"])[:, 1]
    np.testing.assert_allclose(row["embedding"], last.mean(0), atol=1e-6)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("only read, but sampling.max_new_tokens is 5", ["sampling.max_new_tokens=5"]),
        ("but prompt.answer is scored", ["prompt.answer=x"]),
        ("restricts the generated text", ["constraint=json"]),
        ("asks for several samples of", ["sampling.n=2", "sampling.temperature=1"]),
        ("logprobs describes generated or scored tokens", ["output.columns=[embedding,logprobs]"]),
        ("has no embedding", ["output.columns=[class_scores]", "output.pooling=mean"]),
        ("go together", ["output.columns=[hidden_states]"]),
        ("go together", ["output.hidden_layers=[1]"]),
        ("hidden_layers has 9, and the model has 3 layers", [
            "output.columns=[hidden_states]", "output.hidden_layers=[9]"]),
        ("names a layer twice", ["output.columns=[hidden_states]", "output.hidden_layers=[3,-1]"]),
        ("has no head for the logits", ["output.columns=[]", "prompt.answer=x"]),
        ("ask for an embedding", ["output.columns=[prompt_token_ids]"]),
    ],
)  # fmt: skip
def test_what_does_not_go_with_rows_that_are_read(
    message: str, more: list[str], classifier: Path, talks: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(asked(classifier, talks, tmp_path / "out", POOLED, *more))
    assert not (tmp_path / "out").exists()


def test_other_models_have_no_classes(model: Path, talks: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="comes from classifiers and reward models, and this model"
    ):
        run(asked(model, talks, tmp_path / "out", POOLED))


def test_a_plan_tells_how_large_hidden_states_are(
    classifier: Path, talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ("output.columns=[hidden_states]", "output.hidden_layers=[0,1,2,3]")
    small = compose({}, asked(classifier, talks, tmp_path / "out", *columns))
    plan = make_plan(small, PlanSettings())
    assert plan.disk is not None and not plan.warnings
    tokens = plan.scan.lengths.mean() * 9
    assert tokens * 4 * 64 * 4 < plan.disk.output.likely < 1.5 * tokens * 4 * 64 * 4
    assert "hidden_states" not in capsys.readouterr().err
    big = ("output.rows_per_shard=100000", "dataset.limit=null")
    make_plan(
        compose({}, asked(classifier, talks, tmp_path / "out", *columns, *big)), PlanSettings()
    )
    assert "hidden_states takes 1.02 KB a token" in capsys.readouterr().err


def test_answers_are_chosen_by_a_reward_model(
    model: Path, talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three answers each; the reward model reads them, and the best and pairs are taken."""
    base, reward = tmp_path / "base", tmp_path / "reward"
    random_model("llama", VOCAB | {"pad_token_id": 0}).save_pretrained(base)
    classifier_folder(base, reward, ["reward"])
    save_tokenizer(reward)
    answers, rated = tmp_path / "answers", tmp_path / "rated"
    generating = [
        *("model=hf", f"model.path={model}", "dataset=files", f"dataset.path={talks}"),
        *("dataset.id_column=id", "prompt.user={{ q }}", "sampling=sample", "sampling.n=3"),
        *("sampling.max_new_tokens=6", "engine.kv_cache_gib=0.01", "engine.device=cpu"),
        *("dataset.limit=3", f"output.dir={answers}"),
    ]
    run(generating)
    reading = [
        *("model=hf", f"model.path={reward}", "dataset=job", f"dataset.path={answers}"),
        *("dataset.text_as=reply", "sampling.max_new_tokens=0", "engine.kv_cache_gib=0.01"),
        *("prompt.messages=[{user: '{{ q }}'}, {assistant: '{{ reply }}'}]", "engine.device=cpu"),
        *("output.columns=[class_scores,embedding]", f"output.dir={rated}"),
        "score.column=class_scores",
    ]
    run(reading)
    rows = table(rated).to_pylist()
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["q"], []).append(row["class_scores"][0])
    assert [len(each) for each in scores.values()] == [3, 3, 3]
    metrics = json.loads((rated / "metrics.json").read_text())
    mean = np.mean([row["class_scores"][0] for row in rows])
    assert f"{mean:.6g}"[:5] in json.dumps(metrics["score"])
    best = ["--by", "class_scores", "--dedupe", "q", "--columns", "q,class_scores"]
    best += ["--out", str(tmp_path / "best")]
    assert run_command(["select", str(rated), *best]) == 0
    chosen = table(tmp_path / "best").to_pylist()
    assert {row["q"]: row["class_scores"][0] for row in chosen} == {
        question: max(each) for question, each in scores.items()
    }
    pairs = ["--to", "dpo", "--by", "class_scores", "--across"]
    pairs += ["--out", str(tmp_path / "dpo.jsonl")]
    assert run_command(["export", str(rated), *pairs]) == 0
    lines = [json.loads(line) for line in (tmp_path / "dpo.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["score_chosen"] == max(scores[line["prompt"][0]["content"]])
        by_text = {row["reply"]: row["class_scores"][0] for row in rows}
        assert by_text[line["chosen"][0]["content"]] == line["score_chosen"]
    several = ["--by", "embedding", "--out", str(tmp_path / "none")]
    capsys.readouterr()
    assert run_command(["select", str(rated), *several]) == 2
    assert "name one of them, such as 'embedding[0]'" in capsys.readouterr().err
    vectors = np.array([row["embedding"] for row in rows], np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = np.sort((vectors @ vectors.T)[np.triu_indices(len(rows), 1)])
    bound = float(cosines[17:19].mean())  # half of the 36 pairs are nearer
    step = f"rows=[{{Dedupe: {{by: embedding, cosine: {bound}}}}}]"
    again = [a for a in generating if not a.startswith(("dataset", "output.dir", "sampling.n"))]
    again += ["dataset=job", f"dataset.path={rated}", step, f"output.dir={tmp_path / 'kept'}"]
    run(again)
    kept: list[int] = []
    for i, vector in enumerate(vectors):
        if all(vectors[j] @ vector < bound for j in kept):
            kept.append(i)
    found = table(tmp_path / "kept")["reply"].to_pylist()
    assert found == [rows[i]["reply"] for i in kept] and len(kept) < len(rows)
    # Its questions are the rows that the step has left, not those that the job read.
    assert JobFolderReader(tmp_path / "kept").questions == len(kept)
    assert (
        f"{len(kept)} questions, {len(kept)} answers" in (tmp_path / "kept/README.md").read_text()
    )
