"""Short names of batchgen's classes in configurations. They stay the same when files move.

    rows: [{Filter: {where: …}}]        strategy: {_target_: ar}

A configuration holds short names, in whatever form a user or an older file names a class. A class
of the user's has its import path. A job's *identity* (`config_identity.py`) and digests of it must
not change between versions, so they have the names of version 0.1.0: the *lasting* names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

OWN = "batchgen."
"""The beginning of the import paths of batchgen's classes."""
CLASSES: Mapping[str, Mapping[str, str]] = {
    "rows": {
        "Filter": "batchgen.inputs.steps.choose:Filter",
        "Keep": "batchgen.inputs.steps.choose:Keep",
        "Balance": "batchgen.inputs.steps.choose:Balance",
        "Dedupe": "batchgen.inputs.steps.dedupe:Dedupe",
        "Against": "batchgen.inputs.steps.against:Against",
        "Explode": "batchgen.inputs.steps.split:Explode",
        "Chunk": "batchgen.inputs.steps.chunk:Chunk",
        "Join": "batchgen.inputs.steps.join:Join",
        "Pick": "batchgen.inputs.steps.pieces:Pick",
        "Cross": "batchgen.inputs.steps.pieces:Cross",
        "Ruler": "batchgen.inputs.steps.ruler:Ruler",
        "OrderChoices": "batchgen.evals.graders.choices:OrderChoices",
    },
    "post": {
        "Extract": "batchgen.evals.graders.extract:Extract",
        "Grade": "batchgen.evals.graders.grade:Grade",
        "Instructions": "batchgen.evals.graders.instructions:Instructions",
        "RunTests": "batchgen.evals.graders.run_tests:RunTests",
        "Verdict": "batchgen.evals.graders.verdict:Verdict",
        "Majority": "batchgen.evals.graders.verdict:Majority",
        "ParseScore": "batchgen.evals.graders.parse_score:ParseScore",
        "ChoiceScore": "batchgen.evals.graders.parse_score:ChoiceScore",
    },
    "strategy": {
        "ar": "batchgen.strategies.ar.strategy:ARStrategy",
        "ar_spec": "batchgen.strategies.ar_spec.strategy:ARSpecStrategy",
        "dllm": "batchgen.strategies.dllm.strategy:DLLMStrategy",
        "canvas": "batchgen.strategies.canvas.strategy:CanvasStrategy",
    },
    "launcher": {
        "local": "batchgen.jobs.launchers.local:LocalLauncher",
        "ray": "batchgen.jobs.launchers.ray_launcher:RayLauncher",
    },
}
"""For each key that names classes: short name → `module:Class`."""
_FIRST_PATHS = {
    "Filter": "steps.choose.Filter",
    "Keep": "steps.choose.Keep",
    "Balance": "steps.choose.Balance",
    "Dedupe": "steps.dedupe.Dedupe",
    "Against": "steps.against.Against",
    "Explode": "steps.split.Explode",
    "Chunk": "steps.chunk.Chunk",
    "Join": "steps.join.Join",
    "Pick": "steps.pieces.Pick",
    "Cross": "steps.pieces.Cross",
    "OrderChoices": "grading.choices.OrderChoices",
    "Extract": "grading.extract.Extract",
    "Grade": "grading.grade.Grade",
    "ParseScore": "grading.parse_score.ParseScore",
    "ChoiceScore": "grading.parse_score.ChoiceScore",
    "ar": "strategies.ar.strategy.ARStrategy",
    "ar_spec": "strategies.ar_spec.strategy.ARSpecStrategy",
    "dllm": "strategies.dllm.strategy.DLLMStrategy",
    "local": "launchers.local.LocalLauncher",
    "ray": "launchers.ray_launcher.RayLauncher",
    "slurm": "launchers.slurm.SlurmLauncher",
}
"""Short name → import path, below `batchgen.`, in version 0.1.0, whose folders and files are still
read. It never changes; later classes are not in it."""
# Short name → import path; and import path in any version → short name.
_PATHS = {
    name: path.replace(":", ".") for classes in CLASSES.values() for name, path in classes.items()
}
_SHORT = {path: name for name, path in _PATHS.items()}
_SHORT |= {OWN + path: name for name, path in _FIRST_PATHS.items()}
SHORT_NAMES = tuple(_PATHS)
GONE = "slurm"
"""A launcher of version 0.1.0."""
_GONE_KEYS: Mapping[str, frozenset[str]] = {"engine": frozenset(["row_tokens"])}
"""Keys of version 0.1.0 that no longer exist and decide no answers, by group."""
_WITHOUT_SHORT_NAME = {"OrderChoices", *CLASSES["post"]} & _FIRST_PATHS.keys()
"""Steps that had no short names in identities of version 0.1.0."""


