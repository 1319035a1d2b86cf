"""`batchgen validate`: which shards it finds valid, which not, and what it reports of a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Features
from jsonschema import Draft202012Validator

from batchgen.cli.verbs.validate import SHOWN, Report, main, validate
from batchgen.config.compose.load_config import constraint_config
from batchgen.config.groups.constraint_config import NoConstraintConfig
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.inputs.constraint.text_checks import CHECKED_BY, Unchecked, make_check
from batchgen.inputs.dataset.row_source import open_dataset
from batchgen.jobs.run.run_job import execute_job
from batchgen.util.errors import ConfigError, JobError
from tests.support.jobs.fake_job import FakeJob, FakeSource
from tests.support.jobs.forked import run_forked

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
Answers = tuple[tuple[str, str, bool | None], ...]


def check(text: str, value: Any = None, **group: Any) -> str | None:
    """Why the text does not keep the constraint; `value` stands where rows have their own."""
    key = {} if group["kind"] == "json" else {"column": "c"}
    config = constraint_config(group | key)
    assert not isinstance(config, NoConstraintConfig)
    return make_check(config, value)(text)


TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
}
GRAMMAR = 'root ::= "a" [0-9]+ | "é"'
JSON, SCHEMA = {"kind": "json"}, {"kind": "json_schema"}
TEXTS: list[tuple[dict[str, Any], Any, str, str | None]] = [
    (SCHEMA, PERSON, '{"age":1}', None),
    (SCHEMA, PERSON, '{"age":"1"}', "$.age: '1' is not of type 'integer'"),
    (SCHEMA, PERSON, '{"age":1', "not JSON: "),
    (SCHEMA, PERSON, '{"age":NaN}', "not JSON: NaN is not a JSON number"),
    (SCHEMA, PERSON, "", "not JSON: "),
    (SCHEMA, PERSON, '{"age": 1}', "more than 0 whitespace characters in a row between tokens"),
    (SCHEMA, PERSON, '{"age":1}\n', "more than 0 whitespace"),
    (SCHEMA | {"max_whitespace": 2}, PERSON, '{ "age" :\n\t1}', None),
    (SCHEMA | {"max_whitespace": 2}, PERSON, '{   "age":1}', "more than 2 whitespace"),
    (SCHEMA, {"type": "string"}, '"a  \\" \\\\  b"', None),
    (SCHEMA, {"type": "string", "format": "date"}, '"2024-01-31"', None),
    (SCHEMA, {"type": "string", "format": "date"}, '"2024-02-31"', "$: '2024-02-31' is not a 'da"),
    (SCHEMA, {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}]},
     "[2]", "$[0]: 1 was expected"),
    (JSON, None, '{"a":[{}]}', None),
    (JSON, None, "[]", "$: [] is not of type 'object'"),
    ({"kind": "regex"}, "[a-c]+", "abc", None),
    ({"kind": "regex"}, "[a-c]+", "abcd", "the pattern does not match it"),
    ({"kind": "regex"}, "a.b", "a\nb", "the pattern does not match it"),
    ({"kind": "regex"}, "(?<n>a)", "a", None),  # not Python's: xgrammar reads it
    ({"kind": "choice"}, ["yes", "no"], "no", None),
    ({"kind": "choice"}, ["yes", "no"], "n", "not one of the choices"),
    ({"kind": "grammar"}, GRAMMAR, "a12", None),
    ({"kind": "grammar"}, GRAMMAR, "é", None),
    ({"kind": "grammar"}, GRAMMAR, "a", "the grammar expects more"),
    ({"kind": "grammar"}, GRAMMAR, "a1b", "the grammar does not allow it"),
    ({"kind": "structural_tag"}, TAG, "<a>x</a>", None),
    ({"kind": "structural_tag"}, TAG, "<a>x", "the grammar expects more"),
    ({"kind": "choice", "start_after": "::"}, ["a"], "x::a", None),
    ({"kind": "choice", "start_after": "::"}, ["a"], "::\n\na", None),
    ({"kind": "choice", "start_after": "::"}, ["a"], "::     a", "not one of the choices"),
    ({"kind": "choice", "start_after": "::"}, ["a"], "a::b::a", "not one of the choices"),
    (JSON | {"start_after": "::"}, None, "x:: {}", None),
    (JSON | {"start_after": "::"}, None, "x::{ }", "more than 0 whitespace"),
]  # fmt: skip


@pytest.mark.parametrize(("group", "value", "text", "reason"), TEXTS, ids=str)
def test_checks(group: dict[str, Any], value: Any, text: str, reason: str | None) -> None:
    found = check(text, value, **group)
    assert found == reason if reason is None else (found or "").startswith(reason)


@pytest.mark.parametrize(
    ("group", "value", "text", "why"),
    [
        (SCHEMA, {"$ref": "https://example.org/x"}, "1", "https://example.org/x"),
        (SCHEMA, {"type": "string", "pattern": r"\p{L}"}, '"a"', "is not a 'regex'"),
        (SCHEMA, {}, "[" * 100_000, "RecursionError"),
        (SCHEMA, {}, "9" * 5000, "4300"),
        ({"kind": "grammar"}, "root ::= (", "a", "xgrammar: "),
        ({"kind": "choice", "start_after": "</think>"}, ["a"], "a", "'</think>' is not in the te"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_checked(group: dict[str, Any], value: Any, text: str, why: str) -> None:
    with pytest.raises(Unchecked, match=why):
        check(text, value, **group)


def test_no_schema_is_looked_up_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", asked.append)
    with pytest.raises(Unchecked):
        check("1", {"$ref": "https://example.org/y"}, **SCHEMA)
    assert not asked


def job(out: Path, constraint: dict[str, Any], answers: Answers, **fields: Any) -> FakeJob:
    fields = {"rows": len(answers), "samples": 1, "bad": False} | fields
    return FakeJob(str(out), constraint=constraint, answers=answers, **fields)


ANSWERS: Answers = (
    ('{"age":1}', "stop", True),
    ('{"age":2}', "length", True),
    ('{"age":', "length", False),
    ('{"age":4}', "length", False),  # cut is not valid, whatever it looks like
    ('{"age', "constraint_conflict", False),
    ('{"a', "stop", False),
)


def test_every_row_is_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Rows 0, 13 and 17 fail.
    job(tmp_path, {"kind": "json_schema", "schema": PERSON}, ANSWERS, rows=18, bad=True).run()
    report = validate(tmp_path)
    assert report.rows == 18
    assert report.counts == {"valid": 4, "cut": 6, "conflict": 3, "stopped": 2, "error": 3}
    capsys.readouterr()
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "rows                 18  checked by jsonschema and its format checker\n" in text
    assert "\nvalid                 4  satisfied, and checked\n" in text
    assert "\ninvalid               0  satisfied according to the engine, but INVALID\n" in text
    assert "\ncut                   6  ended by sampling.max_new_tokens before it was" in text
    assert "unchecked" not in text and "unconstrained" not in text


def test_invalid_rows_are_named_and_fail_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Answers = (('{"age":1}', "stop", True), ('{"age":1.5}', "stop", True))
    job(tmp_path, {"kind": "json_schema", "schema": PERSON}, answers, rows=30).run()
    capsys.readouterr()
    assert main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "\nvalid                15  " in text and "\ninvalid              15  " in text
    named = [line for line in text.splitlines() if line.startswith("    ")]
    assert len(named) == SHOWN
    assert named[0] == "    row id1, sample 0: $.age: 1.5 is not of type 'integer'"


def test_a_row_that_was_not_constrained_is_invalid(tmp_path: Path) -> None:
    job(tmp_path, {"kind": "regex", "pattern": "a"}, (("a", "stop", None),)).run()
    report = validate(tmp_path)
    assert report.counts == {"invalid": 1}
    assert report.problems["invalid"] == [
        "row id0, sample 0: the constraint was not applied to the row"
    ]


def test_each_rows_own_constraint(tmp_path: Path) -> None:
    answers: Answers = (("q0", "stop", True), ("q1", "stop", True), ("q1", "stop", True))
    job(tmp_path, {"kind": "regex", "column": "question"}, answers).run()
    report = validate(tmp_path)
    assert report.counts == {"valid": 2, "invalid": 1}
    assert report.problems["invalid"] == ["row id2, sample 0: the pattern does not match it"]


class SchemaSource(FakeSource):
    """Rows with a schema as a struct, whose keys Arrow fills up in the output, and rows without."""

    schema = FakeSource.schema.append(
        pa.field("schema", pa.struct([("type", pa.string()), ("const", pa.string())]))
    )
    features = Features.from_arrow_schema(schema)

    def rows(self, start: int = 0) -> Any:
        cells = [{"type": "string"}, {"const": "b"}, None]
        for row in super().rows(start):
            yield replace(row, fields=row.fields | {"schema": cells[row.index % 3]})


def test_schemas_in_a_struct(tmp_path: Path) -> None:
    answers: Answers = (
        *(('"a"', "stop", True), ('"b"', "stop", True), ("x", "stop", None)),
        *(('"c"', "stop", True), ('"c"', "stop", True), ("y", "stop", None)),
    )
    fake = job(tmp_path, {"kind": "json_schema", "column": "schema"}, answers)
    execute_job(fake.config(), replace(fake.parts(), source=SchemaSource(6)))
    report = validate(tmp_path)
    assert report.counts == {"valid": 3, "invalid": 1, "unconstrained": 2}
    assert report.problems["invalid"] == ["row id4, sample 0: $: 'b' was expected"]


MIXED: list[list[Any]] = [
    # A struct of which datasets keeps a part as JSON, and null fills up another.
    [
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": 1}}},
    ],
    # A column of JSON, with a null of its own.
    [{"properties": {"a": {"const": None}}}, {"type": "object"}],
]


@pytest.mark.parametrize("column", ["schema", "task.schema"])
@pytest.mark.parametrize("schemas", MIXED, ids=["struct", "JSON"])
def test_schemas_that_datasets_keeps_as_json(
    tmp_path: Path, schemas: list[Any], column: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    cells = [*schemas, None, *schemas, *schemas]
    fields: list[dict[str, Any]] = [{"schema": cell} for cell in cells]
    if column == "task.schema":
        fields = [{"task": task} for task in fields]
    rows.write_text("".join(json.dumps(row) + "\n" for row in fields))
    texts = ['{"a":"x"}', '{"a":null}', "free", '{"a":null}', '{"a":1}', '{"a":2}', '{"a":0}']
    answers = tuple(
        (text, "stop", cell is not None or None) for text, cell in zip(texts, cells, strict=True)
    )
    fake = job(tmp_path / "out", {"kind": "json_schema", "column": column}, answers)
    source = open_dataset(DatasetConfig(kind="files", path=str(rows)))
    execute_job(fake.config(), replace(fake.parts(), source=source))
    report = validate(tmp_path / "out")
    assert report.counts["unconstrained"] == 1
    wrong = [problem.split(":")[0].split(",")[0] for problem in report.problems["invalid"]]
    expected = {
        i
        for i, (text, schema) in enumerate(zip(texts, cells, strict=True))
        if schema is not None and not Draft202012Validator(schema).is_valid(json.loads(text))
    }
    assert wrong == [f"row {i}" for i in sorted(expected)] and len(expected) >= 2


def test_unchecked_rows_are_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constraint = {"kind": "choice", "choices": ["a"], "start_after": "</think>"}
    job(tmp_path, constraint, (("a", "stop", True),)).run()
    capsys.readouterr()
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "\nvalid                 0  " in text and "\nunchecked             1  " in text
    assert "row id0, sample 0: '</think>' is not in the text" in text


class NotCopied(FakeSource):
    schema = FakeSource.schema.remove(0)

    def passthrough(self, row: Any) -> dict[str, Any]:
        return {name: row.fields[name] for name in self.schema.names}


def test_what_is_no_finished_job_with_constraints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(out: Path) -> str:
        with pytest.raises(ConfigError) as raised:
            validate(out)
        return str(raised.value)

    assert (
        refused(tmp_path)
        == f"{tmp_path} is not the output of a job (has no manifest.json): give a job's output.dir"
    )
    FakeJob(str(tmp_path / "free"), rows=2).run()
    assert (
        refused(tmp_path / "free")
        == f"the job in {tmp_path}/free has no constraint: there is nothing to check"
    )
    fake = job(tmp_path / "own", {"kind": "regex", "column": "question"}, ANSWERS)
    execute_job(fake.config(), replace(fake.parts(), source=NotCopied(2)))
    assert refused(tmp_path / "own") == (
        "the rows' constraints are in the dataset column 'question', which the job did not copy "
        f"to {tmp_path}/own: list it in dataset.columns and run the job again"
    )
    stopped = job(tmp_path / "half", {"kind": "json"}, ANSWERS, rows=50, fail_at_step=3)
    with pytest.raises(RuntimeError):
        stopped.run()
    assert refused(tmp_path / "half").startswith("the job is not complete")
    (tmp_path / "half/metrics.json").unlink()
    assert "is not complete" in refused(tmp_path / "half")
    capsys.readouterr()
    assert main([str(tmp_path / "half")]) == 2
    assert capsys.readouterr().err.startswith("batchgen: the job is not complete ")


def test_a_damaged_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, {"kind": "json"}, ANSWERS).run()
    (tmp_path / "data/part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(JobError, match="is damaged"):
        validate(tmp_path)
    assert main([str(tmp_path)]) == 2


def test_every_kind_says_what_checked_it() -> None:
    assert {*CHECKED_BY} == {
        *("json_schema", "json", "regex", "choice", "grammar", "structural_tag")
    }
    report = Report("jsonschema")
    assert report.rows == 0 and "checked by jsonschema" in str(report)


def test_the_command(tmp_path: Path) -> None:
    job(tmp_path, {"kind": "json"}, (("{}", "stop", True), ("[]", "stop", True))).run()
    found = run_forked("batchgen.cli.verbs.validate", [str(tmp_path)], tmp_path)
    assert found.returncode == 1 and found.stderr == ""
    assert "row id1, sample 0: $: [] is not of type 'object'" in found.stdout
    assert json.loads((tmp_path / "metrics.json").read_text())["constraint"]["satisfied"] == 2
