"""Jobs with strategy=ar_spec: the rows of strategy=ar, what they cost, and every mistake."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import batchgen.conf
from batchgen import LLM, SamplingParams
from batchgen.cli.job_outcome import report
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer

COUNTS = ["num_forwards", "num_draft_tokens", "num_accepted_tokens"]
SPEC = ("strategy=ar_spec", "strategy.adaptive=false")
COLUMNS = "output.columns=[logprobs,step_map,draft_accepted]"


@pytest.fixture(scope="session")
def draft(tiny_model: Callable[..., Path]) -> Path:
    """A smaller model with the tokenizer of `model`."""
    folder = tiny_model("qwen3", num_hidden_layers=1, **VOCAB)
    save_tokenizer(folder)
    return folder


def table(folder: Path) -> pa.Table:
    return pq.read_table(folder / "data", partitioning=None)


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The data set, with a row that has no prompt, and the output of a job with strategy=ar."""
    tmp = tmp_path_factory.mktemp("plain")
    texts = ["abc abc abc abc", None, *("Say: " + "ab" * i for i in range(1, 6))]
    path = tmp / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"r{i}", "q": q}) + "\n" for i, q in enumerate(texts))
    )
    run(overrides(model, path, tmp / "ar", *LONG, "output.columns=[logprobs]"))
    return path, tmp / "ar"


