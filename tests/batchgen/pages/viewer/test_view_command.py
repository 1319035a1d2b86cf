"""`batchgen view` from its start to Ctrl-C."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from batchgen.cli.verbs import view
from batchgen.pages.viewer.server import ViewServer
from tests.support.jobs.written_job import write_job


@pytest.mark.parametrize("opened", [False, True])
def test_it_serves_until_ctrl_c(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    opened: bool,
) -> None:
    for name in "ab":
        write_job(tmp_path / name, 3, 1)
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def serve_one(server: ViewServer) -> None:
        """Answer one request, and then do as if Ctrl-C were pressed."""
        from threading import Thread

        def ask() -> None:
            with urlopen(server.url, timeout=10) as answer:
                seen.append(answer.read().decode())

        asking = Thread(target=ask)
        asking.start()
        server.handle_request()
        asking.join(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(ViewServer, "serve_forever", serve_one)
    monkeypatch.setattr("webbrowser.open", seen.append)
    assert view.main(["a", "b/", *["--open"] * opened]) == 0
    captured = capsys.readouterr()
    told = r"a and b/: (http://127\.0\.0\.1:\d+/[\w-]+/) \(Ctrl-C ends it\)\n\n"
    match = re.fullmatch(told, captured.out)
    assert match is not None and captured.err == ""
    assert seen[:-1] == [match[1]] * opened
    assert "<title>a and b</title>" in seen[-1]
