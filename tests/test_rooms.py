"""Every folder of batchgen/ and engine/ is a room with one subject, and rooms stand in an order.

A file imports from its own room and from rooms above it in these tables. Imports for types alone
and imports inside functions count: they say as much of who needs whom.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from check_house import import_circles, module_name, package_files

ROOT = Path(__file__).parents[1]
MOST_FILES, MOST_TESTS = 13, 20

ENGINE = {
    "base": "what steps put out, the engine's options, memory and copies of the device",
    "images": "pictures of rows, and what the engine knows of them",
    "constraint/regex": "regular expressions as the grammar library reads them",
    "constraint/json_schema": "JSON Schema as the grammar library reads it",
    "constraint": "what a row's text must be, compiled and matched",
    "sampling": "from logits to tokens",
    "caches": "what layers keep between forwards",
    "parallel": "several ranks that compute one model",
    "layers": "linear layers, norms, embeddings, rotary positions, slots for weights",
    "layers/vision": "the tower that makes features of images",
    "layers/feed_forward": "MLP and mixture of experts",
    "layers/mixers": "attention and recurrences",
    "models": "what all models share, and their registry",
    "models/transformer": "attention with an MLP",
    "models/sparse": "attention with experts",
    "models/mla": "latent attention",
    "models/hybrids": "gated delta networks between layers of attention",
    "loading/gguf": "GGUF files",
    "loading": "files of weights, of tokenizers, of configurations",
    "execution": "one forward: inputs, CUDA graphs, the runner",
    "memory": "how memory is divided, and warm-up of kernels",
    "rows": "a row from its request to its end",
    "scheduling": "which rows a step computes",
    "": "the loop of steps, and what a strategy is",
}
"""Folders of engine/, from those that need none of the others to the one that needs them all."""

BATCHGEN = {
    "util": "errors, paths, signals, digests, words",
    "config": "the keys of a job, their types and their values",
    "compose": "files and arguments become a configuration",
    "templates": "templates and expressions that strangers may write, within bounds",
    "texts": "values, rows and tables as text",
    "texts/math": "formulas as MathML",
    "leases": "how processes that share a folder or a bucket agree",
    "storage": "a job's folder on a disk or in an object store",
    "images": "images of rows: found, sized, decoded ahead",
    "pipelines/record": "in which folders the steps of a pipeline write",
    "shards/parsed": "answers in JSON as columns of their types",
    "shards": "rows in journals and Parquet files",
    "costs": "what rows and jobs took of the device",
    "metrics": "metrics.json: what a job has counted, and what took its time",
    "grading/mathematics/reading": "mathematical answers become trees",
    "grading/mathematics": "whether two mathematical answers are the same",
    "grading": "the steps that extract and grade answers",
    "folder": "what else lies in a job's folder, and its reader",
    "pipelines/facts": "how many rows each step of a pipeline had, and the page that says so",
    "tables": "files of many formats as tables",
    "dataset": "rows of a data set",
    "ngrams": "what texts have in common, and which are nearly the same",
    "prompts": "rows become token ids",
    "constraint": "constraints of rows",
    "model": "a model's files and what the engine makes of them",
    "texts/tokens": "token ids as text for people",
    "grades": "grading of a whole job, and its files",
    "upstream": "rows that are answers of other jobs",
    "steps": "steps that choose, split and join rows",
    "row_index": "which rows a job has after its steps, and where each comes from",
    "publish": "sets of rows out of complete jobs",
    "publish/trainers": "files that trainers read",
    "publish/hub": "folders pushed to the hub",
    "scoring": "scores, intervals and comparisons",
    "resolve": "a configuration becomes an opened job",
    "rows": "one row as HTML and as text",
    "trace": "from a row back to where it came from",
    "report": "report.html",
    "forecast": "how long a job will take",
    "workers": "which worker computes which shard",
    "waves": "further samples of a row, until enough are valid",
    "budget": "what a job may use, and has used",
    "reuse": "rows that are copied from older jobs instead of being computed",
    "generation": "rows through the engine, in turns with other jobs",
    "jobs": "a job from its first row to its last",
    "sharing": "several jobs in one engine",
    "launchers": "workers on this machine, on Ray, on Slurm",
    "python": "the calls of Python programs",
    "plugins": "models of evaluation harnesses, which this engine serves",
    "batch_files": "batch files of OpenAI as jobs",
    "planning": "what a job will read, need and cost",
    "pipelines": "several jobs in one file, each of which may read others",
    "proof/audit": "rows of a folder that are computed again and compared",
    "proof": "locks, and the sets that are made again from them",
    "viewer/rows": "the rows that the viewer finds, filters and sorts",
    "viewer": "the pages of `batchgen view`",
    "cli": "the command line",
    "cli/verbs": "a module for each verb",
    "cli/verbs/pipelines": "the verbs of pipelines alone",
    "cli/verbs/publishing": "the verbs that write data for others",
    "cli/verbs/proving": "the verbs that prove where data come from",
    "": "the command",
}
"""Folders of batchgen/, in the same way."""

SAME_NAMES = {"grade"}
"""The names of verbs that modules elsewhere have, too."""


def imported(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def all_imports(*packages: str) -> dict[Path, set[Path]]:
    """Which file of the packages imports which other one."""
    files = [file for package in packages for file in package_files(ROOT, package)]
    modules = {module_name(file): file for file in files}
    graph = {}
    for file in files:
        names = imported(ROOT / file)
        found = (modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names)
        graph[file] = {target for target in found if target not in (None, file)}
    return {file: {t for t in targets if t is not None} for file, targets in graph.items()}


def room(file: Path, package: str) -> str:
    return "" if file.parent == Path(package) else str(file.parent.relative_to(package))


@pytest.mark.parametrize(("package", "rooms"), [("engine", ENGINE), ("batchgen", BATCHGEN)])
def test_no_import_goes_up(package: str, rooms: Mapping[str, str]) -> None:
    order = {name: place for place, name in enumerate(rooms)}
    files = package_files(ROOT, package)
    assert {room(file, package) for file in files} == set(rooms), "a folder without its line"
    wrong = []
    for file, targets in all_imports(package).items():
        for target in targets:
            if order[room(target, package)] > order[room(file, package)]:
                wrong.append(f"{file} imports {target}")
    assert wrong == []


def test_no_files_import_each_other() -> None:
    graph = all_imports("kernels", "engine", "strategies", "batchgen")
    assert import_circles(graph) == []


def test_a_folder_has_few_files() -> None:
    folders = Counter[Path]()
    for package in ("batchgen", "engine", "kernels", "strategies"):
        folders.update(file.parent for file in package_files(ROOT, package))
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


def test_a_module_is_known_by_its_name() -> None:
    """A name that two rooms use tells nothing without its folder."""
    places = defaultdict(list)
    for package in ("batchgen", "engine"):
        for file in package_files(ROOT, package):
            if file.stem not in ("__init__", *SAME_NAMES):
                places[file.stem].append(str(file))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
