"""Constraints as users write them: every form, every mistake, and what reaches the engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Features, Value

from batchgen.config.compose.compose_config import compose
from batchgen.config.compose.config_identity import config_identity
from batchgen.config.compose.load_config import constraint_config, load_config, resolved
from batchgen.config.compose.trust import TYPED
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.outputs import Begun, RequestError
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image import Image
from batchgen.inputs.constraint.row_constraints import RowConstraints
from batchgen.inputs.dataset.source import Row
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import ConfigError
from batchgen.util.request_id import RequestId
from batchgen.util.text.row_json import value_reader
from tests.support.jobs.fake_job import FakeEngine, FakeJob
from tests.support.jobs.forked import run_forked
from tests.support.jobs.real_job import VOCAB, overrides, save_tokenizer

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
INLINE = "constraint.schema={type: object, properties: {name: {type: string}}, required: [name]}"
NO_JSON = "column 'c': must hold JSON text or a struct, got invalid JSON: "
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
GRAMMAR = 'root ::= "yes" | "no"\n'


def loaded(*overrides: str) -> JobConfig:
    return compose({}, overrides)


def test_no_constraint_unless_asked_for() -> None:
    config = loaded()
    assert config.constraint.kind == "none" and config.params.constraint is None
    assert "constraint" not in config_identity(config), "manifests of earlier jobs must stay valid"
    plain = {name: group for name, group in resolved(config).items() if name != "constraint"}
    assert load_config(plain, TYPED) == config, "a config.yaml from before must load"


def test_a_schema_is_one_however_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SCHEMA, indent=2))
    forms = [INLINE, f"constraint.schema={file}", f"constraint.schema='{json.dumps(SCHEMA)}'"]
    one, two, three = (loaded("constraint=json_schema", form) for form in forms)
    assert one == two == three
    assert one.params.constraint == Constraint.make("json_schema", SCHEMA)
    assert resolved(two)["constraint"]["schema"] == SCHEMA


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        (["json", "constraint.max_whitespace=2"], Constraint("json", max_whitespace=2)),
        (["regex", r"constraint.pattern='[A-D]\d'"], Constraint.make("regex", r"[A-D]\d")),
        (["choice", "constraint.choices=['yes', 'no']"], Constraint.make("choice", ["yes", "no"])),
        (["grammar", f"constraint.grammar='{GRAMMAR}'"], Constraint.make("grammar", GRAMMAR)),
        (
            ["structural_tag", f"constraint.tag={json.dumps(TAG).replace(chr(34), '')}"],
            Constraint.make("structural_tag", TAG),
        ),
        (
            ["json", "constraint.start_after='</think>'"],
            Constraint.make("json", None, start_after="</think>"),
        ),
        (
            ["json_schema", INLINE, "constraint.max_whitespace=1"],
            Constraint.make("json_schema", SCHEMA, max_whitespace=1),
        ),
    ],
    ids=str,
)
def test_every_kind(options: list[str], constraint: Constraint) -> None:
    config = loaded(f"constraint={options[0]}", *options[1:])
    assert config.params.constraint == constraint
    text = yaml.safe_dump(resolved(config))
    assert load_config(yaml.safe_load(text), TYPED) == config


def test_files_of_grammars_and_tags(tmp_path: Path) -> None:
    (tmp_path / "g.ebnf").write_text(GRAMMAR)
    (tmp_path / "t.json").write_text(json.dumps(TAG))
    grammar = loaded("constraint=grammar", f"constraint.grammar={tmp_path / 'g.ebnf'}")
    assert grammar.params.constraint == Constraint.make("grammar", GRAMMAR)
    tag = loaded("constraint=structural_tag", f"constraint.tag={tmp_path / 't.json'}")
    assert tag.params.constraint == Constraint.make("structural_tag", TAG)


def test_a_changed_file_is_another_job(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SCHEMA))
    arguments = ("constraint=json_schema", f"constraint.schema={file}")
    before = Manifest.build(config_identity(loaded(*arguments)), {})
    file.write_text(json.dumps(SCHEMA | {"required": []}))
    after = Manifest.build(config_identity(loaded(*arguments)), {})
    assert before.differences(after, lambda stop: None) == [
        'constraint.schema.required: ["name"] → []'
    ]


NULL = "is null: set it, or set constraint.column to the dataset column that holds each row's own"
ERRORS: list[tuple[list[str], str]] = [
    (["constraint.kind=xml"], "constraint.kind must be one of none, json_schema, json, regex, "),
    (["+constraint.schema={}"], "constraint.schema is not a key: choose among kind"),
    (["constraint=json", "+constraint.column=c"], "constraint.column is not a key: choose among"),
    (["constraint=json_schema"], f"constraint.schema {NULL}"),
    (["constraint=regex"], f"constraint.pattern {NULL}"),
    (["constraint=choice"], f"constraint.choices {NULL}"),
    (["constraint=grammar"], f"constraint.grammar {NULL}"),
    (["constraint=structural_tag"], f"constraint.tag {NULL}"),
    (
        ["constraint=regex", "constraint.pattern=a", "constraint.column=c"],
        "constraint.pattern and constraint.column are both set: choose one for all rows, or a "
        "column of each row's own",
    ),
    (
        ["constraint=json_schema", "constraint.schema=none.json"],
        "constraint.schema: the file 'none.json' cannot be read (No such file or directory): give "
        "the path of a file, or JSON text (which begins with {) or a mapping",
    ),
    (
        ["constraint=structural_tag", "constraint.tag=/"],
        "constraint.tag: the file '/' cannot be read (Is a directory): ",
    ),
    (
        ["constraint=grammar", "constraint.grammar=none.ebnf"],
        "constraint.grammar: the file 'none.ebnf' cannot be read (No such file or directory): give "
        "the path of a file, or EBNF (root ::= …)",
    ),
    (["constraint=json_schema", "constraint.schema='{a}'"], "constraint.schema is not JSON: "),
    (
        ["constraint=json_schema", """constraint.schema='{"a": 1, "a": 2}'"""],
        "constraint.schema is not JSON: the name 'a' appears twice in one object",
    ),
    (
        ["constraint=json_schema", """constraint.schema='{"const": NaN}'"""],
        "constraint.schema is not JSON: NaN is not a JSON number",
    ),
    (
        ["constraint=json", "constraint.max_whitespace=-1"],
        "constraint.max_whitespace must be at least 0, got -1",
    ),
    (
        ["constraint=json_schema", "constraint.column=c", "constraint.max_whitespace=-1"],
        "constraint.max_whitespace must be at least 0, got -1",
    ),
    (
        ["constraint=json", "constraint.start_after=''"],
        "constraint.start_after must be null or a text such as '</think>', got ''",
    ),
    (["constraint=choice", "constraint.choices=[]"], "constraint: "),
    (["constraint=regex", "constraint.pattern='(a'"], "constraint: "),
    (
        ["constraint=json", "sampling.ignore_eos=true"],
        "sampling.ignore_eos must be false with a constraint: a constrained row ends with EOS",
    ),
    (
        ["output.columns=[parsed]"],
        "output.columns: parsed is for JSON, but the constraint is none: use "
        "constraint=json_schema or constraint=json, or leave the column out",
    ),
    (
        ["constraint=regex", "constraint.column=c", "output.columns=[parsed]"],
        "output.columns: parsed is for JSON, but the constraint is regex: ",
    ),
]


@pytest.mark.quick(8)
@pytest.mark.parametrize(("options", "message"), ERRORS, ids=str)
def test_mistakes(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(*options)
    assert str(raised.value).startswith(message)
    assert str(raised.value) != "constraint: "


@pytest.mark.parametrize(
    ("choice", "key", "value", "message"),
    [
        ("json_schema", "schema", {"properties": {1: {}}},
         "schema.properties has the key 1, which must be text: quote it"),
        ("json_schema", "schema", {"anyOf": [{True: 2}]},
         "schema.anyOf[0] has the key True, which must be text: quote it"),
        ("json_schema", "schema", ["a"], "schema must be a mapping"),
        ("choice", "choices", [1],
         "choices[0] must be a string, got 1: to give it as text, quote it as '\"1\"'"),
        ("regex", "pattern", ["A-D"],
         "pattern must be a string, got ['A-D']: to give it as text, quote it as '\"…\"'"),
    ],
)  # fmt: skip
def test_mistakes_of_a_job_file(choice: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose({"constraint": {"choice": choice, key: value}})
    assert str(raised.value).startswith(f"constraint.{message}")


def test_a_file_that_is_not_a_schema(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    for content, why in ((b"{", "is not JSON: "), (b"[1]", "must hold a JSON object, got list")):
        file.write_bytes(content)
        with pytest.raises(ConfigError) as raised:
            loaded("constraint=json_schema", f"constraint.schema={file}")
        assert str(raised.value).startswith(f"constraint.schema: {file} {why}")
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"cannot be read .*codec"):
        loaded("constraint=json_schema", f"constraint.schema={file}")


def test_eos_ends_a_constrained_row_from_python_too() -> None:
    with pytest.raises(ValueError, match="ignore_eos must be false with a constraint"):
        RequestParams(ignore_eos=True, constraint=Constraint("json"))


# Each row's own


def _of(kind: str, cell: Any, **values: Any) -> Constraint | None:
    config = constraint_config({"kind": kind, "column": "c", **values})
    table = pa.table({"c": pa.array([cell])})
    features = Features.from_arrow_schema(table.schema)
    read = value_reader(features.to_dict()["c"])  # which leaves out what Arrow pads with null
    value = table["c"][0].as_py()
    fields = {"c": value if read is None else read(value)}
    return RowConstraints(config, features).of(Row(0, "0", fields))


@pytest.mark.parametrize(
    ("kind", "cell", "value"),
    [
        ("json_schema", json.dumps(SCHEMA), SCHEMA),
        ("json_schema", SCHEMA, SCHEMA),
        ("json_schema", SCHEMA | {"title": None, "allOf": None}, SCHEMA),
        (
            "json_schema",
            {"type": "object", "properties": {"a": {"enum": ["x", None]}, "b": None}},
            {"type": "object", "properties": {"a": {"enum": ["x", None]}}},
        ),
        ("regex", "a+", "a+"),
        ("choice", ["a", "b"], ["a", "b"]),
        ("choice", '["a", "b"]', ["a", "b"]),
        ("grammar", GRAMMAR, GRAMMAR),
        ("structural_tag", TAG, TAG),
    ],
)
def test_cells(kind: str, cell: Any, value: Any) -> None:
    made = _of(kind, cell, start_after="</think>")
    assert made == Constraint.make(kind, value, start_after="</think>")


@pytest.mark.parametrize(
    ("kind", "cell", "message"),
    [
        ("json_schema", 3, "column 'c': must hold JSON text or a struct, got 3"),
        ("json_schema", "{", "column 'c': "),
        ("json_schema", ["a"], "column 'c': must hold JSON text or a struct, got ['a']"),
        ("regex", {"a": 1}, "column 'c': must hold text, got {'a': 1}"),
        ("regex", "(", "column 'c': "),
        ("choice", [], "column 'c': "),
        ("choice", "a", "column 'c': must hold a list of texts, or JSON text of one: "),
        ("choice", "[1]", "column 'c': must hold a list of texts, or JSON text of one, got [1]"),
        ("choice", [1], "column 'c': must hold a list of texts, or JSON text of one, got [1]"),
        ("grammar", 1.5, "column 'c': must hold text (EBNF), got 1.5"),
        ("structural_tag", 1, "column 'c': must hold JSON text or a struct, got 1"),
        ("json_schema", {"const": datetime(2026, 1, 1)}, f"{NO_JSON}Object of type datetime"),
        ("json_schema", {"const": float("nan")}, f"{NO_JSON}Out of range float values"),
    ],
)
def test_bad_cells(kind: str, cell: Any, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        _of(kind, cell)
    assert raised.value.type == "bad_constraint"
    assert str(raised.value).startswith(message) and str(raised.value) != "column 'c': "


def test_a_row_without_a_cell_is_free() -> None:
    assert _of("regex", None) is None
    config = constraint_config({"kind": "regex", "column": "c"})
    assert RowConstraints(config, {"c": Value("string")}).of(Row(0, "0", {})) is None


def test_rows_share_what_is_made_of_equal_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    make = Constraint.make

    def counted(*args: Any, **kwargs: Any) -> Constraint:
        calls.append(args)
        return make(*args, **kwargs)

    monkeypatch.setattr(Constraint, "make", counted)
    rows = RowConstraints(constraint_config({"kind": "choice", "column": "c"}), {"c": None})
    made = [rows.of(Row(i, str(i), {"c": ["a", "bc"[i % 2]]})) for i in range(10)]
    assert len(calls) == 2 and made[0] is made[8] is not made[1]


# Whole jobs


@dataclass
class RecordingEngine(FakeEngine):
    asked: dict[RequestId, Constraint | None] = field(default_factory=dict)

    def add_request(
        self,
        request_id: RequestId,
        prompt_token_ids: list[int],
        params: RequestParams,
        answer: GivenAnswer | None = None,
        images: Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> bool:
        self.asked[request_id] = params.constraint
        return super().add_request(request_id, prompt_token_ids, params)


def _run(job: FakeJob) -> tuple[dict[RequestId, Constraint | None], list[dict[str, Any]], str]:
    engine = RecordingEngine(job)
    result = execute_job(job.config(), replace(job.parts(), port=lambda: engine))
    return engine.asked, pq.read_table(Path(job.out) / "data").to_pylist(), result.message


def test_bad_cells_are_error_rows_and_the_others_reach_the_engine(tmp_path: Path) -> None:
    constraint = {"kind": "choice", "column": "tags"}  # [], ["a"], ["a", "a"], [], …
    answers = (("a", "stop", True),)
    job = FakeJob(str(tmp_path), rows=9, bad=False, constraint=constraint, answers=answers)
    asked, rows, _ = _run(job)
    only_a = Constraint.make("choice", ["a"])
    assert asked == {RequestId("", i, s): only_a for i in (1, 4, 7) for s in range(2)}
    for row in rows:
        is_good = row["tags"] == ["a"]
        assert row["constraint_satisfied"] is (True if is_good else None)
        assert (row["error"] is None) == is_good
        if not is_good:
            assert row["error"]["type"] == "bad_constraint" and row["finish_reason"] == "error"
            assert row["error"]["message"].startswith("column 'tags': ")


def test_the_config_of_an_output_has_the_constraint_as_it_is(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"${a}": {"const": "\\${b}"}, "???": {"const": "?"}}}
    groups: dict[str, dict[str, Any]] = {
        "schema": {"kind": "json_schema", "schema": schema},
        "choice": {"kind": "choice", "choices": ["${c}", "\\\\${d}", "null", "1"]},
    }
    for kind, group in groups.items():
        job = FakeJob(str(tmp_path / kind), rows=1, bad=False, constraint=group)
        job.run()
        written = yaml.safe_load((tmp_path / kind / "config.yaml").read_text())
        assert load_config(written, TYPED).constraint == job.config().constraint


def test_cfg_job_shows_the_path(tmp_path: Path) -> None:
    arguments = ("--cfg", "job", "constraint=json_schema", "constraint.schema=s.json")
    found = run_forked("batchgen", arguments, tmp_path)
    assert found.returncode == 0, found.stderr
    shown = yaml.safe_load(found.stdout)["constraint"]
    assert (shown["kind"], shown["schema"]) == ("json_schema", "s.json")


def test_a_jobs_constraint_reaches_every_request(tmp_path: Path) -> None:
    constraint = {"kind": "regex", "pattern": "a+", "start_after": "::"}
    asked, rows, _ = _run(FakeJob(str(tmp_path), rows=5, constraint=constraint))
    assert {*asked.values()} == {Constraint.make("regex", "a+", start_after="::")}
    assert {row["constraint_satisfied"] for row in rows} == {None}


def test_no_constraint_no_column(tmp_path: Path) -> None:
    asked, rows, message = _run(FakeJob(str(tmp_path), rows=3))
    assert {*asked.values()} == {None} and "constraint_satisfied" not in rows[0]
    assert "constrained rows" not in message
    assert "Constraint" not in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "metrics.json").read_text())["constraint"] == {}


def test_summary_metrics_and_card_say_what_became_of_the_constraint(tmp_path: Path) -> None:
    answers = (
        *(("a", "stop", True), ("a", "length", True), ("a", "length", False)),
        *(("a", "constraint_conflict", False), ("a", "stop", False), ("a", "stop", None)),
    )
    constraint = {"kind": "regex", "pattern": "a+"}
    job = FakeJob(str(tmp_path), rows=18, constraint=constraint, answers=answers)
    _, rows, message = _run(job)
    counts = json.loads((tmp_path / "metrics.json").read_text())["constraint"]
    # Rows 0, 13 and 17 fail.
    assert counts == {
        "satisfied": 8,
        "cut": 6,
        "conflict": 6,
        "stopped": 6,
        "unconstrained": 4,
        "error": 6,
    }
    assert {row["finish_reason"] for row in rows} >= {"constraint_conflict", "length", "stop"}
    line = "constraint        satisfied 8, cut 6, conflict 6, stopped 6 of 26 constrained rows"
    assert line in message.splitlines()
    card = (tmp_path / "README.md").read_text()
    assert '- Constraint: regex, `{"pattern": "a+"}`' in card
    assert "8 satisfied (complete), 6 cut (ended by sampling.max_new_tokens" in card
    again = job.run()
    assert line in again.message.splitlines() and "complete already" in again.message


def test_a_job_with_another_constraint_refuses(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path), rows=3, constraint={"kind": "regex", "pattern": "a+"})
    job.run()
    other = replace(job, constraint={"kind": "regex", "pattern": "b+"})
    with pytest.raises(ConfigError, match=r'constraint\.pattern: "a\+" → "b\+"'):
        other.run()


def test_the_column_must_be_there(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path / "out"), constraint={"kind": "regex", "column": "c"})
    message = "constraint.column: the data set has no column 'c': choose among question, number"
    with pytest.raises(ConfigError, match=message):
        job.run()
    assert not (tmp_path / "out").exists()


# What is checked before weights load


def _parts(model: Path, rows: Path, *options: str) -> Any:
    return resolve_job(loaded(*overrides(model, rows, rows.parent / "out", *options)))


def _without(model: Path, folder: Path, name: str) -> Path:
    """A copy of the model without files of this pattern and without the EOS of its config."""
    copy = folder / "copy"
    shutil.copytree(model, copy)
    for file in copy.glob(name):
        file.unlink()
    for file in copy.glob("*config.json"):
        values = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in values.items() if "eos_token" not in k}))
    return copy


def test_a_constraint_needs_a_tokenizer_and_eos(model: Path, rows: Path, tmp_path: Path) -> None:
    bare = _without(model, tmp_path / "a", "tokenizer*")
    tokens = ("prompt=tokens", "prompt.token_ids_column=q", "~prompt.user")
    options = [o for o in overrides(bare, rows, tmp_path / "out") if "prompt.user" not in o]
    with pytest.raises(ConfigError, match=r"^constraint: a constraint is about text, and the mode"):
        resolve_job(loaded(*options, *tokens[:2], "constraint=json"))
    endless = _without(model, tmp_path / "b", "generation_config.json")
    with pytest.raises(ConfigError, match=r"^constraint: a constrained row ends with EOS, and nei"):
        _parts(endless, rows, "constraint=json")


def test_a_constraint_that_does_not_compile_is_a_mistake(
    model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: GrammarCompiler, constraint: Constraint) -> None:
        raise ConstraintError(f"cannot compile {constraint.text}")

    monkeypatch.setattr(GrammarCompiler, "compile", refuse)
    with pytest.raises(ConfigError, match=r"^constraint: cannot compile a\+$"):
        _parts(model, rows, "constraint=regex", "constraint.pattern=a+")
    _parts(model, rows, "constraint=regex", "constraint.column=q")  # nothing to compile yet


def test_the_order_of_properties_is_part_of_the_job(model: Path, rows: Path) -> None:
    orders = ("{a: {type: string}, b: {type: string}}", "{b: {type: string}, a: {type: string}}")
    prints = [
        _parts(
            model, rows, "constraint=json_schema", f"constraint.schema={{properties: {order}}}"
        ).fingerprints
        for order in orders
    ]
    assert prints[0]["constraint"] != prints[1]["constraint"]
    assert "constraint" not in _parts(model, rows).fingerprints


def test_parsed_must_find_the_marker(
    tiny_model: Callable[..., Path], rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama", **VOCAB), folder)
    save_tokenizer(folder)
    options = ("constraint=json", "output.columns=[parsed]")
    _parts(folder, rows, *options, "constraint.start_after='</think>'")
    with pytest.raises(ConfigError, match=r"^output\.columns: parsed needs to find .*'<eos>'"):
        _parts(folder, rows, *options, "constraint.start_after='<eos>'")
    _parts(folder, rows, "constraint=json", "constraint.start_after='<eos>'")
