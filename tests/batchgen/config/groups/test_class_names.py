"""Short names of classes, and the spelling of version 0.1.0, which goes on to be read."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from batchgen.config.compose.compose_config import compose_groups
from batchgen.config.compose.config_identity import config_identity
from batchgen.config.compose.job_file import read_job_text
from batchgen.config.compose.load_config import resolved
from batchgen.config.compose.trust import TYPED
from batchgen.config.groups.class_names import (
    _FIRST_PATHS,
    CLASSES,
    class_path,
    class_short_name,
    is_own,
    lasting_name,
    with_short_names,
)
from batchgen.config.groups.config_keys import choice_values, choices
from batchgen.util.errors import ConfigError

NAMES = [(key, name) for key, classes in CLASSES.items() for name in classes]


@pytest.mark.parametrize(("key", "name"), NAMES)
def test_every_spelling_names_the_class_where_it_is(key: str, name: str) -> None:
    path = class_path(name)
    assert resolve_name(path).__module__ == path.rpartition(".")[0]
    first = f"batchgen.{_FIRST_PATHS[name]}" if name in _FIRST_PATHS else name
    for spelling in (name, path, first):
        assert (class_short_name(spelling), class_path(spelling)) == (name, path)
        assert lasting_name(spelling) == first
        assert is_own(spelling)


@pytest.mark.parametrize("group", ["strategy", "launcher"])
def test_choices_have_short_names(group: str) -> None:
    named = {choice_values(group, choice)["_target_"] for choice in choices(group)} - {None}
    assert named == set(CLASSES[group])


def configured(values: dict[str, Any], *overrides: str) -> Any:
    from batchgen.config.compose.load_config import load_config

    return load_config(compose_groups(values, overrides).groups, TYPED)


LONG: dict[str, Any] = {
    "rows": [{"_target_": "batchgen.grading.choices.OrderChoices", "columns": ["a", "b"]}],
    "post": [{"_target_": "batchgen.grading.extract.Extract", "methods": ["boxed"]}],
    "strategy": {"_target_": "batchgen.strategies.ar_spec.strategy.ARSpecStrategy"},
    "launcher": {"_target_": "batchgen.launchers.local.LocalLauncher"},
}
SHORT = {
    "rows": [{"OrderChoices": {"columns": ["a", "b"]}}],
    "post": [{"Extract": {"methods": ["boxed"]}}],
    "strategy": {"_target_": "ar_spec"},
    "launcher": {"_target_": "local"},
}


def test_both_spellings_make_one_configuration() -> None:
    long, short = configured(LONG), configured(SHORT)
    assert long == short
    found = resolved(long)
    assert {key: found[key] for key in ("rows", "post")} == {k: SHORT[k] for k in ("rows", "post")}
    assert found["strategy"]["_target_"] == "ar_spec" and found["launcher"]["_target_"] == "local"
    assert with_short_names(LONG) == SHORT
    typed = configured(
        {}, "strategy=ar_spec", "launcher=local", "rows=[{OrderChoices: {columns: [a, b]}}]",
        "post=[{Extract: {methods: [boxed]}}]",
    )  # fmt: skip
    assert typed == short


def test_a_key_that_no_longer_exists_is_left_out_of_an_older_configuration() -> None:
    engine = {"row_tokens": None, "max_num_seqs": 8}
    assert with_short_names({"engine": engine}) == {"engine": {"max_num_seqs": 8}}
    assert engine["row_tokens"] is None
    text = "engine: {row_tokens: null, max_num_seqs: 8}"
    values, _ = read_job_text(text, Path("config.yaml"))
    assert values == {"engine": {"max_num_seqs": 8}}


def test_an_identity_is_the_one_of_version_0_1_0() -> None:
    found = config_identity(configured(SHORT))
    assert found["rows"] == LONG["rows"]
    assert found["strategy"]["_target_"] == LONG["strategy"]["_target_"]


def test_a_step_of_the_other_list_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"post\[0\]: Filter chooses or makes rows, and belongs in rows"
    ):
        configured({"post": [{"Filter": {"where": "a"}}]})


def test_classes_of_users_keep_their_paths() -> None:
    step = {"_target_": "mine.steps.Mark", "by": 1}
    assert resolved(configured({"post": [step]}))["post"] == [step]
    assert not is_own("mine.steps.Mark") and lasting_name("mine.steps.Mark") == "mine.steps.Mark"


@pytest.mark.parametrize("value", [None, 3, "text", [3], [{"_target_": 4}], {"_target_": None}])
def test_what_is_no_class_stays(value: Any) -> None:
    for key in CLASSES:
        assert with_short_names({key: value}) == {key: value}
