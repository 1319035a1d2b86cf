"""How a path that a user gives is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.errors import ConfigError
from batchgen.paths import user_path


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
