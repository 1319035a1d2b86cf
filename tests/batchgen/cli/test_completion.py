"""What TAB completes in bash, by the script that `--completion bash` prints."""

import shutil
import subprocess

import pytest

from batchgen.cli.completion import completion_script
from batchgen.util.errors import ConfigError

_TRIED = {
    "batchgen +experiment=gsm": "gsm8k",
    "batchgen +exper": "+experiment=aime24",
    "batchgen show out --ro": "--row --rows",
    "batchgen pipe.yaml solve.sampling.temp": "solve.sampling.temperature=",
    "batchgen pipe.yaml solve.model=nano_h": "nano_hybrid",
    "batchgen sampling.temp": "sampling.temperature=",
    "batchgen --ro": "",  # options of verbs are theirs alone
    "batchgen dataset.defau": "",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_groups_keys_steps_and_options_of_verbs_complete() -> None:
    ask = "".join(
        f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({line}); COMPREPLY=()\n'
        '_batchgen; echo "${COMPREPLY[@]}"\n'
        for line in _TRIED
    )
    done = subprocess.run(
        ["bash"], input=completion_script("bash") + ask, capture_output=True, text=True, check=True
    )
    found = dict(zip(_TRIED, done.stdout.splitlines(), strict=True))
    assert found.pop("batchgen +exper").split()[0] == _TRIED["batchgen +exper"]
    assert found == {line: said for line, said in _TRIED.items() if line in found}


def test_other_shells() -> None:
    fish = completion_script("fish")
    assert "__fish_seen_subcommand_from show' -a '--" in fish and "+experiment=gsm8k" in fish
    assert completion_script("zsh").count("bashcompinit") == 2
    with pytest.raises(ConfigError, match="give bash, zsh or fish"):
        completion_script("csh")
