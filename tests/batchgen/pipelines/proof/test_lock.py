"""A lock makes its rows again, to the byte, proves single ones, and runs and reads nothing that the
user has not allowed."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.pipelines.proof.folder_proof import folder_digests
from batchgen.pipelines.proof.lock_file import LockFile
from batchgen.pipelines.proof.merkle import leaves
from batchgen.pipelines.proof.rebuilt import rebuilt_step
from tests.support.engine.lora_files import write_adapter
from tests.support.jobs.real_job import contents, overrides, run

KEEP = ["post=[{_target_: batchgen.grading.extract.Extract, methods: [whole]},"
        "{_target_: batchgen.grading.grade.Grade, method: exact, target: q}]"]  # fmt: skip


@pytest.fixture(scope="module")
def chain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graded job, one that reads it, and the locks of both."""
    from tests.support.jobs.real_job import ROWS

    top = tmp_path_factory.mktemp("chain")
    rows = top / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run(overrides(model, rows, top / "draft", "output.columns=[logprobs]", *KEEP))
    common = overrides(model, rows, top / "judge")
    kept = [one for one in common if not one.startswith("dataset")]
    where = "dataset.where=mark == 0 and sample_index < 2"
    prompt = "prompt.user='{{ reply }} \\${x}'"
    run(["dataset=job", f"dataset.path={top}/draft", "dataset.text_as=reply", where, *kept, prompt])
    for name in ("draft", "judge"):
        assert run_command(["lock", str(top / name), "-o", str(top / f"{name}.lock")]) == 0
    return top


def places(chain: Path, model: Path) -> list[str]:
    """The places that the locks name, as whoever has them elsewhere types them."""
    return [f"model.path={model}", f"dataset.path={chain}/rows.jsonl"]


