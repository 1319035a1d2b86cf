"""Arguments that Hydra cannot read get a message with the exact form to type."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.overrides import unreadable_override


@pytest.mark.parametrize(
    ("argument", "typed"),
    [
        ("output.dir=out/a=b", "'output.dir=\"out/a=b\"'"),
        ("prompt.user={{ question }}", "'prompt.user=\"{{ question }}\"'"),
        ("model.path=a(b", "'model.path=\"a(b\"'"),
        ('prompt.user=Say "hi" = {{ x }}', r"""'prompt.user="Say \"hi\" = {{ x }}"'"""),
        ("+prompt.system=é", "'+prompt.system=\"é\"'"),
    ],
)
def test_the_message_shows_what_to_type(argument: str, typed: str) -> None:
    message = unreadable_override(["-m", "sampling.n=2", argument])
    assert message is not None
    assert message.startswith(f"{argument} cannot be read (")
    assert message.endswith(f": {typed}")
    assert unreadable_override(shlex.split(typed)) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["output.dir=out", "output.columns=[logprobs]", "constraint.schema={type: object}"],
        ["~engine", "+experiment=synth", "'prompt.user=\"{{ q }}\"'"],
        ["--config-path", "runs/lr=1=2", "-cn", "a=b=c"],
        ["--config-path=runs/lr=1=2"],
        ["nonsense", "a b=c"],  # Hydra says what is wrong with a key
    ],
)
def test_what_hydra_reads_or_explains_is_left_to_it(arguments: list[str]) -> None:
    assert unreadable_override(arguments) is None


SPECIAL = st.text("=,:{}()[]\"'\\ \n#a1", max_size=12)


@given(SPECIAL | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$")))
@settings(deadline=None)
def test_the_quoted_form_means_what_was_typed(value: str) -> None:
    message = unreadable_override([f"output.dir={value}"])
    if message is not None:
        typed = message.rpartition("for Hydra: ")[2]
        (override,) = OverridesParser.create().parse_overrides(shlex.split(typed))
        assert (override.get_key_element(), override.value()) == ("output.dir", value)


def test_the_command_says_it_and_exits_with_2(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "batchgen", "output.dir=out/a=b"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
        timeout=120,
    )
    assert found.returncode == 2
    assert found.stderr == (
        "batchgen: output.dir=out/a=b cannot be read (mismatched input '=' expecting <EOF>): if "
        "the value is text, quote it twice, for the shell and for Hydra: "
        "'output.dir=\"out/a=b\"'\n"
    )
