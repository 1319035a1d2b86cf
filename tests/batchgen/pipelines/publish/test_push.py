"""`batchgen push`, against a server on the loopback that speaks the hub's calls, and fails."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen.__main__ import run_command
from batchgen.pipelines.publish import push_folder
from batchgen.pipelines.publish.push_folder import FolderPush
from batchgen.pipelines.publish.pushed_files import PushedFolder
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import JobError
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.hub_server import TOKEN, Hub, Repo, logged_in

SET = "me/answers"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on which this process is logged in."""
    with logged_in(monkeypatch) as found:
        yield found


def job_of(path: Path, rows: int = 3, **options: Any) -> Path:
    """A job with a shard for each row, graded, with a card."""
    job = finished_job(path, [row(i) for i in range(rows)], in_shard=1, graded=True, **options)
    (job / "README.md").write_text("---\ntags:\n- batchgen\n---\n# Answers\n")
    return job


def run(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def waits_of(job: Path) -> list[float]:
    """Push a job and return for how long the push has waited."""
    waits: list[float] = []
    push = FolderPush(
        PushedFolder(str(job)),
        SET,
        private=False,
        say=lambda _: None,
        sleep=waits.append,
    )
    push.push(complete=True)
    return waits


def same(hub: Hub, job: Path) -> bool:
    """Whether every file of the job that belongs there is there, byte by byte."""
    names = ["README.md", "manifest.json", "config.yaml"]
    names += [str(path.relative_to(job)) for path in sorted(job.glob("*/*.parquet"))]
    return all(hub.content(SET, name) == (job / name).read_bytes() for name in names)


def test_a_job_is_pushed_once(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path / "job")
    assert run("push", job, SET, "--private") == 0
    assert same(hub, job) and hub.repos[SET].private
    assert set(hub.repos[SET].files) == {
        ".gitattributes", "README.md", "manifest.json", "config.yaml",
        *(f"{folder}/part-{i:05d}.parquet" for folder in ("data", "grades") for i in range(3)),
    }  # fmt: skip
    commits, uploads = len(hub.repos[SET].commits), hub.requests["upload"]
    assert run("push", job, SET) == 0
    assert "All files are there already" in capsys.readouterr().out
    assert (len(hub.repos[SET].commits), hub.requests["upload"]) == (commits, uploads)


def test_commits_have_at_most_so_many_shards_and_name_their_parents(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push_folder.SHARDS_IN_COMMIT == 100
    monkeypatch.setattr(push_folder, "SHARDS_IN_COMMIT", 4)
    job = job_of(tmp_path / "job", 9)
    waits_of(job)
    shards = [
        sum(name.endswith(".parquet") for name in paths) for _, paths in hub.repos[SET].commits
    ]
    assert shards == [0, 4, 4, 4, 4, 2]
    assert same(hub, job)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        ("commit", [500]),
        ("commit", [(429, 1)]),
        ("commit", ["cut"]),
        ("commit", ["after"]),
        ("upload", ["cut", 500]),
        ("upload", [403]),
        ("preupload", [503]),
        ("batch", [(429, 1)]),
        ("tree", [500]),
        ("info", [502, "cut"]),
        ("create", [500, "cut"]),
    ],
)
def test_a_failure_is_survived_and_nothing_is_there_twice(
    hub: Hub, tmp_path: Path, kind: str, faults: list[Any]
) -> None:
    job = job_of(tmp_path / "job")
    hub.faults[kind] = list(faults)
    if faults == [403]:
        with pytest.raises(JobError, match="the hub refuses"):
            waits_of(job)
    waits_of(job)
    assert not hub.faults[kind] and same(hub, job)
    assert len(hub.repos[SET].commits) == 2  # of the server, and of all files


def test_the_hub_says_for_how_long_to_wait(hub: Hub, tmp_path: Path) -> None:
    hub.faults["commit"] = [(429, 7), 500, 500]
    assert waits_of(job_of(tmp_path / "job")) == [7.0, 2.0, 4.0]


