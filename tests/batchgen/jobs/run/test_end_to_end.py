"""The whole path with a real (tiny) model: files in, Parquet out, and every mistake on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen import LLM, SamplingParams
from batchgen.api.python.call_prompts import PromptIds, ReadPrompt
from batchgen.cli.job_outcome import report
from batchgen.engine.request_params import derive_seed
from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import ROWS, contents, overrides, run


@pytest.mark.thorough
def test_rows_are_those_of_the_python_interface(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    columns = "output.columns=[logprobs,top_logprobs,prompt_token_ids]"
    result = run(overrides(model, rows, out, columns, "output.top_logprobs=3"))
    assert result.exit_code == 0
    table = pq.read_table(out / "data")
    assert [p.name for p in sorted((out / "data").iterdir())] == [
        f"part-0000{i}.parquet" for i in range(3)
    ]
    llm = LLM(str(model), device="cpu")
    params = SamplingParams(
        temperature=0.7, top_p=0.95, max_new_tokens=12, logprobs=True, top_logprobs=3
    )
    ids = PromptIds(llm.tokenizer, {})
    for i, found in enumerate(table.to_pylist()):
        row, sample = ROWS[i // 2], i % 2
        assert (found["row_id"], found["row_index"], found["sample_index"]) == (
            row["id"], i // 2, sample,
        )  # fmt: skip
        assert found["q"] == row["q"]
        chat = [{"role": "user", "content": row["q"]}]
        seeded = params.replace(seed=derive_seed(3, row["id"], sample)).request
        prompt, _ = ids.of(ReadPrompt.of(chat))
        llm.engine.add_request("x", prompt, seeded)
        (expected,) = [o for _ in range(13) for o in llm.engine.step()]
        assert found["prompt_token_ids"] == expected.prompt_token_ids
        assert found["token_ids"] == expected.token_ids
        assert found["text"] == expected.text
        assert found["finish_reason"] == expected.finish_reason
        assert found["logprobs"] == expected.columns["logprobs"].tolist()
        assert found["top_logprobs"] == expected.columns["top_logprobs"].tolist()
        assert found["top_logprob_ids"] == expected.columns["top_logprob_ids"].tolist()
        assert found["num_generated_tokens"] == len(expected.token_ids)


def test_the_engine_settings_do_not_change_a_byte(model: Path, rows: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(overrides(model, rows, one, "output.columns=[logprobs]"))
    small = ("engine.max_num_seqs=3", "engine.max_batched_tokens=16", "engine.block_size=4")
    run(overrides(model, rows, two, "output.columns=[logprobs]", *small))
    assert {k: v for k, v in contents(one).items() if k.startswith("data")} == {
        k: v for k, v in contents(two).items() if k.startswith("data")
    }


@pytest.mark.quick(1, thorough=2)
@pytest.mark.parametrize("shape", ["dataset.streaming=false", "dataset.streaming=true"])
@pytest.mark.parametrize("per_shard", [4, 11, 100])
def test_a_complete_job_run_again_computes_nothing(
    model: Path, rows: Path, tmp_path: Path, shape: str, per_shard: int
) -> None:
    arguments = [*overrides(model, rows, tmp_path / "out"), shape]
    arguments = [*arguments, f"output.rows_per_shard={per_shard}"]
    run(arguments)
    before = contents(tmp_path / "out")
    again = run(arguments)
    assert again.exit_code == 0 and "complete already" in again.message
    assert contents(tmp_path / "out") == before


def test_bad_rows_are_error_rows_and_the_others_go_on(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    bad = [{"id": "long", "q": "x" * 300}, {"id": "none", "q": None}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in [ROWS[0], *bad, ROWS[1]]))
    result = run(overrides(model, rows, tmp_path / "out"))
    assert result.exit_code == 3
    table = pq.read_table(tmp_path / "out" / "data").to_pylist()
    kinds = [row["error"] and row["error"]["type"] for row in table]
    long, none = ["prompt_too_long"] * 2, ["missing_field"] * 2
    assert kinds == [None, None, *long, *none, None, None]
    assert [row["finish_reason"] == "error" for row in table] == [k is not None for k in kinds]


@pytest.mark.thorough
def test_moved_files_and_a_moved_model_go_on(model: Path, rows: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run([*overrides(model, rows, one), "dataset.limit=5"])
    moved = shutil.copytree(model, tmp_path / "moved model")
    renamed = rows.rename(tmp_path / "renamed.jsonl")
    result = run(overrides(moved, renamed, one))
    assert (
        result.exit_code == 0
        and "answers           11 questions, 22 answers (10 from before)" in result.message
    )
    run(overrides(model, renamed, two))
    assert {k: v for k, v in contents(one).items() if k.startswith("data")} == {
        k: v for k, v in contents(two).items() if k.startswith("data")
    }
    (entry,) = json.loads((one / "manifest.json").read_text())["history"]
    changed = [line.split(":")[0] for line in entry["changed"]]
    assert changed == ["dataset.path", "dataset.limit", "model.path", "dataset rows"]
    assert entry["rows"] == 10 and entry["versions"]["torch"]
    (moved / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match=r"fingerprint\.model: "):
        run(overrides(moved, renamed, one))


MISTAKES: list[tuple[str, list[str], str]] = [
    ("no model", ["model.path=nowhere/at/all"], "model nowhere/at/all does not exist"),
    (
        "model is no model",
        ["model.path={tmp}"],
        "is neither a .gguf file nor a folder with a config.json",
    ),
    ("model file", ["model.path={tmp}/rows.jsonl"], "is a file but not a .gguf file"),
    ("package", ["model.path=package://no_such_package/m.gguf"], "no_such_package"),
    ("package file", ["model.path=package://yaml/m.gguf"], "m.gguf"),
    ("gguf garbage", ["model.path={tmp}/bad.gguf"], "bad.gguf"),
    ("architecture", ["model.path={tmp}/alien"], "architecture 'AlienForCausalLM'"),
    ("config garbage", ["model.path={tmp}/garbage"], "garbage"),
    ("no weights", ["model.path={tmp}/weightless"], "weightless has no weights"),
    ("tokenizer garbage", ["model.path={tmp}/badtok"], "its tokenizer cannot be loaded"),
    ("revision", ["model.revision=main"], "needs a hub name"),
    ("load format", ["model.load_format=gguf"], "load_format is gguf, but"),
    ("remote code", ["model.trust_remote_code=true"], "model.trust_remote_code must be false"),
    ("dtype", ["model.dtype=int8"], "model.dtype must be one of"),
    ("no rows", ["dataset.path={tmp}/missing.jsonl"], "missing.jsonl"),
    ("json", ["dataset.path={tmp}/broken.jsonl"], "broken.jsonl"),
    ("format", ["dataset.path={tmp}/rows.pdf"], "rows.pdf"),
    ("id column", ["dataset.id_column=nope"], "nope"),
    ("duplicate ids", ["dataset.path={tmp}/twice.jsonl"], "twice"),
    ("columns", ["dataset.columns=[nope]"], "no column 'nope'"),
    ("limit", ["dataset.limit=0"], "dataset.limit must be"),
    ("name clash", ["dataset.path={tmp}/clash.jsonl"], "'text'"),
    ("template", ["prompt.user='{{ q'"], "prompt.user"),
    ("variable", ["prompt.user='{{ nope }}'"], "nope"),
    ("column of ids", ["prompt=tokens"], "token_ids"),
    ("template options", ["prompt.template_kwargs={tokenize:true}"], "tokenize"),
    ("temperature", ["sampling.temperature=-1"], "temperature must be at least 0"),
    ("top_p", ["sampling.top_p=0"], "top_p must be above 0"),
    ("min tokens", ["sampling.min_new_tokens=13"], "min_new_tokens must be <= max_new_tokens"),
    ("no room", ["sampling.max_new_tokens=5000"], "leaves no room"),
    ("stop id", ["sampling.stop_token_ids=[999]"], "stop_token_ids [999] are not in"),
    ("samples", ["sampling.n=0"], "sampling.n must be at least 1"),
    ("length", ["engine.max_model_len=9999"], "the model has positions for"),
    ("memory", ["engine.kv_cache_gib=0.0000001"], "raise kv_cache_gib"),
    ("block", ["engine.block_size=3"], "engine.block_size must be a power of 2"),
    ("cuda", ["engine.device=cuda"], "PyTorch sees no GPU"),
    (
        "column of another strategy",
        ["output.columns=[step_map]"],
        "output.columns has no column 'step_map' with strategy ar: it comes with strategy=ar_spec,",
    ),
    ("column", ["output.columns=[nope]"], "'nope' with strategy ar: choose among logprobs, top_"),
    ("top", ["output.columns=[top_logprobs]", "output.top_logprobs=101"], "top_logprobs"),
    ("strategy", ["strategy._target_=batchgen.nope.Strategy"], "strategy"),
    ("no strategy", ["strategy._target_=os.getcwd"], "os.getcwd is not a Strategy"),
    ("another job", ["sampling.seed=4"], "sampling.seed: 3 → 4"),
]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a complete job in `out` and things that can be got wrong beside it."""
    tmp = tmp_path_factory.mktemp("mistakes")
    good = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp / "rows.jsonl").write_text(good)
    (tmp / "rows.pdf").write_text(good)
    (tmp / "broken.jsonl").write_text(good + '{"id": "x", "q": \n')
    (tmp / "twice.jsonl").write_text(good + json.dumps({**ROWS[0], "id": "twice"}) * 1 + "\n" +
                                     json.dumps({**ROWS[0], "id": "twice"}) + "\n")  # fmt: skip
    (tmp / "clash.jsonl").write_text(json.dumps({**ROWS[0], "text": "mine"}) + "\n")
    (tmp / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    config = json.loads((model / "config.json").read_text())
    for name, text in (
        ("alien", json.dumps({**config, "architectures": ["AlienForCausalLM"]})),
        ("garbage", "{"),
        ("weightless", json.dumps(config)),
        ("badtok", json.dumps(config)),
    ):
        (tmp / name).mkdir()
        (tmp / name / "config.json").write_text(text)
        for part in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (tmp / name / part).write_text((model / part).read_text())
    (tmp / "badtok" / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    run(overrides(model, tmp / "rows.jsonl", tmp / "out"))
    return tmp, contents(tmp / "out")


@pytest.mark.quick(2, thorough=15)
@pytest.mark.parametrize(
    ("given", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistakes_have_a_message_and_harm_nothing(
    finished: tuple[Path, dict[str, str]],
    model: Path,
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tmp, before = finished
    # The engine is built only when rows are to be computed: what shows there needs another folder.
    out = tmp / ("other" if "kv_cache_gib" in given[0] else "out")
    filled = [text.replace("{tmp}", str(tmp)) for text in given]
    arguments = overrides(model, tmp / "rows.jsonl", out, *filled)
    if "prompt=tokens" in given:
        arguments = [a for a in arguments if not a.startswith("prompt.user")]
    code = report(lambda: run(arguments))
    errors = capsys.readouterr().err
    assert code == 2, errors
    assert message in errors and "Traceback" not in errors
    assert errors.startswith("batchgen: ")
    assert contents(tmp / "out") == before


def test_a_job_that_could_not_start_starts_after_the_mistake_is_mended(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = overrides(model, rows, out)
    assert report(lambda: run([*arguments, "engine.kv_cache_gib=0.0000001"])) == 2
    result: Any = run(arguments)
    assert result.exit_code == 0 and pq.read_table(out / "data").num_rows == 22
