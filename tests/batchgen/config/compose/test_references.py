"""`${…}` in a configuration takes the value of another key, and nothing else."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose
from batchgen.config.compose.value_references import refuse_resolvers
from batchgen.util.errors import ConfigError

ASKING = [
    "${oc.env:STRANGERS_SECRET}",
    "a ${ oc.env : STRANGERS_SECRET , none } b",
    "${oc.${dataset.kind}:STRANGERS_SECRET}",
    "${oc.decode:'${oc.env:STRANGERS_SECRET}'}",
    "${oc.create:{a: 1}}",
    "${oc.select:hydra}",
    "${now:%Y}",
    "${hydra:runtime.cwd}",
    "${hydra:job.num}",
    "${python_version:}",
]


@pytest.mark.quick(4)
@pytest.mark.parametrize("text", ASKING)
@pytest.mark.parametrize("form", ["job", "dry run", "sweep", "hydra", "resolve"])
def test_a_job_file_asks_nothing_of_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    form: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRANGERS_SECRET", "it-is-out")
    values = {"model": "nano_hybrid", "dataset": "demo", "prompt.system": text, "output.dir": "o"}
    Path("job.yaml").write_text(yaml.safe_dump(values))
    if form in ("sweep", "hydra") and text == "${hydra:job.num}":
        pytest.skip("the number of a job is Hydra's to say")
    arguments = {
        "job": ["job.yaml"],
        "dry run": ["job.yaml", "--dry-run"],
        "sweep": ["job.yaml", "-m", "sampling.seed=1,2"],
        "hydra": ["job.yaml", "hydra.job.name=x"],
        "resolve": ["job.yaml", "--cfg=job", "--resolve"],
    }[form]
    assert run_command(arguments) == 2
    said = capsys.readouterr()
    assert "prompt.system" in said.err and "only the value of another key" in said.err
    assert "it-is-out" not in said.out + said.err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize("key", ["score.subset", "model.name", "output.dir"])
def test_every_key_is_looked_at(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .*oc\.env"):
        compose({"dataset.path": "x", key: "${oc.env:HOME}"})
    with pytest.raises(ConfigError, match=r"^post\[0\]\.a\[1\]: .*oc\.env"):
        compose({"post": [{"_target_": "a.B", "a": [1, "${oc.env:HOME}"]}]})


@pytest.mark.parametrize("text", [r"\${oc.env:A}", r"\\\${oc.env:A}", "$oc.env", "{oc.env:A}"])
def test_a_text_is_a_text(text: str) -> None:
    refuse_resolvers({"a": text}, ())


def test_keys_are_taken() -> None:
    config = compose({"dataset.path": "x", "output.dir": "o/${model.name}-${.rows_per_shard}"})
    assert config.output.dir == f"o/{config.model.name}-{config.output.rows_per_shard}"


PIECES = st.lists(
    st.sampled_from(
        ["${", "}", "spy.x", "spy", "x", ":", ".", " ", "HOME", "b", "\\", "'", '"', "[", "]"]
    ),
    max_size=12,
).map("".join)


@given(PIECES)
def test_what_is_let_through_asks_nothing(text: str) -> None:
    """Whatever the grammar makes of a text, no resolver is called for one that is let through."""
    called: list[object] = []
    for name in ("spy", "spy.x"):
        OmegaConf.register_new_resolver(name, lambda *a: called.append(a), replace=True)
    with contextlib.suppress(ConfigError, OmegaConfBaseException):
        refuse_resolvers({"a": text, "b": "b"}, ())
        OmegaConf.to_container(OmegaConf.create({"a": text, "b": "b"}), resolve=True)
    for name in ("spy", "spy.x"):
        OmegaConf.clear_resolver(name)
    assert not called
