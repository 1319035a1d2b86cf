"""A row leads back to the row of the data set that it was made of, or to what has dropped it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.storage.folder.export_record import ExportEntry, ExportRecord
from batchgen.storage.folder.pipeline_record import PipelineRecord
from tests.support.engine.lora_files import write_adapter
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.real_job import ROWS, overrides, run

ARMS = ("one", "base", "two")
GRADED = ["post=[{_target_: batchgen.grading.extract.Extract, methods: [whole]},"
          "{_target_: batchgen.grading.grade.Grade, method: exact, target: q}]"]  # fmt: skip


@pytest.fixture(scope="module")
def top(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft whose rows a step chooses, a judge that reads some of its answers, and a set."""
    top = tmp_path_factory.mktemp("trace")
    for part in (0, 1):
        lines = [json.dumps(row) + "\n" for row in ROWS[part * 6 : part * 6 + 6]]
        (top / f"rows-{part}.jsonl").write_text("".join(lines))
    steps = "rows=[{Filter: {where: id != 'r3'}}]"
    run(overrides(model, top / "rows-*.jsonl", top / "draft", steps, *GRADED))
    common = overrides(model, top, top / "judge", "prompt.user='{{ reply }}'", *GRADED)
    kept = [one for one in common if not one.startswith("dataset")]
    where = "dataset.where=sample_index == 1 and mark == 0"
    given = ["dataset=job", f"dataset.path={top}/draft", "dataset.text_as=reply", where]
    run([*given, *kept, "sampling.n=1"])
    select = ["select", f"{top}/judge", "--where", "row_id != 'r5#1'", "--out", f"{top}/set"]
    assert run_command(select) == 0
    return top


