"""Jobs whose rows have adapters: one for all, one by a column, or each with each of several."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from batchgen.__main__ import run_command
from batchgen.cli.verbs import compare, score
from batchgen.inputs.model.model_adapters import with_adapters
from batchgen.inputs.model.open_model import open_model
from batchgen.pipelines.trace.job_traces import JobTraces
from batchgen.pipelines.trace.traced import Trace, TracedAnswers
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from tests.support.engine.lora_files import merge, write_adapter
from tests.support.jobs.forked import Forked
from tests.support.jobs.real_job import contents, overrides, run


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, model, seed=seed, strength=0.2)
        for seed, name in enumerate(("one", "two"))
    }


def answers(out: Path) -> dict[tuple[str, int], Any]:
    """The tokens of each answer by the row's id and the sample."""
    rows = JobFolderReader(out).rows(["row_id", "sample_index", "token_ids"])
    return {(row["row_id"], row["sample_index"]): row["token_ids"] for row in rows}


def by_adapter(out: Path) -> dict[str, dict[tuple[str, int], Any]]:
    columns = ["row_id", "sample_index", "token_ids", "adapter"]
    found: dict[str, dict[tuple[str, int], Any]] = {}
    for row in JobFolderReader(out).rows(columns):
        key = row["row_id"], row["sample_index"]
        assert key not in found.setdefault(row["adapter"], {})
        found[row["adapter"]][key] = row["token_ids"]
    return found


def grid(adapters: dict[str, Path]) -> list[str]:
    return [f"model.lora=[{adapters['one']},base,{adapters['two']}]", "model.lora_grid=true"]


