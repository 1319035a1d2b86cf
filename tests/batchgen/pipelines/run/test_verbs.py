"""What verbs say of a pipeline's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.pages.viewer.folder_site import FolderSite
from batchgen.storage.shards.checked_file import seal
from tests.support.jobs.pipeline_job import folders, run, shards, values, written

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a complete pipeline, with its file beside it."""
    from tests.support.jobs.real_job import ROWS

    folder = tmp_path_factory.mktemp("pipeline")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = values(model, rows, folder / "out")
    given["output"]["report"] = True
    assert run(written(folder / "pipeline.yaml", given)) == 0
    yield folder / "out"


@pytest.mark.thorough
def test_status_tells_of_all_steps(out: Path, capsys: Said) -> None:
    capsys.readouterr()
    assert run_command(["status", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["step", "draft", "judge", "last"]
    assert lines[4].startswith("judge: dropped ") and "by dataset.where" in lines[4]
    assert run_command(["status", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    judge = found["judge"]
    assert (judge["read"], judge["kept"], judge["state"]) == (22, judge["answers"], "complete")
    assert judge["rows"] == judge["left"][-1][1] < 22
    assert run_command(["status", f"{out}/judge"]) == 0
    assert "complete" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_verb_for_jobs_names_the_steps(out: Path, capsys: Said) -> None:
    for verb in ("show", "export", "score"):
        assert run_command([verb, str(out)]) == 2
        said = capsys.readouterr().err
        assert f"is a pipeline's folder: name a step: {out}/draft, {out}/judge" in said


def test_every_verb_of_jobs_takes_a_step(out: Path, tmp_path: Path, capsys: Said) -> None:
    judge = f"{out}/judge"
    assert run_command(["show", judge, "--rows", "1"]) == 0
    assert run_command(["report", judge]) == 0
    assert run_command(["select", judge, "--out", str(tmp_path / "set")]) == 0
    assert run_command(["export", judge, "--to", "sft", "--out", str(tmp_path / "x.jsonl")]) == 0
    assert run_command(["validate", judge]) == 2  # it has no constraint
    assert "has no constraint" in capsys.readouterr().err
    assert run_command(["grade", f"{out}/draft"]) == 0


@pytest.mark.thorough
def test_audit_computes_rows_of_every_step_again(out: Path, capsys: Said) -> None:
    model = yaml.safe_load((out.parent / "pipeline.yaml").read_text())["model.path"]
    rows = f"dataset.path={out.parent}/rows.jsonl"  # of the first step; the others read each other
    assert run_command(["audit", str(out), "--rows", "7", "--seed", "4", rows]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" rows")[0] for line in lines] == [
        "draft: 3 of 3", "judge: 2 of 2", "last: 2 of 2"
    ]  # fmt: skip
    assert all("equal bit for bit" in line for line in lines)
    gone = f"judge.model.path={model}/gone"
    assert run_command(["audit", str(out), "--rows", "1", gone]) == 2
    assert "model" in capsys.readouterr().err


@pytest.mark.thorough
def test_audit_names_the_step_whose_rows_differ(out: Path, tmp_path: Path, capsys: Said) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    shard = folders(copy)["last"] / "data/part-00000.parquet"
    table = pq.read_table(shard)
    changed = [{**row, "text": row["text"] + "!"} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(changed, schema=table.schema), shard)
    seal(shard)
    assert run_command(["audit", str(copy), "--rows", "99", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    differ = {name: len(step["different"]) for name, step in found.items()}
    assert differ == {"draft": 0, "judge": 0, "last": 4}
    for folder in folders(copy).values():
        shutil.rmtree(folder)
    assert run_command(["audit", str(copy)]) == 2
    assert "no step of the pipeline has shards yet" in capsys.readouterr().err


@pytest.mark.thorough
def test_plan_and_dry_run_go_as_far_as_rows_are_known(
    out: Path, tmp_path: Path, capsys: Said
) -> None:
    path = str(out.parent / "pipeline.yaml")
    new = f"output.dir={tmp_path}/new"
    assert run_command(["plan", path, new]) == 0
    said = capsys.readouterr().out
    assert "waits for draft: at most 22 rows, 22 answers" in said
    assert "waits for judge: at most 22 rows" in said and "time of 1 of 3 steps" in said
    assert run_command([path, new, "--dry-run"]) == 0
    assert "waits for draft, whose answers are its rows" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
    assert run_command(["plan", path, "judge.sampling.seed=4", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps["judge"]["plan"]["answers"] > 0 and steps["judge"]["folder"] not in map(
        str, folders(out).values()
    )
    assert steps["last"]["waits_for"] == ["judge"]
    # Rows that are added to the data come through to steps whose rows were complete before.
    rows = out.parent / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before + '{"id": "new", "q": "once more"}\n')
    try:
        assert run_command(["plan", path]) == 0
    finally:
        rows.write_text(before)
    said = " ".join(capsys.readouterr().out.split())
    assert "2 answers to compute (22 are there)" in said
    assert "waits for draft: at most 24 rows" in said and "time of 1 of 3 steps" in said
    assert run_command(["plan", path]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(" 0 answers to compute") == 3 and "low likely bound" not in said


def test_the_report_links_to_those_of_the_steps(out: Path, capsys: Said) -> None:
    assert run_command(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    for folder in folders(out).values():
        assert f'href="{folder.name}/report.html"' in page and (folder / "report.html").is_file()


def test_a_strangers_links_lead_nowhere(out: Path, tmp_path: Path, capsys: Said) -> None:
    secret = folders(out)["draft"]
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pipeline.json", "pipeline.yaml"):
        (copy / name).write_bytes((out / name).read_bytes())
    (copy / secret.name).symlink_to(secret)
    capsys.readouterr()
    path = str(out.parent / "pipeline.yaml")
    for arguments in (
        ["status", str(copy)], ["show", f"{copy}/draft"], ["report", str(copy)],
        [path, f"output.dir={copy}"],
    ):  # fmt: skip
        assert run_command(arguments) == 2
        assert f"{copy / secret.name} is a link" in capsys.readouterr().err


def test_view_lists_the_steps_first(out: Path) -> None:
    page = FolderSite(out, "out").respond("", {}).body.decode()
    steps, _, rest = page.partition("<h2>Folders</h2>")
    assert steps.index(">draft<") < steps.index(">judge<") < steps.index(">last<")
    assert all(folder.name in rest for folder in folders(out).values())
    key = steps.partition('href="')[2]
    while not key.startswith(tuple("0123456789abcdef")) or "/" not in key[:20]:
        key = key.partition('href="')[2]
    assert FolderSite(out, "out").respond(key.partition('"')[0], {}).status == 200


@pytest.mark.parametrize("damage", ["metrics.json", "manifest.json", "config.yaml", "data"])
def test_a_damaged_step_is_named_and_the_others_are_listed(
    damage: str, out: Path, tmp_path: Path, capsys: Said
) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    path = folders(copy)["judge"] / damage
    shutil.rmtree(path) if damage == "data" else path.write_text('{"status": ')
    capsys.readouterr()
    assert run_command(["status", str(copy), "--json"]) == 1
    steps = json.loads(capsys.readouterr().out)
    assert [step["state"] for step in steps.values()] == ["complete", "damaged", "complete"]
    assert run_command(["status", str(copy)]) == 1
    said = capsys.readouterr().out
    assert f"step judge is damaged: {steps['judge']['damage']}" in said
    assert folders(copy)["judge"].name in said


def test_a_damaged_metrics_file_is_refused_until_it_is_removed(
    out: Path, tmp_path: Path, capsys: Said
) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    again = [str(out.parent / "pipeline.yaml"), f"output.dir={copy}"]
    path = folders(copy)["judge"] / "metrics.json"
    for content in ("", '{"status": ', "[]", '{"status": "complete", "attempts": [1]}'):
        path.write_text(content)
        capsys.readouterr()
        assert run_command(again) == 1
        said = capsys.readouterr().err
        assert f"batchgen: step judge: {path} is damaged" in said and "remove it" in said
        assert "Traceback" not in said
    path.unlink()
    assert run_command(again) == 0
    assert json.loads(path.read_bytes())["status"] == "complete"
    assert shards(copy) == shards(out)
