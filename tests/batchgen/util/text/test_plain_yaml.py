import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.config.compose.compose_config import compose, compose_groups
from batchgen.config.compose.job_file import read_job_text
from batchgen.config.compose.load_config import resolved
from batchgen.pages.viewer.jobs_below import config_fault
from batchgen.pipelines.proof.lock_file import LockFile
from batchgen.pipelines.publish.trainers.conversations import _parsed
from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import DEEPEST, MOST_BYTES, MOST_VALUES, load_yaml, yaml_text

ROOT = Path(__file__).parents[4]


def repeated(first: str, form: str) -> str:
    """Lines of which each has nine aliases of the one before."""
    lines = [f"a: &a {first}"]
    for before, name in pairwise("abcdefghi"):
        lines.append(f"{name}: &{name} {form % ','.join([f'*{before}'] * 9)}")
    return "\n".join(lines)


HOSTILE = {
    "lists": (repeated("[x,x,x,x,x,x,x,x,x]", "[%s]"), "line 5: with its aliases expanded"),
    "mappings": (repeated("{k: 1}", "{k: [%s]}"), "with its aliases expanded"),
    "merges": (repeated("{k: 1, l: 2}", "{<<: [%s]}"), "with its aliases expanded"),
    "keys": ("a: &a [x]\n? [*a, *a]\n: b", "needs quotes"),
    "texts": (f"a: &a {'x' * 10**6}\nb: [{'*a, ' * 9000}]", "with its aliases expanded"),
    "values": (f"a: [{'b, ' * MOST_VALUES}]", "with its aliases expanded"),
    "itself": ("a: &a {b: [*a]}", "\\*a is used inside &a"),
    "itself, merged": ("a: &a {<<: *a}", "\\*a is used inside &a"),
    "undefined": ("a: *b", "found undefined alias"),
    "depth": (f"a: {'[' * 70}{']' * 70}", f"nested more than {DEEPEST} deep"),
    "depth of libyaml": (f"a: {'[' * 10**5}", "depth|more than"),
    "depth of aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000)),
        f"line 64: lists and mappings are nested more than {DEEPEST} deep",
    ),
    "block keys": ("? " * 10**5, f"nested more than {DEEPEST} deep"),
    "code": ("a: !!python/object/apply:os.system [id]", "tag !!python/object/apply:os.system"),
    "code by %TAG": ("%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system x", "tag !!python"),
    "set": ("a: !!set {b, c}", "the tag !!set"),
    "pairs": ("a: !!omap [b: 1]", "the tag !!omap"),
    "bytes": ("a: !!binary YQ==", "the tag !!binary"),
    "own tag": ("a: !mine b", "the tag !mine"),
    "no integer": ("a: !!int b", "a malformed number"),
    "digits": (f"a: {'1' * 5000}", "a malformed number"),
    "two files": ("a: 1\n---\nb: 2", "another document"),
    "no YAML": ("a: [", "not YAML"),
    "control": ("a: \x01", "is not YAML"),
    "size": ("#" * (MOST_BYTES + 1), "more than 1 MiB"),
    "long names": (f"? {'A' * 2000}\n: {{b: 1}}", "more than 1000 characters"),
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_a_hostile_file_is_a_clear_word(kind: str) -> None:
    text, message = HOSTILE[kind]
    with pytest.raises(ConfigError, match=message) as error:
        read_job_text(text, Path("job.yaml"))
    assert "job.yaml" in str(error.value) and len(str(error.value)) < 400


@pytest.mark.quick(2, thorough=6)
@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_every_reader_has_the_bounds(kind: str, tmp_path: Path) -> None:
    text, message = HOSTILE[kind]
    if kind in ("keys", "long names"):
        pytest.skip("a mistake in job files alone")
    file = tmp_path / "conf/sampling/theirs.yaml"
    file.parent.mkdir(parents=True)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/manifest.json").write_text("{}")
    for path in (file, tmp_path / "a.lock", tmp_path / "job/config.yaml"):
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose_groups({"sampling": "theirs"}, folders=[tmp_path / "conf"])
    with pytest.raises(ConfigError, match=message):
        LockFile.read(tmp_path / "a.lock")
    with pytest.raises(ConfigError, match=message):
        _parsed(text)
    assert str(tmp_path / "job/config.yaml") in config_fault(tmp_path / "job")


