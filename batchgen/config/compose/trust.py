"""Decides whether a configuration may run code that does not belong to batchgen.

A configuration may name classes and functions by their import paths, and a launcher may run shell
commands. Whatever the user types, and whatever is in the user's conf/, is trusted. A file may come
from a stranger: it needs `--trust` for itself or for a folder that contains it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from batchgen.config.compose.overrides import parse_override
from batchgen.config.groups.class_names import class_short_name, is_own
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    STEP_LISTS,
    choice_values,
    choices,
)
from batchgen.config.groups.launcher_config import launcher_class
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path

_TARGET = "_target_"
_RUNNING_KEYS = {"RunTests": ("python",)}
"""Keys of steps whose values are executed."""

Named = tuple[str, str]
"""A key of a configuration, and the code that it names: an import path, or the value of a
launcher's key."""


@dataclass(frozen=True)
class Trust:
    """The code that a configuration may run.

    Attributes:
        sources: the files and folders of the configuration that the user does not trust; if there
            are none, any code may run.
        typed: the code that the user has typed, each as the second part of `Named`.
    """

    sources: tuple[Path, ...] = ()
    typed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, sources: Sequence[Path], trusted: Sequence[str], overrides: Sequence[str]) -> Self:
        """The trust in a configuration that is read from `sources`, with typed arguments. `trusted`
        are the files and folders of `--trust`.

        Raises:
            ConfigError: no source is in one of the trusted folders.
        """
        trusted_paths = [user_path(path, "--trust").resolve() for path in trusted]
        # Each source with all paths that can be trusted in its place: itself and the folders above.
        paths_of = {source: {source.resolve(), *source.resolve().parents} for source in sources}
        for folder, path in zip(trusted, trusted_paths, strict=True):
            if not any(path in paths for paths in paths_of.values()):
                read = " and ".join(map(str, sources)) or "the command line alone"
                raise ConfigError(
                    f"--trust {folder}: no configuration is read from there, only from {read}"
                )
        untrusted = tuple(s for s, paths in paths_of.items() if paths.isdisjoint(trusted_paths))
        return cls(untrusted, frozenset(_typed(overrides)))

    def check(self, groups: Mapping[str, Any]) -> None:
        """Check that groups name only trusted code. References in them are resolved already.

        Raises:
            ConfigError: they name other code.
        """
        if not self.sources:
            return
        refusable = [(key, what) for key, what in foreign_code(groups) if what not in self.typed]
        if not refusable:
            return
        # What batchgen's own conf/ names is trusted, too.
        in_package = {what for _, what in _code_of_conf()}
        if refused := [f"{key} {what}" for key, what in refusable if what not in in_package]:
            flags = " ".join(f"--trust {source}" for source in self.sources)
            raise ConfigError(
                f"{' and '.join(map(str, self.sources))}: this is not batchgen's own code, and it "
                f"would run with your rights: {'; '.join(refused)}: if you trust whoever wrote it, "
                f"add {flags}"
            )


TYPED = Trust()
"""Trust in a whole configuration, which the user typed or the user's program made."""


def foreign_code(groups: Mapping[str, Any]) -> Iterator[Named]:
    """Yield the code that a configuration names and that does not belong to batchgen.

    Only classes of batchgen count as belonging to it, and only where a strategy, a step or a
    launcher is expected: calling its functions with arbitrary arguments could do harm.
    """
    launcher = dict(groups.get("launcher") or {})
    starter = launcher.pop(_TARGET, None)
    classes = {"strategy": groups.get("strategy")}
    if starter is not None:
        classes["launcher"] = {_TARGET: starter}
    for name in STEP_LISTS:
        classes |= {f"{name}[{i}]": step for i, step in enumerate(groups.get(name) or ())}
    for config_key, values in classes.items():
        for below, target in _targets(values, config_key):
            if below != f"{config_key}.{_TARGET}" or not is_own(target):
                yield below, target
        yield from _run_by(values, config_key)
    # A class that is not batchgen's may run any of its keys.
    is_ours = is_own(str(starter))
    for key in launcher_class(starter).running_keys if is_ours else launcher:
        if launcher.get(key):
            yield f"launcher.{key}", repr(launcher[key])


def _targets(value: Any, where: str) -> Iterator[Named]:
    """Yield all values of `_target_` in a value and in the values inside it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == _TARGET:
                yield f"{where}.{key}", str(item)
            else:
                yield from _targets(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _targets(item, f"{where}[{number}]")


def _run_by(value: Any, where: str) -> Iterator[Named]:
    """Yield the code that steps of batchgen run, in a value. Steps have a short name or
    `_target_`."""
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _run_by(item, f"{where}[{number}]")
    if not isinstance(value, Mapping):
        return
    for name, keys in _RUNNING_KEYS.items():
        options = value if class_short_name(str(value.get(_TARGET))) == name else value.get(name)
        for key in keys:
            if isinstance(options, Mapping) and options.get(key):
                yield f"{where}.{key}", repr(options[key])


def _typed(overrides: Sequence[str]) -> Iterator[str]:
    """Yield the code that typed arguments name."""
    for argument in overrides:
        override = parse_override(argument)
        if override.text is None:
            continue
        try:
            value = override.value()
        except ConfigError:  # the argument lists the values of a sweep
            continue
        if override.names[-1:] == [_TARGET]:
            yield str(value)
        elif override.group == "launcher":
            yield repr(value)
        yield from (what for _, what in _targets(value, override.key))
        yield from (what for _, what in _run_by(value, override.key))


def _code_of_conf() -> Collection[Named]:
    """The code that the choices of conf/ name."""
    names: list[Named] = []
    for group in GROUPS:
        for choice in choices(group):
            names += foreign_code({group: choice_values(group, choice)})
    for name in choices(EXPERIMENT):
        names += foreign_code(choice_values(EXPERIMENT, name))
    return names
