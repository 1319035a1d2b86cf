"""What the command of lm-eval says where lm-eval is not installed."""

import sys

import pytest

from batchgen.api.plugins.lm_eval import main


def test_lm_eval_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["run", "--tasks", "arc_easy"]) == 2
    assert capsys.readouterr().err == (
        "error: lm-eval is not installed, or too old: pip install 'batchgen[lm-eval]'\n"
    )
