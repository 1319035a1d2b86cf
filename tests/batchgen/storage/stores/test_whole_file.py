"""A file appears whole, and never in the place of one that nobody named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchgen.storage.stores.whole_file import whole_file, write_atomic
from batchgen.util.errors import ConfigError, JobError


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("new", [None, "--out file"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, new: str | None) -> None:
    """/dev/full is a disk without space."""
    path = tmp_path / "file"
    if new is None:
        path.write_text("before")
    with pytest.raises(JobError, match="No space left"), whole_file(path, new):
        Path("/dev/full").write_text("more")
    assert os.listdir(tmp_path) == ([] if new else ["file"])


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_never_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Also one that comes while it is written, a link that leads nowhere, and without links."""

    def no_link(*_: object) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / "file"
    write_atomic(path, "first", "-o file")
    with pytest.raises(ConfigError, match="-o file exists already"):
        write_atomic(path, "second", "-o file")
    late = tmp_path / "late"
    with pytest.raises(ConfigError, match="already"), whole_file(late, "-o late") as temporary:
        temporary.write_text("ours")
        late.write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="already"):
        write_atomic(tmp_path / "link", "x", "-o link")
    assert path.read_text() == "first" and late.read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["file", "late", "link"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_verb_that_is_killed_leaves_no_part_of_its_file(tmp_path: Path, number: int) -> None:
    program = f"""
import signal, sys, time
from pathlib import Path
from batchgen.cli.job_outcome import verb
# A shell that runs the tests in the background has its children ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
from batchgen.storage.stores.whole_file import whole_file
def main(arguments):
    with whole_file(Path({str(tmp_path)!r}, "file"), "--out file") as temporary:
        temporary.write_text("a part")
        print("writing", flush=True)
        time.sleep(60)
    return 0
sys.exit(verb(main)([]))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(number)
        process.wait()
    time.sleep(0.01)
    left = os.listdir(tmp_path)
    assert "file" not in left and (number == signal.SIGKILL or not left)