def test_a_stale_parent_is_read_again_and_what_others_pushed_stays(
    hub: Hub, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "job")

    def someone_else(repo: Repo) -> None:
        content = (job / "data" / "part-00000.parquet").read_bytes()
        oid = hashlib.sha256(content).hexdigest()
        hub.objects[oid] = content
        repo.commit({"data/part-00000.parquet": oid, "notes.txt": b"theirs"})

    hub.before_commit = [someone_else]
    assert waits_of(job) == []
    assert same(hub, job) and hub.content(SET, "notes.txt") == b"theirs"
    assert "data/part-00000.parquet" not in hub.repos[SET].commits[-1][1]
    assert hub.requests["commit"] == 2


def test_a_hub_that_fails_for_good_ends_the_push_and_it_goes_on_later(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job")
    hub.faults["commit"] = [500] * 8
    with pytest.raises(JobError, match="fails again and again"):
        waits_of(job)
    assert run("push", job, SET) == 0 and same(hub, job)


def test_other_rows_are_never_overwritten(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job")
    assert run("push", job, SET) == 0
    other = job_of(tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["identity"]["model"] = {"path": "another"}
    (other / "manifest.json").write_text(json.dumps(manifest))
    before = dict(hub.repos[SET].files)
    assert run("push", other, SET) == 2
    assert "holds other rows" in capsys.readouterr().err
    hub.repos["me/foreign"] = Repo()
    hub.repos["me/foreign"].commit({"data/train.parquet": b"x"})
    assert run("push", job, "me/foreign") == 2
    assert hub.repos[SET].files == before


def test_a_job_that_has_grown_sends_what_is_new(hub: Hub, tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", 2)
    waits_of(job)
    uploads = hub.requests["upload"]
    grown = job_of(tmp_path / "grown", 3)
    waits_of(grown)
    assert same(hub, grown) and hub.requests["upload"] == uploads + 2


def test_the_data_set_becomes_exactly_this_one(hub: Hub, tmp_path: Path) -> None:
    """Rows that were computed anew take the place of older ones, and no other shard stays."""
    waits_of(job_of(tmp_path / "job", 3))
    rows = [row(i, text="no") for i in range(2)]
    other = finished_job(tmp_path / "other", rows, in_shard=1)
    (other / "README.md").write_text("---\ntags: []\n---\n# Other answers\n")
    waits_of(other)
    found = {name for name in hub.repos[SET].files if name.endswith(".parquet")}
    assert found == {"data/part-00000.parquet", "data/part-00001.parquet"} and same(hub, other)


def test_rows_of_another_data_set_are_refused(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One configuration, and another file of rows, or fewer of them."""
    job, manifests = job_of(tmp_path / "job"), []
    values = json.loads((job / "manifest.json").read_text())
    for rows, digests in ((3, ["a"]), (4, ["b"]), (3, ["b"]), (2, ["c"])):
        more = {"growing": {"dataset rows": rows}, "row_digests": digests}
        prints = {**values["fingerprints"], "dataset": f"{rows} {digests}"}
        manifests.append(json.dumps({**values, **more, "fingerprints": prints}))
    (job / "manifest.json").write_text(manifests[0])
    assert run("push", job, SET) == 0
    for text, says in ((manifests[2], "row that differs"), (manifests[3], "row is gone")):
        (job / "manifest.json").write_text(text)
        folder = PushedFolder.__new__(PushedFolder)
        folder._reader, folder.identity_file = JobFolderReader(job), "manifest.json"
        (line,) = folder.differences(manifests[0].encode())
        assert says in line


@pytest.mark.parametrize("folder", ["data", "grades"])
def test_a_damaged_file_never_leaves(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    job = job_of(tmp_path / "job")
    path = job / folder / "part-00001.parquet"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    assert run("push", job, SET) == 1
    assert "part-00001.parquet" in capsys.readouterr().err
    assert set(hub.repos[SET].files) == {".gitattributes"}


def test_a_set_that_is_not_what_was_written_is_not_pushed(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job")
    for name in ("no", "yes"):
        assert run("select", job, "--where", "mark == 1", "--text-as", name, "--out",
                   tmp_path / name) == 0  # fmt: skip
    shutil.copy(tmp_path / "no/data/part-00000.parquet", tmp_path / "yes/data")
    assert run("push", tmp_path / "yes", SET) == 1
    assert "differ from those that were written" in capsys.readouterr().err
    assert run("select", job, "--where", "mark == 1", "--text-as", "yes", "--out",
               tmp_path / "yes") == 1  # fmt: skip


def test_shards_are_pushed_as_a_job_publishes_them(hub: Hub, tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", 3)
    last = job / "data" / "part-00002.parquet"
    content, metrics = last.read_bytes(), json.loads((job / "metrics.json").read_text())

    def set_status(status: str) -> None:
        attempts = [{**metrics["attempts"][0], "status": status}]
        text = json.dumps({**metrics, "status": status, "attempts": attempts})
        (job / "metrics.json").write_text(text)

    last.unlink()
    (job / ".lock").write_text("pid 1 on somewhere else, since 2026\n")
    set_status("running")
    seen: list[set[str]] = []

    def look(_: float) -> None:
        seen.append({name for name in hub.repos[SET].files if name.endswith(".parquet")})
        if len(seen) == 2:
            last.write_bytes(content)
        if len(seen) == 3:
            set_status("complete")

    folder = PushedFolder(str(job))
    push = FolderPush(folder, SET, private=False, say=lambda _: None, sleep=look)
    push.push_while_running()
    two = {"data/part-00000.parquet", "data/part-00001.parquet"}
    assert seen == [two, two, {*two, "data/part-00002.parquet"}]
    assert same(hub, job)
    set_status("stopped")
    with pytest.raises(JobError, match="not complete"):
        push.push_while_running()


def test_a_set_and_an_export_are_pushed_with_their_cards(hub: Hub, tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", config={"sampling": {"temperature": 0.25}})
    assert run("select", job, "--where", "mark == 1", "--out", tmp_path / "set") == 0
    assert run("export", job, "--to", "sft", "--out", tmp_path / "sft") == 0
    for name in ("set", "sft"):
        assert run("push", tmp_path / name, f"me/{name}") == 0
        files = set(hub.repos[f"me/{name}"].files)
        assert {"README.md", "selection.json", "data/part-00000.parquet"} <= files
        card = hub.content(f"me/{name}", "README.md").decode()
        assert "## Lineage" in card and "temperature=0.25" in card and "`nowhere`" in card


def test_a_public_set_does_not_become_private(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job")
    hub.repos[SET] = Repo()
    hub.repos[SET].commit({".gitattributes": b""})
    assert run("push", job, SET, "--private") == 2
    assert "exists already and is public" in capsys.readouterr().err
    assert set(hub.repos[SET].files) == {".gitattributes"}


def stop(folder: Path) -> None:
    (folder / "job/metrics.json").write_text('{"status": "stopped"}')


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        (lambda p: None, ["job", "no name at all"], "is not USER/SET"),
        (lambda p: None, ["job/config.yaml", SET], "push takes folders"),
        (lambda p: None, ["s3://bucket/job", SET], "works on a folder of this machine"),
        (stop, ["job", SET], "not complete"),
        (lambda p: os.environ.pop("HF_TOKEN"), ["job", SET], "hf auth login"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_before_anything_is_sent(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], Any],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    job_of(tmp_path / "job")
    change(tmp_path)
    assert run("push", *arguments) == 2
    assert says in capsys.readouterr().err
    assert not hub.repos


@pytest.mark.thorough
def test_no_token_is_printed_or_written(hub: Hub, tmp_path: Path) -> None:
    """A process of its own, which knows the hub by HF_ENDPOINT alone, with a hub that fails."""
    job = job_of(tmp_path / "job")
    hub.faults = {"commit": [500, 403]}
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
    }  # fmt: skip
    command = [sys.executable, "-m", "batchgen", "push", str(job), SET]
    for code in (1, 0):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == code, done.stderr
        assert TOKEN not in done.stdout + done.stderr
    assert same(hub, job)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
