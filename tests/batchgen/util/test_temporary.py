"""Files that several processes write at once are whole, and killed writers leave nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

from batchgen.storage.stores.whole_file import write_atomic
from tests.support.jobs.forked import fork_server

_TEXTS = [name * 20_000 for name in "ab"]


def _write(path: Path, text: str, times: int) -> None:
    for _ in range(times):
        write_atomic(path, text)


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    path, context = tmp_path / "README.md", fork_server()
    writers = [context.Process(target=_write, args=(path, text, 25)) for text in _TEXTS]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not path.exists() or path.read_text() in _TEXTS
        time.sleep(0.001)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [found.name for found in tmp_path.iterdir()] == ["README.md"]
