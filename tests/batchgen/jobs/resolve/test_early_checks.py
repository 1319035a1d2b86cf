"""Mistakes that are found before torch is loaded."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.jobs.resolve.early_checks import check_early, check_folder
from batchgen.storage.stores.manifest import DifferentJob
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeJob

USUAL = {"model": "nano_hybrid", "dataset.path": "rows.jsonl", "prompt.user": "{{ q }}"}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"q": "a"}\n{"q": "b", "c": 1}\n')
    Path("rows.csv").write_text("q,c\n1,2\n")
    Path("odd.csv").write_text("q;c\n1;2\n")
    Path("broken.jsonl").write_text('{"q": 1}\n{"q"')


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model.path": "./nowhere"}, r"model \./nowhere does not exist"),
        ({"dataset.path": "no.jsonl"}, r"dataset\.path: no\.jsonl does not exist in "),
        ({"dataset.path": "no*.csv"}, "no file matches"),
        ({"prompt.user": "{{ x }}"}, "prompt.user: the data set has no column 'x': choose among q"),
        ({"prompt.system": "{{ x }}"}, "prompt.system: the data set has no column 'x'"),
        ({"prompt.user": None, "prompt.text": "{{ x }}"}, "prompt.text: the data set has no"),
        ({"dataset.id_column": "x"}, "dataset.id_column: no column 'x': choose among q, c"),
        ({"dataset.path": "rows.csv", "prompt.user": "{{ x }}"}, "'x': choose among q, c"),
        ({"prompt.user": "{q}"}, "is plain text and not a column"),
    ],
)
def test_mistakes(changed: dict[str, str | None], says: str) -> None:
    given = {key: value for key, value in {**USUAL, **changed}.items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        check_early(compose(given), folder=True)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"prompt.user": "{{ c or row.z }}"},
        {"rows": [{"Filter": {"where": "c"}}], "prompt.user": "{{ x }}"},  # steps may add columns
        {"dataset.rename": {"q": "x"}, "prompt.user": "{{ x }}"},
        {"dataset.path": ".", "prompt.user": "{{ x }}"},
        {"dataset.path": "odd.csv", "prompt.user": "{{ x }}"},
        {"dataset.path": "broken.jsonl", "prompt.user": "{{ x }}"},
        {"model.path": "owner/name"},
    ],
)
def test_what_is_left_to_the_job(changed: dict[str, object]) -> None:
    check_early(compose({**USUAL, **changed}), folder=True)


def test_the_folder_of_another_job(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = FakeJob(str(out), rows=3, bad=False)
    job.run()
    config = job.config()
    check_folder(config, out)
    with pytest.raises(ConfigError) as early:
        check_folder(replace(config, sampling=replace(config.sampling, temperature=0.5)), out)
    assert "holds the output of a different job:\n  sampling.temperature: " in str(early.value)
    with pytest.raises(DifferentJob) as late:
        FakeJob(str(out), rows=3, bad=False, temperature=0.5).run()
    assert str(early.value) == str(late.value)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["job", "pipeline", "dry run"])
def test_nothing_heavy_is_loaded(kind: str) -> None:
    code = (
        "import sys; from batchgen.__main__ import run_command\n"
        "assert run_command(sys.argv[1:]) == 2\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
    )
    job = [f"{key}={value}" for key, value in {**USUAL, "prompt.user": "{{ x }}"}.items()]
    wrong = 'prompt: {choice: chat, user: "{{ x }}"}, model: nano_hybrid, dataset.path: rows.jsonl'
    Path("pipe.yaml").write_text(f"steps: {{ask: {{{wrong}}}}}\noutput.dir: out\n")
    arguments = {"job": job, "pipeline": ["pipe.yaml"], "dry run": [*job, "--dry-run"]}[kind]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    step = "step ask: " if kind == "pipeline" else ""
    assert f"{step}prompt.user: the data set has no column 'x'" in done.stderr