def test_aliases_and_merges_within_the_bounds_are_taken() -> None:
    text = "a: &a {x: 1, y: [1.5, null, yes]}\nb: {<<: *a, x: 2}\nc: [*a, *a]\nd: !!str 7\ne: ! 8"
    assert load_yaml(text, "f") == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["2026-11-25", "2026-99-99", "12:30", "1:30.5", "=", "+1:2:3"])
def test_what_yaml_makes_other_things_of_is_text(text: str) -> None:
    found = load_yaml(f"a: {text}\nb: [{text}]\n{text}: c", "f")
    assert found == {"a": text, "b": [text], text: "c"}


@pytest.mark.parametrize(
    "text", ["1", "-1_000", "0x1F", "017", "1.5e+3", ".5", ".inf", "~", "on", ""]
)
def test_plain_values_are_as_before(text: str) -> None:
    assert load_yaml(f"a: {text}", "f") == yaml.safe_load(f"a: {text}")


def test_one_loader_reads_all_yaml() -> None:
    """Other calls than these would pass by its bounds."""
    reads = {"load", "safe_load", "load_all", "safe_load_all", "full_load", "unsafe_load"}
    reads |= {"parse", "scan", "compose", "compose_all", "full_load_all", "unsafe_load_all"}
    found = set()
    for folder in ("batchgen", "engine", "strategies", "kernels", "conf"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search("yaml|OmegaConf", text := path.read_text()) is None:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module == "yaml":
                    found.add(path.name)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    if node.attr in {"yaml": reads, "OmegaConf": {"load"}}.get(node.value.id, ()):
                        found.add(path.name)
    assert found == {"plain_yaml.py"}


REFERENCES: dict[str, list[Any]] = {
    "doubled": [f"${{prompt.template_kwargs.a{i}}}" * 2 for i in range(1, 40)],
    "relative": [f"${{.a{i}}}" * 2 for i in range(1, 40)],
    "brackets": [f"${{prompt[template_kwargs][a{i}]}}" * 2 for i in range(1, 40)],
    "lists": [[f"${{prompt.template_kwargs.a{i}}}"] * 3 for i in range(1, 40)],
    "many": ["${sampling.seed}" * 40],
    "nested": ["${" * 2000 + "x" + "}" * 2000],
    "named by another": ["${prompt.${sampling.seed}}"],
    "itself": ["${prompt.template_kwargs.a0}"],
    "around itself": ["${prompt}"],
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", sorted(REFERENCES))
def test_references_come_to_an_end(kind: str) -> None:
    values = {f"a{i}": value for i, value in enumerate(REFERENCES[kind])}
    values[f"a{len(values)}"] = "xx"
    with pytest.raises(ConfigError, match=r"references|cannot be resolved|cannot contain another"):
        compose({"prompt.template_kwargs": values, "dataset.path": "rows.jsonl"})


def test_references_within_the_bounds_are_resolved() -> None:
    values: dict[str, Any] = {
        "a": "${.b}-${prompt.template_kwargs.c[0]}",
        "b": "${sampling.seed}",
        "c": ["x"],
    }
    values["d"] = "\\${sampling.seed}" * 100
    config = compose({"prompt.template_kwargs": values, "dataset.path": "rows.jsonl"})
    values |= {"a": "0-x", "b": 0, "d": "${sampling.seed}" * 100}
    assert resolved(config)["prompt"]["template_kwargs"] == values


def test_what_is_written_is_read_as_it_was() -> None:
    values = {
        "b": [1, 1.5, None, "1", "yes", " a ", "${x}\n"],
        "a": {"text": "é 😀", "": "x " * 60},
    }
    assert load_yaml(yaml_text(values), "f") == values
    assert "é 😀" in yaml_text(values)