def trace(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    code = run_command(["trace", *map(str, arguments), "--json"])
    read = capsys.readouterr()
    assert code in (0, 1), read.err
    found: list[dict[str, Any]] = json.loads(read.out)
    assert code == (found[0]["kind"] == "dropped")
    return found


def test_from_a_set_back_to_the_file(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row_id = pq.read_table(top / "set" / "data")["id"].to_pylist()[-1]
    found = trace(capsys, top / "set", row_id)
    assert [one["kind"] for one in found] == ["set", "answers", "answers", "data set"]
    judge, draft, source = found[1:]
    name = judge["rows"][0]["row_id"].removesuffix("#1")
    assert row_id == f"{name}#1#0" or row_id == f"{name}#1"
    assert judge["grades"][0]["mark"] is not None and judge["job"] == str(top / "judge")
    assert draft["rows"][0]["row_id"] == name and draft["rows"][0]["sample_index"] == 1
    assert draft["rows"][0]["text"] == judge["rows"][0]["reply"]
    assert draft["steps"] == ["Filter"] and draft["grades"][0]["mark"] == 0
    number = next(i for i, one in enumerate(ROWS) if one["id"] == name)
    assert source["row_index"] == number
    assert source["file"] == str(top / f"rows-{number // 6}.jsonl")
    assert source["row_in_file"] == number % 6
    assert run_command(["trace", str(top / "set"), row_id]) == 0
    text = capsys.readouterr().out
    assert f"{top}/judge\n" in text and f"{top}/draft, passed Filter\n" in text
    assert "grades.mark" in text and f"row {number} (counted from 0)" in text


def test_what_has_dropped_a_row(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (by_step,) = trace(capsys, top / "draft", "r3")
    assert by_step["by"] == "rows[0] Filter" and by_step["row_id"] == "r3"
    (further_up,) = trace(capsys, top / "judge", "r3#1")
    assert further_up == by_step
    (by_where,) = trace(capsys, top / "judge", "r4#0")
    assert by_where["by"].startswith("dataset.where=")
    assert "sample_index is 0" in by_where["reason"]
    (by_select,) = trace(capsys, top / "set", "r5#1#0")
    assert (by_select["by"], by_select["reason"]) == (
        "--where row_id != 'r5#1'",
        "row_id is 'r5#1'",
    )
    assert run_command(["trace", str(top / "draft"), "r3"]) == 1
    assert "dropped by rows[0] Filter: " in capsys.readouterr().out
    for folder, unknown in (("draft", "r99"), ("judge", "r99#1"), ("judge", "r4"), ("set", "x")):
        assert run_command(["trace", str(top / folder), unknown]) == 2
        assert unknown.partition("#")[0] in capsys.readouterr().err


def test_a_copy_finds_the_jobs_beside_it(
    top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(top, copy)
    config = yaml.safe_load((copy / "judge" / "config.yaml").read_text())
    config["dataset"]["path"] = "elsewhere/draft"
    (copy / "judge" / "config.yaml").write_text(yaml.safe_dump(config))
    assert [one.get("job") for one in trace(capsys, copy / "judge", "r4#1")][:2] == [
        str(copy / "judge"),
        str(copy.resolve() / "draft"),
    ]
    shutil.rmtree(copy / "draft")
    assert run_command(["trace", str(copy / "judge"), "r4#1"]) == 2
    assert "draft" in capsys.readouterr().err


@pytest.mark.quick(2, thorough=3)
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("sft", ["--messages", "[{user: '{{ q }}'}, {assistant: '{{ reply }}'}]"]),
        ("kto", ["--label", "mark == 0"]),
        ("dpo", ["--by", "sample_index", "--gap", "1"]),
        ("grpo", ["--answer", "q"]),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "folder"])
def test_lines_of_exported_files(
    to: str, options: list[str], form: str, top: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A file that says how it was made is made again up to the line."""
    of = top / ("judge" if to == "sft" else "draft")
    file = tmp_path / ("out" if form == "folder" else f"out.{form}")
    assert run_command(["export", str(of), "--to", to, *options, "--out", str(file)]) == 0
    capsys.readouterr()
    line, *answers = trace(capsys, file, "--line", 3)
    assert (line["kind"], line["line"]) == ("line", 3)
    first = [one for one in answers if one["kind"] == "answers" and one["job"] == str(of)]
    content = line["content"]
    texts = [one["rows"][0]["reply" if to == "sft" else "text"] for one in first]
    if to == "sft":
        assert content["messages"][-1]["content"] in texts
    elif to == "kto":
        assert content["completion"][-1]["content"] in texts
    elif to == "dpo":
        answer = {content[name][-1]["content"] for name in ("chosen", "rejected")}
        assert answer == set(texts)
        assert [one["rows"][0]["sample_index"] for one in first] == [1, 0]
    else:
        assert {one["rows"][0]["row_id"] for one in first} == {content["row_id"]}
    assert answers[-1]["kind"] == "data set"


def test_a_line_that_cannot_be_traced_is_refused(
    top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"messages": [{"role": "assistant", "content": "of nobody"}]}\n[1]\n{')
    draft = str(top / "draft")
    for arguments, says in (
        (["--line", "1"], "name the job or the set with --of OUT"),
        (["--line", "1", "--of", draft], "does not say how it was made"),
        (["--line", "2", "--of", draft], "has no line 2"),
        (["--line", "3", "--of", draft], "is not JSON"),
        (["--line", "9", "--of", draft], "has no line 9"),
        (["--line", "9" * 20, "--of", draft], "has no line 9"),
        (["--line", "0", "--of", draft], "counted from 1"),
        ([], "name a line of it with --line N"),
    ):
        assert run_command(["trace", str(file), *arguments]) == 2
        assert says in capsys.readouterr().err
    assert run_command(["trace", draft]) == 2
    assert "name the row" in capsys.readouterr().err


def test_plain_lines_name_their_row(
    top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl.gz"
    assert run_command(["export", str(top / "draft"), "--out", str(file)]) == 0
    capsys.readouterr()
    line, answers, _ = trace(capsys, file, "--line", 4, "--of", top / "draft")
    same = ("row_id", "sample_index", "text")
    assert [line["content"][n] for n in same] == [answers["rows"][0][n] for n in same]
    lines = [json.loads(one) for one in gzip.open(file, "rt")]
    edited = tmp_path / "edited.jsonl"
    texts = [{**lines[0], "row_id": lines[4]["row_id"]}, {"row_id": lines[0]["row_id"]}]
    edited.write_text("".join(json.dumps(one) + "\n" for one in texts))
    for number, says in ((1, "no row of"), (2, "2 samples of")):
        arguments = ["--line", str(number), "--of", str(top / "draft")]
        assert run_command(["trace", str(edited), *arguments]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_line_is_traced_by_what_it_holds(
    top: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """A file in another order names the same rows, and an edited line names none."""
    folder, of = tmp_path / "out/export", "draft.0123456789"
    shutil.copytree(top / "draft", tmp_path / "out" / of)
    folder.mkdir()
    file = folder / f"x.{form}"
    export = ["export", str(tmp_path / "out" / of), "--to", "grpo", "--answer", "q", "--out"]
    assert run_command([*export, str(file)]) == 0
    if form == "jsonl":  # as a pipeline writes it
        options = {"answer": "q"}
        made = ExportEntry("0", ("0",), of, {"step": "draft", "to": "grpo", "options": options})
        ExportRecord(folder, {}).write(file.name, made)
        (tmp_path / "out/pipeline.json").write_text(PipelineRecord({}).text())
    capsys.readouterr()
    known = [trace(capsys, file, "--line", number) for number in (1, 2, 3)]
    if form == "jsonl":
        lines = file.read_text().splitlines()
        lines[2] = lines[2].replace('"answer": "', '"answer": "not ')
        file.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    else:
        table = pq.read_table(file)
        rows = table.to_pylist()
        rows[2]["answer"] = "not " + rows[2]["answer"]
        changed = pa.Table.from_pylist([rows[1], rows[0], *rows[2:]], schema=table.schema)
        pq.write_table(changed, file)
    for number, other in ((1, 2), (2, 1)):
        found = trace(capsys, file, "--line", number)
        assert found[1:] == known[other - 1][1:]
        assert found[0]["content"] == known[other - 1][0]["content"]
    assert run_command(["trace", str(file), "--line", "3"]) == 2
    assert "gives this line" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_pipeline_and_its_exports(
    top: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = overrides(model, top / "rows-0.jsonl", tmp_path)
    kept = [one.split("=", 1) for one in given if not one.startswith(("dataset", "output.dir"))]
    data = {"choice": "files", "path": f"{top}/rows-0.jsonl", "id_column": "id"}
    values: dict[str, Any] = {key: yaml.safe_load(value) for key, value in kept}
    values["steps"] = {
        "a": {"dataset": data},
        "b": {"from": "a", "dataset": {"text_as": "t", "where": "sample_index == 0"}},
    }
    values["export"] = [{"from": "b", "to": "sft", "out": "b.jsonl"}]
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(values))
    assert run_command([str(tmp_path / "p.yaml"), f"output.dir={tmp_path}/out"]) == 0
    capsys.readouterr()
    found = trace(capsys, tmp_path / "out", "r2#0")
    assert [Path(one.get("job", "")).name.partition(".")[0] for one in found] == ["b", "a", ""]
    found = trace(capsys, tmp_path / "out" / "export" / "b.jsonl", "--line", 4)
    rows = [one["rows"][0] for one in found if one["kind"] == "answers"]
    assert [(one["row_id"], one["sample_index"]) for one in rows] == [("r1#0", 1), ("r1", 0)]
    (dropped,) = trace(capsys, tmp_path / "out", "r2#1")
    assert dropped["by"] == "dataset.where=sample_index == 0"


def test_a_job_that_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished_job(tmp_path / "job", [row(0)], metrics={"status": "stopped"})
    assert run_command(["trace", str(job), "id7"]) == 2
    assert "the job is stopped" in capsys.readouterr().err


def test_a_row_that_a_stopped_job_has_not_reached_was_not_dropped(
    top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = Path(shutil.copytree(top / "judge", tmp_path / "judge"))
    name = pq.read_table(judge / "data")["row_id"][0].as_py()
    shutil.rmtree(judge / "data")
    metrics = json.loads((judge / "metrics.json").read_bytes())
    (judge / "metrics.json").write_text(json.dumps({**metrics, "status": "failed"}))
    assert run_command(["trace", str(judge), name]) == 2
    assert "is not there, and the job is failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (None, "does not say which data set"),
        ("files", "does not say which data set"),
        ({"kind": "job", "path": "x"}, "do not say what they were made from"),
        ({"kind": "job", "path": {"a": 1}}, "dataset.path"),
    ],
)
def test_a_strangers_configuration_ends_in_a_word(
    dataset: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path / "job", [row(0)], config={"dataset": dataset})
    unknown = "id7" if isinstance(dataset, dict) and dataset["path"] != "x" else "id0"
    assert run_command(["trace", str(job), unknown]) == 2
    assert says in capsys.readouterr().err


@pytest.fixture(scope="module")
def grid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that runs each row with three adapters, `base` among them, and two samples of each."""
    top = tmp_path_factory.mktemp("grid")
    (top / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for seed, name in enumerate(("one", "two")):
        write_adapter(top / name, model, seed=seed, strength=0.2)
    arms = [f"model.lora=[{top}/one,base,{top}/two]", "model.lora_grid=true"]
    run(overrides(model, top / "rows.jsonl", top / "job", *arms))
    return top


def check_arm(found: list[dict[str, Any]], kinds: list[str], adapter: str, name: str) -> None:
    """Check that a trace has one answer, of this adapter and row, and leads to the row's line."""
    assert [one["kind"] for one in found] == [*kinds, "answers", "data set"]
    *_, answers, source = found
    assert [(one["adapter"], one["row_id"]) for one in answers["rows"]] == [(adapter, name)]
    assert source["row_index"] == next(i for i, one in enumerate(ROWS) if one["id"] == name)


def test_rows_of_each_adapter_are_told_apart(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = tmp_path / "chosen"
    where = "not (adapter == 'two' and row_id == 'r2')"
    assert run_command(["select", f"{grid}/job", "--where", where, "--out", str(chosen)]) == 0
    capsys.readouterr()
    for adapter in ARMS:
        found = trace(capsys, chosen, f"{adapter}/r4#1")
        check_arm(found, ["set"], adapter, "r4")
        assert found[0]["row"]["response"] == found[1]["rows"][0]["text"]
        check_arm(trace(capsys, grid / "job", f"{adapter}/r4", "--sample", 0), [], adapter, "r4")
    (dropped,) = trace(capsys, chosen, "two/r2#0")
    assert "adapter is 'two'" in dropped["reason"]
    assert run_command(["trace", str(chosen), "r4#1"]) == 2
    said = capsys.readouterr().err
    assert "3 rows have the id r4#1" in said and "one/r4#1, base/r4#1, two/r4#1" in said
    text = "[{user: '{{ q }}'}, {assistant: '{{ response }}'}]"
    for source, kinds in ((chosen, ["line", "set"]), (grid / "job", ["line"])):
        out = tmp_path / f"{source.name}.parquet"
        options = ["--messages", text] if source == chosen else []
        command = ["export", str(source), "--to", "sft", *options, "--out", str(out)]
        assert run_command(command) == 0
        for line in (1, 4, 5):  # of adapters one, base, two
            check_arm(trace(capsys, out, "--line", line), kinds, ARMS[(line - 1) // 2], "r0")


def test_a_set_without_the_adapters_is_not_traced_to_any_of_them(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = tmp_path / "chosen"
    columns = ["--columns", "q,text"]
    assert run_command(["select", f"{grid}/job", *columns, "--out", str(chosen)]) == 0
    assert run_command(["trace", str(chosen), "r4#1"]) == 2
    said = capsys.readouterr().err
    assert "has no column 'adapter'" in said and f"batchgen trace {grid}/job ADAPTER/r4" in said
    assert run_command(["select", f"{grid}/job", "--columns", "q", "--out", f"{chosen}-q"]) == 0
    assert run_command(["trace", f"{chosen}-q", "r4#1"]) == 2
    assert "make the set again with the text column in --columns" in capsys.readouterr().err
