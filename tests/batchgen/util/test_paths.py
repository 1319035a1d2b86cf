"""How a path that a user gives is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.util.errors import ConfigError
from batchgen.util.paths import short_user_path, user_path
from tests.support.jobs.fake_job import FakeJob


def test_home_relative_and_trailing_slashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert user_path("~/x/", "output.dir") == tmp_path / "home/x"
    assert user_path("a/../b//c/.", "output.dir") == tmp_path / "b/c"
    assert user_path("data/*.jsonl", "dataset.path") == tmp_path / "data/*.jsonl"
    assert user_path("a~b", "output.dir") == tmp_path / "a~b"
    assert user_path(Path("/x"), "output.dir") == Path("/x")


def test_links_stay(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert user_path(tmp_path / "link" / "x", "output.dir") == tmp_path / "link" / "x"


@pytest.mark.parametrize(
    ("given", "says"),
    [("", "output.dir is empty"), ("~nobody-here/x", "no user 'nobody-here'"), ("a\0b", "null")],
)
def test_no_path(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        user_path(given, "output.dir")


def test_short_paths_are_as_they_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert short_user_path("out//a/", "output.dir") == Path("out/a")
    assert short_user_path("../x", "output.dir") == Path("../x")
    assert short_user_path("~/x/", "output.dir") == tmp_path / "home/x"
    assert short_user_path("./~/x", "output.dir") == tmp_path / "~/x"
    assert short_user_path("12:30/x", "output.dir") == tmp_path / "12:30/x"
    assert short_user_path(f"{tmp_path}/x/..", "output.dir") == tmp_path


@pytest.mark.parametrize(
    ("given", "lies"),
    [("~/x", "home/x"), ("./~/x/", "~/x"), ("a:b/../c:d", "c:d"), ("link/x", "real/x")],
)
def test_all_of_a_job_lies_in_one_folder(
    given: str, lies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some libraries read ~ as the home folder, or a colon as the mark of a URL, others do not."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert FakeJob(given, rows=20, bad=False).run().exit_code == 0
    folders = set(tmp_path.rglob("manifest.json"))
    assert folders == {tmp_path / lies / "manifest.json"}
    shards = set((tmp_path / lies / "data").iterdir())
    assert {path for path in tmp_path.rglob("*.parquet") if path.parent.name == "data"} == shards
    assert "complete already" in FakeJob(given, rows=20, bad=False).run().message
