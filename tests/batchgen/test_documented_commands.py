"""The commands of README.md, of examples/ and of the documentation are jobs and verbs."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from batchgen.__main__ import run_command
from batchgen.cli.options import parse_options
from batchgen.cli.run_options import composed, composed_pipeline
from batchgen.cli.verb_table import VERBS
from tests.support.jobs.real_job import VOCAB, save_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "examples/README.md",
    *sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "docs").rglob("*.md")
        if path.name != "commands.md"  # it shows how commands are written, and is generated
    ),
)
FIRST_HOUR = ("quickstart", "guides/running", "guides/evals")
FILES = {
    "job.yaml": "{}",
    "adapters/job.yaml": "{}",
    "exam.yaml": "{}",
    "out/config.yaml": "{}",
    "evals/score.yaml": "{}",
    "evals/generate.yaml": "{}",
    "prompt.jinja": "{{ order }}",
    "person.json": '{"type": "object"}',
    "questions.json": '{"type": "object"}',
}


def _yaml_block(page: str, holds: str) -> str:
    """The first block of YAML on a page with this text in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```yaml\n(.*?)```", text, re.S)
    return next(block for block in blocks if holds in block)


FILES["pipeline.yaml"] = _yaml_block("docs/guides/pipelines.md", "steps:")
FILES["data.yaml"] = _yaml_block("docs/guides/tutorial_data.md", "steps:")
FILES["simpleqa.yaml"] = _yaml_block("docs/guides/evals.md", "template: simpleqa")
FILES["judged.yaml"] = _yaml_block("docs/benchmarks/jobs.md", "judge: {template: match}")


OTHER_MACHINES = (
    "s3://", "launcher=", "/shared/", "Qwen/", "batchgen view", "--follow", " …", "math500",
    "score a ", "compare a b", "simpleqa", "--multirun", "compare sweep",
)  # fmt: skip
"""In commands that need a cluster, a store, a GPU or a browser, do not end, or take long."""


def _page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")


def _commands() -> list[str]:
    return [
        command
        for page in PAGES
        for command in re.findall(r"^    (?:.*\| )?batchgen (.*)$", _page(page), re.MULTILINE)
    ]


def test_there_are_commands() -> None:
    assert len(_commands()) > 30


@pytest.mark.quick(2)
@pytest.mark.parametrize("command", _commands())
def test_a_documented_command_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    for folder in ("examples", "batchgen"):
        Path(folder).symlink_to(ROOT / folder)
    arguments = shlex.split(command.partition(" > ")[0], comments=True)
    if arguments[0] in VERBS:
        return
    options = parse_options(arguments)
    if "--multirun" not in options.flags and composed_pipeline(options) is None:
        composed(options)


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"plan"}))
def test_a_documented_option_of_a_verb_exists(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([verb, "--help"]) == 0
    known = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    named = {
        option
        for command in _commands()
        if shlex.split(command, comments=True)[:1] == [verb]
        for option in re.findall(r" (--[a-z][\w-]*)", command.partition(" #")[0])
    }
    assert named - known == set()


@pytest.mark.slow
def test_the_commands_of_the_first_hour_run_in_order(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are those that the pages print, and the model is a tiny one in the place of its own."""
    model = tiny_model("llama", **VOCAB, max_position_embeddings=1024)
    save_tokenizer(model)
    monkeypatch.chdir(tmp_path)
    text = "".join(_page(f"docs/{page}.md") for page in FIRST_HOUR)
    for program in re.findall(
        r"(?:^    (?:import json|with open)[^\n]*\n(?:    .*\n|\n)+)", text, re.M
    ):
        exec(textwrap.dedent(program), {"json": json})
    files = re.findall(r"```yaml\n((?:dataset:)\n.*?output\.dir: (\w+)\n)```", text, re.S)
    ran = 0
    for command in re.findall(r"^    batchgen (.*)$", text, re.MULTILINE):
        if any(word in f"batchgen {command}" for word in OTHER_MACHINES):
            continue
        if "report_to=trackio" in command and find_spec("trackio") is None:
            continue
        for content, folder in files:
            Path({"second": "job.yaml", "exam": "exam.yaml"}[folder]).write_text(content)
        arguments = shlex.split(command.partition(" > ")[0], comments=True)
        if arguments[0] not in VERBS or arguments[0] == "plan":
            arguments += ["model=hf", f"model.path={model}"]
        if arguments[0] == "init":
            Path("job.yaml").unlink()
        allowed = (0, 1, 3) if arguments[0] == "plan" else (0, 3)
        assert run_command(arguments) in allowed, command
        ran += 1
    assert ran >= 15
