"""Rows that are computed again are those of the shards, and what was changed is found."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.__main__ import run_command
from batchgen.pipelines.proof.audit.first_difference import first_difference
from batchgen.pipelines.proof.audit.share_bound import most_different
from batchgen.storage.shards.checked_file import seal
from tests.support.jobs.real_job import ROWS, overrides, run, save_tokenizer


def rewrite(shard: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change rows of a shard, as somebody would who wants to pass them off as computed."""
    table = pq.read_table(shard)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), shard)
    seal(shard)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with two samples of eleven rows, whose prompts show their numbers."""
    top = tmp_path_factory.mktemp("audit")
    (top / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prompt = "prompt.user='{{ q }} {{ row_index }}'"
    more = prompt, "output.columns=[logprobs,prompt_token_ids]"
    run(overrides(model, top / "rows.jsonl", top / "job", *more))
    return top / "job"


@pytest.fixture
def job(made: Path, tmp_path: Path) -> Path:
    """A copy of that job, which a test may change."""
    return Path(shutil.copytree(made, tmp_path / "job"))


def audit(job: Path, *more: str) -> int:
    return run_command(["audit", str(job), "--rows", "6", "--seed", "4", *more])


@pytest.mark.thorough
def test_all_rows_are_equal_in_a_copy_that_was_published(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    copy.mkdir(parents=True)
    shutil.copytree(job / "data", copy / "data")
    for name in ("config.yaml", "manifest.json"):
        shutil.copy(job / name, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert audit(copy) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    bound = 100 * (1 - 0.05 ** (1 / 6))
    assert line == (
        "6 of 6 rows (12 samples) equal bit for bit, of 11, seed 4: at 95% fewer than "
        f"{bound:.3g}% of all rows differ"
    )
    assert run_command(["audit", str(copy), "--rows", "99", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["equal"], found["different"]) == (11, 11, [])
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_rows_are_computed_and_not_copied_from_older_jobs(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    def change(found: list[dict[str, Any]]) -> None:
        found[4]["text"] += "!"

    old, new = tmp_path / "old", tmp_path / "new"
    for out, reuse in ((old, ""), (new, str(old))):
        run(overrides(model, rows, out, f"output.reuse=[{reuse}]"))
        rewrite(out / "data/part-00000.parquet", change)
    assert json.loads((new / "metrics.json").read_text())["rows_copied"] == 22
    assert run_command(["audit", str(new), "--rows", "11"]) == 1


def test_what_differs_is_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[1]["token_ids"][2] += 1
        rows[1]["text"] = "another"
        rows[2]["logprobs"][3] = math.nextafter(rows[2]["logprobs"][3], 0) - 1e-6
        rows[4]["text"] += "!"

    rewrite(job / "data" / "part-00001.parquet", change)
    assert audit(job, "--rows", "11") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("row r4: sample 1: token_ids[2] is ")
    assert lines[1].startswith("row r5: sample 0: logprobs[3] is -")
    assert lines[2].startswith("row r6: sample 0: text is '") and lines[2].endswith("!' there")
    assert (
        lines[3] == "8 of 11 rows (22 samples) equal bit for bit, of 11, seed 4: these are all rows"
    )


@pytest.mark.thorough
def test_how_drafts_came_about_is_not_compared(model: Path, rows: Path, tmp_path: Path) -> None:
    """It follows the clock, and preemptions."""

    def change(name: str) -> Callable[[list[dict[str, Any]]], None]:
        def changed(found: list[dict[str, Any]]) -> None:
            values = found[1][name]
            found[1][name] = [*values[:-1], values[-1] + 1] if name == "step_map" else values + 1

        return changed

    out, columns = tmp_path / "out", "output.columns=[draft_accepted,step_map]"
    run(overrides(model, rows, out, "strategy=ar_spec", columns))
    shard = out / "data" / "part-00000.parquet"
    for name in ("num_forwards", "num_draft_tokens", "num_accepted_tokens", "step_map"):
        rewrite(shard, change(name))
    assert audit(out, "--rows", "11") == 0
    rewrite(shard, change("row_index"))
    assert audit(out, "--rows", "11") == 1


def test_another_model_or_data_set_is_refused_by_name(
    job: Path,
    rows: Path,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert audit(job, f"dataset.path={tmp_path}/gone.jsonl") == 2
    assert "gone.jsonl" in capsys.readouterr().err
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([lines[0].replace(": ", ': "changed", "x": ', 1), *lines[1:]]))
    assert audit(job, f"dataset.path={rows}") == 2
    assert "does not describe how its rows were made" in capsys.readouterr().err
    assert audit(job, "sampling.seed=4") == 2
    assert "sampling.seed: 3 → 4" in capsys.readouterr().err
    (job / "config.yaml").unlink()
    assert audit(job) == 2
    assert "has no config.yaml" in capsys.readouterr().err


def test_code_of_a_stranger_is_not_run(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (job / "config.yaml").read_text()
    target = "_target_: ar\n"
    assert target in config
    (job / "config.yaml").write_text(config.replace(target, "_target_: os.system\n"))
    assert audit(job) == 2
    assert "it would run with your rights: strategy._target_ os.system" in capsys.readouterr().err


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", ["stream", "steps", pytest.param("reader", marks=pytest.mark.slow)])
def test_rows_of_every_source(way: str, model: Path, rows: Path, tmp_path: Path) -> None:
    """Streams are read from their start; steps and chains find each row where it comes from."""
    first, out = tmp_path / "first", tmp_path / "out"
    given = overrides(model, rows, out)
    if way == "stream":
        given.append("dataset.streaming=true")
    elif way == "steps":
        given.append("rows=[{Filter: {where: row_index % 2 == 1}}]")
    else:
        run(overrides(model, rows, first))
        kept = [one for one in given if not one.startswith("dataset")]
        where = "dataset.where=row_index > 2"
        given = ["dataset=job", f"dataset.path={first}", "dataset.text_as=t", where, *kept]
    run(given)
    assert audit(out) == 0


@given(st.integers(1, 400), st.data())
def test_the_bound_is_where_five_percent_are_left(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n - 1))
    share = most_different(k, n)
    left = sum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k + 1))
    assert left == pytest.approx(0.05, rel=1e-6)
    assert most_different(0, n) == pytest.approx(1 - 0.05 ** (1 / n))
    assert most_different(n, n) == 1.0


def test_differences_to_the_bit() -> None:
    def table(**columns: Any) -> pa.Table:
        return pa.table({name: pa.array([value]) for name, value in columns.items()})

    same = table(a=[1.0, math.nan, None], b={"x": 1})
    assert first_difference(same, table(a=[1.0, math.nan, None], b={"x": 1}), ["a", "b"]) is None
    for other, says in (
        (table(a=[1.0, -math.nan, None], b={"x": 1}), "a[1] is nan here, and nan there"),
        (table(a=[1.0, math.nan], b={"x": 1}), "a has 3 entries here, and 2 there"),
        (table(a=[1.0, math.nan, None], b={"x": 2}), "b is {'x': 1} here, and {'x': 2} there"),
    ):
        assert first_difference(same, other, ["a", "b"]) == says


def test_a_tokenizer_is_part_of_the_model(
    job: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    assert audit(job, "--rows", "1", f"model.path={copy}") == 0
    save_tokenizer(copy, first="<pad>")
    assert audit(job, f"model.path={copy}") == 2
    assert "a different model, or its files have changed" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_set_is_audited_by_what_it_knows_of_its_jobs(
    job: Path, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    run(overrides(model, rows, other, "sampling.seed=9"))
    chosen = ["select", str(job), str(other), "--where", "sample_index == 1"]
    assert run_command([*chosen, "--out", str(tmp_path / "set")]) == 0
    shutil.rmtree(job)
    shutil.rmtree(other)
    assert run_command(["audit", str(tmp_path / "set"), "--rows", "50"]) == 0
    assert "22 of 22 rows equal bit for bit" in capsys.readouterr().out

    def change(found: list[dict[str, Any]]) -> None:
        found[3]["response"] += "!"

    rewrite(tmp_path / "set" / "data" / "part-00000.parquet", change)
    assert run_command(["audit", str(tmp_path / "set"), "--rows", "50"]) == 1
    assert "its rows differ from those that were written" in capsys.readouterr().err
    facts = tmp_path / "set" / "selection.json"
    values = json.loads(facts.read_text())
    del values["digest"]  # as somebody would who wants to pass them off as chosen
    facts.write_text(json.dumps(values))
    assert run_command(["audit", str(tmp_path / "set"), "--rows", "50"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("row job/r3#1: response is '") and line.endswith("!' there")