def class_short_name(target: str) -> str:
    """The short name of one of batchgen's classes, in whatever form it is named; for other classes
    the import path."""
    return _SHORT.get(target, target)


def class_path(target: str) -> str:
    """The import path of a class, in whatever form it is named."""
    return _PATHS.get(class_short_name(target), target)


def is_own(target: str) -> bool:
    """Whether a class belongs to batchgen."""
    return class_path(target).startswith(OWN)


def lasting_name(target: str) -> str:
    """The name of a class in digests, grade files and identities, which never changes.

    It is the import path in version 0.1.0, the short name of a later class, or the path of a user's
    class.
    """
    name = class_short_name(target)
    return OWN + _FIRST_PATHS[name] if name in _FIRST_PATHS else name


def lasting_step_name(target: str) -> str:
    """The name of a step of `rows` in fingerprints and identities: its short name if it had one in
    version 0.1.0 or is newer; otherwise its `lasting_name`."""
    name = class_short_name(target)
    return lasting_name(name) if name in _WITHOUT_SHORT_NAME else name


def with_lasting_names(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The plain groups of a configuration, with the names of steps and strategy that identities and
    addresses have in all versions."""
    renamed = dict(groups)
    if "strategy" in renamed:
        strategy = renamed["strategy"]
        renamed["strategy"] = {**strategy, "_target_": lasting_name(strategy["_target_"])}
    for key in ("rows", "post"):
        if key in renamed:
            renamed[key] = [_lasting_step(step) for step in renamed[key]]
    return renamed


def _lasting_step(step: Mapping[str, Any]) -> Mapping[str, Any]:
    name = next(iter(step))
    return {"_target_": lasting_name(name), **step[name]} if name in _WITHOUT_SHORT_NAME else step


def with_short_names(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The plain groups of a configuration of any version, or of an identity, with short names, and
    without the keys that `without_gone_keys` leaves out.

    Values that are neither a class nor a step stay as they are: files of strangers may hold
    anything.
    """
    renamed = without_gone_keys(groups)
    for key in ("strategy", "launcher"):
        if _names_class(group := renamed.get(key)):
            name = class_short_name(group["_target_"])
            # The launcher of a folder of version 0.1.0 may no longer exist, and is not needed.
            renamed[key] = {"_target_": None} if name == GONE else {**group, "_target_": name}
    for key in ("rows", "post"):
        if isinstance(steps := renamed.get(key), list):
            renamed[key] = [short_step(step) if _names_class(step) else step for step in steps]
    return renamed


def without_gone_keys(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of a configuration without the keys of version 0.1.0 that no longer exist. These
    decided no answers."""
    kept = dict(groups)
    for group, gone in _GONE_KEYS.items():
        if isinstance(values := kept.get(group), Mapping):
            kept[group] = {key: value for key, value in values.items() if key not in gone}
    return kept


def _names_class(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str)


def short_step(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step with `_target_` in the form that users write, by its short name if it has one."""
    options = {key: value for key, value in step.items() if key != "_target_"}
    name = class_short_name(step["_target_"])
    return {name: options} if name in _PATHS else {"_target_": name, **options}