@pytest.mark.thorough
def test_a_chain_is_made_again_to_the_byte_in_another_folder(
    chain: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    shutil.copy(chain / "judge.lock", elsewhere)
    command = ["rebuild", "judge.lock", "output.dir=again", *places(chain, model)]
    assert run_command(command) == 0
    count = pq.read_table(chain / "judge" / "data").num_rows
    assert capsys.readouterr().out.splitlines() == [
        "draft: equal byte for byte: 22 rows in 3 shards",
        f"judge: equal byte for byte: {count} rows in {-(-count // 8)} shards",
    ]
    for name in ("draft", "judge"):
        assert contents(elsewhere / "again" / name / "data") == contents(chain / name / "data")
    before = contents(elsewhere / "again")
    assert run_command(command) == 0  # nothing is computed again
    assert contents(elsewhere / "again" / "judge" / "data") == {
        name.removeprefix("judge/data/"): digest
        for name, digest in before.items()
        if name.startswith("judge/data/")
    }


@pytest.mark.slow
def test_a_pipeline_is_made_again_without_its_file(
    chain: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a step that joins the rows of another one, and one that reads several."""
    steps: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"sampling": {"choice": "greedy", "max_new_tokens": 5}},
        "next": {"from": "a", "dataset": {"text_as": "t"}},
        "both": {"from": ["a", "b"], "dataset": {"text_as": "t"}},
        "last": {
            "from": "a",
            "dataset": {"text_as": "t"},
            "rows": [{"Join": {"from": "b", "on": "id", "columns": {"text": "other"}}}],
        },
    }
    given = overrides(model, chain / "rows.jsonl", tmp_path / "out")
    kept = [one for one in given if not one.startswith(("dataset=", "dataset.", "output.dir"))]
    common = dict(one.split("=", 1) for one in kept)
    data = {"dataset": {"choice": "files", "path": f"{chain}/rows.jsonl", "id_column": "id"}}
    of_data = [name for name in steps if "from" not in steps[name]]
    values = {name: {**(data if name in of_data else {}), **step} for name, step in steps.items()}
    common.pop("sampling")
    groups = {key: yaml.safe_load(value) for key, value in common.items()}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({**groups, "steps": values}))
    assert run_command([str(tmp_path / "p.yaml"), f"output.dir={tmp_path}/out"]) == 0
    lock = tmp_path / "p.lock"
    assert run_command(["lock", f"{tmp_path}/out", "-o", str(lock)]) == 0
    shutil.move(tmp_path / "out", tmp_path / "moved")
    capsys.readouterr()
    command = ["rebuild", str(lock), f"output.dir={tmp_path}/again", *places(chain, model)]
    assert run_command(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["a", "b", "both", "last", "next"]
    assert all("equal byte for byte" in line for line in lines)
    assert run_command(["audit", f"{tmp_path}/moved/next", "--rows", "4"]) == 0
    capsys.readouterr()
    assert run_command(["audit", f"{tmp_path}/moved/last", "--rows", "4"]) == 2  # moved tables
    assert "rows[0]" in capsys.readouterr().err


def test_a_lock_is_small_and_the_same_each_time(chain: Path, tmp_path: Path) -> None:
    assert (chain / "judge.lock").stat().st_size < 5000
    assert run_command(["lock", str(chain / "judge"), "-o", str(tmp_path / "lock")]) == 0
    assert (tmp_path / "lock").read_bytes() == (chain / "judge.lock").read_bytes()
    lock = LockFile.read(chain / "judge.lock")
    assert [*lock.steps] == ["draft", "judge"] and lock.steps["judge"]["from"] == "draft"
    assert lock.text() == (chain / "judge.lock").read_text()
    assert lock.proof["draft"].grades is not None
    assert run_command(["lock", str(chain / "judge"), "-o", str(tmp_path / "lock")]) == 2


def test_other_rows_are_told_by_shard(chain: Path) -> None:
    proof = LockFile.read(chain / "draft.lock").proof["draft"]
    found = folder_digests(chain / "draft")

    def difference(**changes: Any) -> str | None:
        return rebuilt_step("draft", replace(proof, **changes), found).difference

    assert difference() is None
    roots = [proof.shard_roots[0], "0" * 64, proof.shard_roots[2]]
    assert difference(shard_roots=roots) == "1 of 3 shards differ: 1"
    assert difference(shard_roots=(), files=()) is None
    assert "too many shards to say which" in str(difference(shard_roots=(), files=(), root="0"))
    assert "22 rows in 3 shards, and 23 rows" in str(difference(rows=23))
    assert difference(grades="0") == "the rows are equal, and their grades differ"
    assert difference(columns="0") == "it has other columns"
    assert rebuilt_step("draft", proof, found).same_bytes
    assert not rebuilt_step("draft", replace(proof, files=["0"] * 3), found).same_bytes


@pytest.mark.thorough
def test_models_data_and_places_are_the_users_word(
    chain: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, out = str(chain / "judge.lock"), f"output.dir={tmp_path}/again"
    assert run_command(["rebuild", lock, out]) == 2
    err = capsys.readouterr().err
    assert f"draft.model.path={model}" in err and f"draft.dataset.path={chain}/rows.jsonl" in err
    assert run_command(["rebuild", lock, out, f"draft.model.path={model}"]) == 2
    err = capsys.readouterr().err
    assert "judge.model.path" in err and "draft.model.path" not in err
    other = tmp_path / "rows.jsonl"
    lines = (chain / "rows.jsonl").read_text().splitlines()
    other.write_text("\n".join([*lines[:-1], lines[-1].replace("r", "s")]) + "\n")
    given = ["rebuild", lock, out, f"model.path={model}"]
    assert run_command([*given, f"dataset.path={other}"]) == 2
    assert "step draft was made from something else" in capsys.readouterr().err
    # Rows that came since are not of the set.
    other.write_text("\n".join([*lines, '{"id": "new", "q": "new"}']) + "\n")
    assert run_command([*given, f"dataset.path={other}"]) == 0
    assert not (tmp_path / "judge").exists()
    assert run_command(["rebuild", lock, *given[3:]]) == 2
    assert "output.dir" in capsys.readouterr().err


def hostile(chain: Path, tmp_path: Path, **changes: Any) -> str:
    """The lock of the draft with keys that a stranger has changed."""
    values = yaml.safe_load((chain / "draft.lock").read_text())
    values["steps"]["draft"] |= changes
    path = tmp_path / "hostile.lock"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategy": {"_target_": "os.system", "command": "touch gone"}}, "run with your rights"),
        ({"post": [{"_target_": "os.system"}]}, "run with your rights"),
        ({"prompt": None, "prompt.user_file": "/etc/passwd"}, "prompt.user_file=/etc/passwd"),
        ({"prompt": {"choice": "chat", "user_file": "/etc/passwd"}}, "user_file=/etc/passwd"),
        ({"constraint": {"choice": "grammar", "grammar": "/etc/passwd"}}, "grammar=/etc/passwd"),
        ({"rows": [{"Pick": {"persona": "/etc/passwd"}}]}, "rows[0].Pick.persona=/etc/passwd"),
        ({"rows": [{"Against": {"path": "secrets", "column": "q"}}]}, "path=secrets"),
        ({"model.lora": "/secret"}, "model.lora=/secret"),
        ({"model.lora": {"a": "/secret", "base": "base"}}, "model.lora.a=/secret"),
        ({"output": {"dir": "/tmp/elsewhere"}}, "leave it out"),
        ({"output.dir": "/tmp/elsewhere"}, "leave it out"),
        ({"model": {"path": "${oc.env:HOME}"}}, "refused"),
        ({"from": "nowhere"}, "nowhere"),
    ],
)  # fmt: skip
def test_a_strangers_lock_runs_and_reads_nothing(
    changes: dict[str, Any], says: str, chain: Path, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    lock = hostile(chain, tmp_path, **{k: v for k, v in changes.items() if v is not None})
    if "prompt" in changes and changes["prompt"] is None:
        values = yaml.safe_load(Path(lock).read_text())
        del values["steps"]["draft"]["prompt"]
        Path(lock).write_text(yaml.safe_dump(values))
    given = [] if "model" in changes else [f"model.path={model}"]
    given.append(f"dataset.path={chain}/rows.jsonl")
    assert run_command(["rebuild", lock, "output.dir=again", *given]) == 2
    err = capsys.readouterr().err
    assert says in err or says == "refused", err
    assert not (tmp_path / "gone").exists() and not (tmp_path / "again").exists()


def test_an_adapter_is_that_of_the_lock(
    chain: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it lies; another one under its name is refused before anything is computed."""
    adapter = write_adapter(tmp_path / "a", model, strength=0.2)
    line = overrides(model, chain / "rows.jsonl", tmp_path / "out", f"model.lora={adapter}")
    run([*line, "dataset.limit=2"])
    lock = str(tmp_path / "out.lock")
    assert run_command(["lock", str(tmp_path / "out"), "-o", lock]) == 0
    moved = adapter.rename(tmp_path / "moved")
    given = ["rebuild", lock, f"output.dir={tmp_path}/again", *places(chain, model)]
    assert run_command(given) == 2
    assert f"model.lora={adapter}" in capsys.readouterr().err
    assert run_command([*given, f"model.lora={moved}"]) == 0
    assert "equal byte for byte" in capsys.readouterr().out
    shutil.rmtree(moved)
    write_adapter(moved, model, strength=0.2, seed=1)
    given[2] = f"output.dir={tmp_path}/other"
    assert run_command([*given, f"model.lora={moved}"]) == 2
    err = capsys.readouterr().err
    assert "was made from something else than what is here" in err and "adapter: " in err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("text", ["", "a: 1", "batchgen_lock: 2", "batchgen_lock: 1", "- 1", "{"])
def test_what_is_no_lock(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.lock"
    path.write_text(text)
    assert run_command(["rebuild", str(path), "output.dir=x"]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_leaf_is_of_names_types_and_values() -> None:
    table = pa.table({"a": [1, 2], "b": [[0.0, math.nan], None]})
    first, second = leaves(table)
    assert first != second
    assert [first, second] == [*leaves(table.to_batches()[0])]
    assert first not in leaves(table.rename_columns(["a", "c"]))
    assert first not in leaves(table.set_column(0, "a", table["a"].cast(pa.int32())))
    assert first not in leaves(table.set_column(1, "b", pa.array([[-0.0, math.nan], None])))