@pytest.mark.thorough
def test_a_grid_is_each_adapter_by_itself(
    model: Path, rows: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The answers of an adapter in a grid are those of a job of it alone, with the same seeds, and
    of the model that it is merged into."""
    run(overrides(model, rows, tmp_path / "grid", *grid(adapters), "dataset.limit=3"))
    assert len(by_adapter(tmp_path / "grid")["one"]) == 3 * 2
    run(overrides(model, rows, tmp_path / "grid", *grid(adapters)))  # it grows
    found = by_adapter(tmp_path / "grid")
    assert list(found) == ["one", "base", "two"]
    run(overrides(model, rows, tmp_path / "base"))
    assert found["base"] == answers(tmp_path / "base")
    run(overrides(model, rows, tmp_path / "one", f"model.lora={adapters['one']}"))
    assert found["one"] == answers(tmp_path / "one") != found["base"]
    merged = merge(model, adapters["two"], tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, merged)
    run(overrides(merged, rows, tmp_path / "two"))
    assert found["two"] == answers(tmp_path / "two")
    run(overrides(model, rows, tmp_path / "slots", *grid(adapters), "engine.lora_slots=1"))
    assert by_adapter(tmp_path / "slots") == found
    before = contents(tmp_path / "grid")
    result = run(overrides(model, rows, tmp_path / "grid", *grid(adapters)))
    assert "nothing was computed" in str(result)
    assert contents(tmp_path / "grid") == before


@pytest.mark.thorough
def test_a_grid_that_is_killed_goes_on(
    model: Path, rows: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Its files are those of a job that ran undisturbed, to the byte."""
    how = [*grid(adapters), "engine.lora_slots=1", "engine.max_num_seqs=4", "dataset.limit=7"]
    run(overrides(model, rows, tmp_path / "whole", *how))
    line = overrides(model, rows, tmp_path / "out", *how)
    for count in (1, 2):
        job = Forked("batchgen", line)
        deadline = time.monotonic() + 300
        journal = tmp_path / "out" / "journal"
        while job.poll() is None and time.monotonic() < deadline:
            written = [file.stat().st_size for file in journal.glob("*.journal")]
            if sum(written) > 1000 or len(list((tmp_path / "out/data").glob("*"))) >= count:
                break
            time.sleep(0.02)
        job.send_signal(signal.SIGKILL)
        while job.poll() is None:
            time.sleep(0.02)
        assert job.returncode == -signal.SIGKILL, "it was killed while it ran"
    run(line)
    assert contents(tmp_path / "out/data") == contents(tmp_path / "whole/data")


def test_the_plan_counts_the_memory_of_adapters(model: Path, adapters: dict[str, Path]) -> None:
    opened = open_model(str(model), None, "auto")
    given = {name: str(path) for name, path in adapters.items()}
    beside, alone = with_adapters(opened, given), opened.load("float32", "cpu")
    loaded = beside.load("float32", "cpu")
    assert loaded.lora is not None
    assert loaded.weight_bytes - alone.weight_bytes == loaded.lora.num_bytes
    assert loaded.lora.num_bytes == beside.adapter_bytes(alone, 1, on_cpu=True) > 0
    folded = with_adapters(opened, given["one"], fold=True)
    assert folded.adapter_bytes(alone, None, on_cpu=True) == 0


def test_a_column_names_each_row_s_adapter(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    names = ["one", "base", "two", "three", None, "one"]
    lines = [{"id": f"r{i}", "q": f"What is {i}?", "which": name} for i, name in enumerate(names)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lora = f"model.lora={{one: {adapters['one']}, two: {adapters['two']}, base: base}}"
    run(overrides(model, rows, tmp_path / "out", lora, "model.lora_column=which"))
    columns = ["row_id", "error", "which", "sample_index"]
    found = list(JobFolderReader(tmp_path / "out").rows(columns))
    errors = {row["row_id"]: row["error"] for row in found}
    assert [row_id for row_id, error in errors.items() if error is not None] == ["r3", "r4"]
    assert errors["r3"]["type"] == "unknown_adapter"
    assert (
        "must name an adapter of model.lora (one, two, base), got 'three'"
        in (errors["r3"]["message"])
    )
    run(overrides(model, rows, tmp_path / "grid", lora, "model.lora_grid=true"))
    of_grid = by_adapter(tmp_path / "grid")
    mine = answers(tmp_path / "out")
    for i, name in enumerate(names):
        if name in of_grid:
            assert mine[f"r{i}", 1] == of_grid[name][f"r{i}", 1]


def test_a_job_with_another_adapter_is_another_job(
    model: Path, rows: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(overrides(model, rows, out, f"model.lora={adapters['one']}", "dataset.limit=2"))
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["fingerprints"]["adapter"]) > 16
    moved = shutil.copytree(adapters["one"], tmp_path / "moved")
    result = run(overrides(model, rows, out, f"model.lora={moved}", "dataset.limit=2"))
    assert "nothing was computed" in str(result)  # the same adapter in another folder
    for other in ([], [f"model.lora={adapters['two']}"], grid(adapters)):
        with pytest.raises(ConfigError, match=r"adapter"):
            run(overrides(model, rows, out, *other, "dataset.limit=2"))


@pytest.mark.thorough
def test_rows_of_older_jobs_are_taken_adapter_by_adapter(
    model: Path, rows: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """A grid copies what jobs of the model alone and of one adapter have computed."""
    run(overrides(model, rows, tmp_path / "base", "output.reuse=[]"))
    one = f"model.lora={adapters['one']}"
    run(overrides(model, rows, tmp_path / "one", one, "output.reuse=[]"))
    reuse = f"output.reuse=[{tmp_path / 'base'},{tmp_path / 'one'}]"
    run(overrides(model, rows, tmp_path / "grid", *grid(adapters), reuse))
    metrics = json.loads((tmp_path / "grid" / "metrics.json").read_text())
    assert metrics["rows_copied"] == 2 * 11 * 2 and metrics["rows"] == 3 * 11 * 2
    run(overrides(model, rows, tmp_path / "again", *grid(adapters)))
    assert by_adapter(tmp_path / "again") == by_adapter(tmp_path / "grid")


@pytest.mark.thorough
def test_another_job_reads_the_rows_of_each_adapter(
    model: Path, rows: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Its rows are known by adapter and id, and one that is traced leads to its adapter's."""
    out = tmp_path / "grid"
    run(overrides(model, rows, out, *grid(adapters), "dataset.limit=3"))
    names = ["adapter", "row_id", "sample_index", "text"]
    of_grid = {tuple(row[n] for n in names[:3]): row for row in JobFolderReader(out).rows(names)}

    def read(name: str, *more: str) -> list[dict[str, Any]]:
        given = [
            each
            for each in overrides(model, rows, tmp_path / name)
            if not each.startswith(("dataset", "prompt", "sampling"))
        ]
        prompt = ["prompt.user='Judge {{ text }}'", "sampling=greedy", "sampling.max_new_tokens=2"]
        run([*given, *prompt, "dataset=job", f"dataset.path={out}", *more])
        return list(JobFolderReader(tmp_path / name).rows(["row_id", "adapter", "source"]))

    found = read("samples")
    keys = {(row["adapter"], *row["row_id"].split("/")[1].split("#")) for row in found}
    assert keys == {(name, row, str(sample)) for name, row, sample in of_grid}
    assert len(found) == len(of_grid) == 18
    assert all(row["row_id"].startswith(row["adapter"] + "/") for row in found)
    lists = read("lists", "dataset.rows=rows")
    assert sorted(row["row_id"] for row in lists) == sorted(
        f"{name}/r{i}" for name in ("one", "base", "two") for i in range(3)
    )
    where = read("where", "dataset.where='adapter == \"two\"'")
    assert {row["adapter"] for row in where} == {"two"} and len(where) == 6
    trace = Trace([])
    JobTraces(str(tmp_path / "samples")).add(trace, "two/r1#1")
    _, upstream = (each for each in trace.origins if isinstance(each, TracedAnswers))
    assert [row["text"] for row in upstream.rows] == [of_grid["two", "r1", 1]["text"]]


@pytest.mark.thorough
def test_adapters_have_scores_of_their_own(
    model: Path,
    rows: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    shown = "output.report=true"
    post = "post=[{Extract: {methods: [last_number]}},{Grade: {target: id, method: exact}}]"
    result = run(overrides(model, rows, out, *grid(adapters), post, shown))
    assert all(f"score {name}" in str(result) for name in ("one", "base", "two"))
    metrics = json.loads((out / "metrics.json").read_text())
    assert list(metrics["adapter_scores"]) == ["one", "base", "two"] and "score" not in metrics
    assert all(found["questions"] == 11 for found in metrics["adapter_scores"].values())
    page = (out / "report.html").read_text()
    assert "Adapters" in page and all(f">{name}<" in page for name in ("one", "base", "two"))
    capsys.readouterr()
    assert score.main([str(out)]) == 0
    assert "score two" in capsys.readouterr().out
    assert score.main([str(out), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["adapters"]) == ["one", "base", "two"]
    assert compare.main([str(out), "--by", "adapter"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("one", "base", "two")) and "11" in text
    assert compare.main([str(out), str(out)]) == 2
    assert "compare them with --by adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["model.lora=[{one},{two}]"], "model.lora has 2 adapters (one, two): choose one per row"),
        (["model.lora_grid=true"], "model.lora_grid chooses among adapters, but model.lora names"),
        (["model.lora_column=id"], "model.lora_column chooses among adapters"),
        (["model.lora=base"], "model.lora is base, the model without an adapter: leave it out"),
        (["model.lora=[{one}]", "model.lora_grid=true", "model.lora_column=id"], "choose one of"),
        (["model.lora=[{one},base]", "model.lora_column=which"], "has no column"),
        (["model.lora_fold=true"], "model.lora_fold adds one adapter to the weights"),
        (["model.lora=[{one},{two}]", "model.lora_grid=true", "model.lora_fold=true"], "adds one"),
        (["model.lora={one}", "model.lora_fold=true", "model.quantization=fp8"], "of 16 or 32"),
        (["model.lora_template=adapter"], "model.lora_template=adapter takes the tokenizer"),
        (
            ["model.lora=[{one},{two}]", "model.lora_grid=true", "model.lora_template=adapter"],
            "model.lora_template=adapter takes the tokenizer and chat template of the only",
        ),
        (["engine.lora_slots=2"], "engine: lora_slots is 2, which is for adapters that are"),
        (
            ["model.lora={one}", "model.lora_fold=true", "engine.lora_slots=1"],
            "but the adapter is added to the weights: set it to null",
        ),
        (["engine.lora_slots=0"], "engine.lora_slots must be at least 1, got 0"),
        (["model.lora=nowhere"], "adapter nowhere: nowhere does not exist"),
    ],
)
def test_what_is_refused_before_weights_load(
    given: list[str],
    says: str,
    model: Path,
    rows: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    paths = {name: str(path) for name, path in adapters.items()}
    arguments = [
        argument.replace("{one}", paths["one"]).replace("{two}", paths["two"]) for argument in given
    ]
    with pytest.raises(ConfigError) as error:
        run(overrides(model, rows, tmp_path / "out", *arguments))
    assert says in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_set_with_rows_of_several_adapters_is_audited(
    model: Path, rows: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    run(overrides(model, rows, tmp_path / "grid", *grid(adapters), "dataset.limit=3"))
    out = tmp_path / "set"
    assert run_command(["select", str(tmp_path / "grid"), "--out", str(out)]) == 0
    assert run_command(["audit", str(out), "--rows", "99"]) == 0
    few = ["--where", "adapter == 'two'", "--columns", "text", "--out", str(tmp_path / "few")]
    assert run_command(["select", str(tmp_path / "grid"), *few]) == 0
    assert run_command(["audit", str(tmp_path / "few"), "--rows", "99"]) == 0