LONG = ("sampling.max_new_tokens=24", "sampling.temperature=0.3", "engine.max_num_seqs=5")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [
        ("strategy.num_spec_tokens=5", "strategy.ngram_min=1"),
        ("strategy.proposer=draft", "strategy.draft_model={draft}"),
        ("strategy.proposer=draft", "strategy.draft_model={model}", "strategy.num_spec_tokens=2"),
    ],
    ids=["ngram", "draft", "the model itself"],
)
def test_the_rows_are_those_of_ar(
    plain: tuple[Path, Path], model: Path, draft: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    rows, ar = plain
    out = tmp_path / "out"
    given = [option.format(draft=draft, model=model) for option in options]
    result = run(overrides(model, rows, out, *LONG, *SPEC, *given, COLUMNS))
    assert result.exit_code == 3  # of the row without a prompt
    found, expected = table(out), table(ar)
    assert found.select(expected.column_names).equals(expected)
    names = found.column_names
    assert names[names.index("num_generated_tokens") + 1 :][:3] == COUNTS
    assert [found.schema.field(name).type for name in COUNTS] == [pa.int32()] * 3
    assert found.schema.field("draft_accepted").type == pa.list_(pa.bool_())
    for row in found.to_pylist():
        check_counts(row)
    check_totals(out, found, result.message)


def check_counts(row: dict[str, Any]) -> None:
    forwards, proposed, accepted = (row[name] for name in COUNTS)
    if row["error"] is not None:
        assert forwards is proposed is accepted is None
        assert row["draft_accepted"] == row["step_map"] == []
        return
    steps = row["step_map"]
    assert steps == sorted(steps) and set(steps) == set(range(1, forwards + 1))
    assert len(row["draft_accepted"]) == len(steps) == row["num_generated_tokens"]
    assert sum(row["draft_accepted"]) == accepted <= proposed


def check_totals(out: Path, found: pa.Table, message: str) -> None:
    """What metrics.json and the summary say is the sum of the rows."""
    sums = {name: sum(n for n in found[name].to_pylist() if n is not None) for name in COUNTS}
    assert 0 < sums["num_accepted_tokens"] <= sums["num_draft_tokens"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["counts"] == sums
    (attempt,) = metrics["attempts"]
    assert attempt["engine"]["counts"] == sums
    share = sums["num_accepted_tokens"] / sums["num_draft_tokens"]
    assert f"{sums['num_draft_tokens']:,} proposed, {share:.1%} accepted" in message
    assert f"{metrics['generated_tokens'] / sums['num_forwards']:.2f} of a row" in message
    assert ("of the drafts were accepted" in message) == (share < 0.2)


def test_the_output_loads_with_its_columns(
    plain: tuple[Path, Path], model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(overrides(model, plain[0], out, *LONG, *SPEC, "strategy.ngram_min=1", COLUMNS))
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.features["draft_accepted"].feature.dtype == "bool"
    assert loaded["draft_accepted"][:] == table(out)["draft_accepted"].to_pylist()
    assert any(any(accepted) for accepted in loaded["draft_accepted"])
    card = (out / "README.md").read_text()
    assert "| `draft_accepted` | `list<element: bool>` | [num_tokens] |" in card.replace(
        "item: bool", "element: bool"
    )
    assert "| `num_forwards` | `int32` |" in card


@pytest.mark.thorough
def test_a_broken_off_job_gives_the_same_tokens(
    plain: tuple[Path, Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ar = plain
    out = tmp_path / "out"
    arguments = overrides(model, rows, out, *LONG, "strategy=ar_spec", COLUMNS)
    finished = 0
    whole_step = LLMEngine.step

    def step(engine: LLMEngine) -> list[RequestOutput]:
        nonlocal finished
        if finished:
            raise RuntimeError("the power is gone")
        outputs = whole_step(engine)
        finished += len(outputs)
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "step", step)
        assert report(lambda: run(arguments)) == 1
    assert run(arguments).exit_code == 3
    first, second = json.loads((out / "metrics.json").read_text())["attempts"]
    assert second["rows_resumed"] == first["rows"] > 0 < second["rows"]
    for name in ("token_ids", "logprobs", "text"):
        assert table(out)[name].equals(table(ar)[name])


def test_another_draft_model_is_another_job(
    model: Path, draft: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "draft"
    shutil.copytree(draft, copied)
    options = ("strategy.proposer=draft", f"strategy.draft_model={copied}", "dataset.limit=1")
    arguments = overrides(model, rows, tmp_path / "out", *SPEC, *options)
    assert report(lambda: run(arguments)) == 0
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert report(lambda: run(arguments)) == 2
    told = "  draft_model: a different model, or its files have changed (fingerprint.draft_model: "
    assert told in capsys.readouterr().err


@pytest.mark.thorough
def test_a_job_whose_drafts_were_of_no_use_says_so(
    model: Path, draft: Path, rows: Path, tmp_path: Path
) -> None:
    options = ("strategy.proposer=draft", f"strategy.draft_model={draft}", "dataset.limit=3")
    arguments = [*SPEC, *options, "strategy.acceptance_floor=1"]
    found = run(overrides(model, rows, tmp_path / "few", *arguments))
    sentence = (
        "of the drafts were accepted, and strategy.acceptance_floor is 100.0%: use strategy=ar"
    )
    assert sentence in found.message.splitlines()[-1]
    again = run(overrides(model, rows, tmp_path / "few", *arguments))
    assert again.message.splitlines()[-1] == found.message.splitlines()[-1]
    none = run(overrides(model, rows, tmp_path / "none", *arguments, "sampling.max_new_tokens=1"))
    assert none.message.splitlines()[-1].startswith("No drafts were proposed: none would have")


@pytest.mark.parametrize(
    ("proposed", "accepted", "remark"),
    [
        (100, 20, None),
        (
            1000,
            199,
            "Only 19.9% of the drafts were accepted, and strategy.acceptance_floor is 20.0%: use "
            "strategy=ar, another proposer (strategy.proposer=draft with a draft model), or fewer "
            "drafts (strategy.num_spec_tokens).",
        ),
        (
            0,
            0,
            "No drafts were proposed: none would have saved time, or no text came twice. "
            "strategy=ar is as fast here.",
        ),
    ],
)
def test_remarks(proposed: int, accepted: int, remark: str | None) -> None:
    counts = dict(zip(COUNTS, (500, proposed, accepted), strict=True))
    assert ARSpecStrategy("ngram", acceptance_floor=0.2).remark(counts) == remark
    assert ARSpecStrategy("ngram", acceptance_floor=0.2).remark(dict.fromkeys(COUNTS, 0)) is None


def test_yaml_and_constructor_defaults_agree() -> None:
    path = Path(batchgen.conf.__file__).parent / "strategy" / "ar_spec.yaml"
    values = yaml.safe_load(path.read_text())
    del values["_target_"]
    parameters = inspect.signature(ARSpecStrategy).parameters
    assert values == {name: parameter.default for name, parameter in parameters.items()}


DRAFT = "strategy.proposer=draft"
MISTAKES: list[tuple[str, list[str], str]] = [
    (
        "proposer",
        ["strategy.proposer=x"],
        "strategy.proposer must be one of ngram, draft, mtp, got",
    ),
    (
        "no head",
        ["strategy.proposer=mtp"],
        "strategy.proposer=mtp needs a head that the model comes",
    ),
    ("text", ["strategy.num_spec_tokens=abc"], "strategy.num_spec_tokens must be an integer, got"),
    ("range", ["strategy.num_spec_tokens=8"], "strategy: num_spec_tokens must be 1 to 7, got 8"),
    ("number", ["strategy.adaptive=1"], "strategy.adaptive must be true or false, got 1"),
    ("bool", ["strategy.acceptance_floor=true"], "strategy.acceptance_floor must be a number, got"),
    ("floor", ["strategy.acceptance_floor=2"], "acceptance_floor must be from 0 to 1, got 2.0"),
    ("ngram", ["strategy.ngram_min=5"], "ngram_min must be 1 to ngram_max, got 5"),
    ("key", ["+strategy.ngram=5"], "strategy.ngram is not a key: choose among proposer, num_spec"),
    ("key of ar", ["strategy=ar", "+strategy.k=5"], "strategy.k is not a key: there are none"),
    ("verifier", ["strategy.verifier=rejection"], "strategy: verifier rejection needs adaptive"),
    ("not draft", ["strategy.draft_model=x"], "draft_model is set, but proposer is ngram"),
    ("a number", [DRAFT, "strategy.draft_model=1"], "strategy.draft_model must be a string, got 1"),
    ("no model", [DRAFT], "strategy.draft_model is null, but strategy.proposer is draft: set"),
    (
        "no such model",
        [DRAFT, "strategy.draft_model=no/such/model"],
        "strategy.draft_model: model no/such/model does not exist",
    ),
    (
        "size of the vocabulary",
        [DRAFT, "strategy.draft_model={tmp}/small"],
        "the vocabulary of {tmp}/small has 128 ids and the model's has 257: choose a draft model",
    ),
    (
        "another vocabulary",
        [DRAFT, "strategy.draft_model={tmp}/other"],
        "the tokenizer of {tmp}/other is not the model's ('!' is no token there and id 0 here): ",
    ),
    (
        "positions",
        [DRAFT, "strategy.draft_model={tmp}/short"],
        "has positions for 100 tokens, and a row may get 256: set engine.max_model_len to 100 or",
    ),
]


@pytest.fixture(scope="module")
def drafts(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with draft models that do not go with `model`."""
    tmp = tmp_path_factory.mktemp("drafts")
    shutil.copytree(tiny_model("llama"), tmp / "small")
    shutil.copytree(tiny_model("qwen3", num_hidden_layers=1, **VOCAB), tmp / "other")
    save_tokenizer(tmp / "other", first="zz")
    shutil.copytree(tiny_model("llama", max_position_embeddings=100, **VOCAB), tmp / "short")
    return tmp


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("given", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistakes_come_before_the_weights(
    drafts: Path,
    model: Path,
    rows: Path,
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [text.replace("{tmp}", str(drafts)) for text in given]
    out = rows.parent / "out"
    code = report(lambda: run(overrides(model, rows, out, "strategy=ar_spec", *filled)))
    errors = capsys.readouterr().err
    assert code == 2, errors
    assert message.replace("{tmp}", str(drafts)) in errors and "Traceback" not in errors
    assert not out.exists()


@pytest.mark.thorough
def test_a_draft_model_without_positions_serves_shorter_rows(
    drafts: Path, model: Path, rows: Path, tmp_path: Path
) -> None:
    options = (DRAFT, f"strategy.draft_model={drafts}/short", "engine.max_model_len=100")
    assert run(overrides(model, rows, tmp_path / "out", *SPEC, *options)).exit_code == 0


def test_the_python_interface_takes_a_strategy(model: Path, draft: Path) -> None:
    params = SamplingParams(max_new_tokens=20, columns=("draft_accepted",))
    config = EngineConfig(kv_cache_gib=0.01)
    strategy = ARSpecStrategy("draft", draft_model=str(draft), adaptive=False)
    # One after the other from one object, each with rows of its own.
    outputs = [
        LLM(str(model), strategy=strategy, config=config).generate(["ab ab", "x"], params)
        for _ in range(2)
    ]
    expected = LLM(str(model), config=config).generate(
        ["ab ab", "x"], SamplingParams(max_new_tokens=20)
    )
    for found in outputs:
        assert [o.token_ids for (o,) in found] == [o.token_ids for (o,) in expected]
        assert all(o.counts["num_draft_tokens"] > 0 for (o,) in found)
    one, two = ([o.counts["num_accepted_tokens"] for (o,) in found] for found in outputs)
    assert one == two
    with pytest.raises(ConfigError, match=r"strategy\.draft_model is null"):
        LLM(str(model), strategy=ARSpecStrategy("draft"))
