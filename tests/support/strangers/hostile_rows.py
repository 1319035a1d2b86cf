"""Attacks by rows of a data set, its columns, and the templates and constraints over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.parquet as pq

from tests.support.strangers.attack import Attack, Run, Work

_USER = "prompt.user={{ q }}"


def _rows(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _bad_row(work: Work, run: Run, error: str | None) -> str | None:
    """What is wrong if not the first row alone has this error (None: no row has any)."""
    if (wrong := run.refused(code=3 if error else 0)) is not None:
        return wrong
    tables = [pq.read_table(path) for path in sorted((work.path / "out/data").glob("*.parquet"))]
    errors = [row and row["type"] for table in tables for row in table["error"].to_pylist()]
    if errors != [error] + [None] * (len(errors) - 1) or len(errors) < 2:
        return f"the errors of the rows are {errors}"
    return None


def _constraint(
    title: str, kind: str, cell: str, good: str, error: str | None = "bad_constraint"
) -> Attack:
    """An attack by the constraint of one row, beside a row with a good one."""

    def attack(work: Work) -> str | None:
        path = work.rows(_rows({"q": "a", "c": cell}, {"q": "b", "c": good}))
        run = work.job(path, _USER, f"constraint={kind}", "constraint.column=c")
        return _bad_row(work, run, error)

    return _named(title, attack)


def _named(title: str, attack: Callable[[Work], str | None]) -> Attack:
    attack.__doc__ = title
    return attack


def _template(title: str, template: str) -> Attack:
    """An attack by a template that is harmless for one of two rows."""

    def attack(work: Work) -> str | None:
        path = work.rows(_rows({"q": "x", "n": 1}, {"q": "y", "n": 0}))
        run = work.job(path, f"prompt.user={{% if n %}}{template}{{% endif %}}{{{{ q }}}}")
        return _bad_row(work, run, "template_error")

    return _named(title, attack)


def chat_template(work: Work) -> str | None:
    """The chat template of a model builds gigabytes."""
    path = work.rows(_rows({"q": "x"}))
    template = "prompt.template_kwargs={chat_template: \"{{ 'a'|center(3000000000) }}\"}"
    return work.job(path, _USER, template, "--dry-run").refused("the model's chat template")


def large_cell(work: Work) -> str | None:
    """A cell has 50 MB, and the model reads 512 tokens."""
    path = work.rows(_rows({"q": "one word of many " * 3_000_000}, {"q": "b"}))
    return _bad_row(work, work.job(path, _USER, seconds=90), "prompt_too_long")


def wide_rows(work: Work) -> str | None:
    """A data set has 100,000 columns."""
    path = work.rows(_rows({**{f"c{i}": i for i in range(100_000)}, "q": "x"}))
    if wrong := work.job(path, _USER, "--dry-run").refused("100,001 columns"):
        return wrong
    names = ",".join(["q", *(f"c{i}" for i in range(99_999))])
    path = work.rows(f"{names}\n{names}\n", "rows.csv")
    return work.job(path, _USER, "--dry-run").refused("100,000 columns")


def wrong_name(work: Work) -> str | None:
    """A message lists the names of 5,000 columns."""
    path = work.rows(_rows({**{f"c{i}": i for i in range(5000)}, "q": "x"}))
    run = work.job(path, _USER, "dataset.columns=[c1x]", "--dry-run")
    return run.refused("c1") or (f"{len(run.text):,} characters" if len(run.text) > 4000 else None)


def deep_row(work: Work) -> str | None:
    """A row of a data set is nested 100,000 deep."""
    path = work.rows('{"q": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    return work.job(path, _USER, "--dry-run").refused("nested too deeply")


_SCHEMA = json.dumps({"type": "string"})
_TRUE = json.dumps({"enum": [True]})

ATTACKS: tuple[Attack, ...] = (
    _constraint("A pattern has 600 groups in each other", "regex", "(" * 600 + ")" * 600, "[ab]"),
    _constraint("A schema is nested 50,000 deep", "json_schema", '{"a":' * 50_000, _SCHEMA),
    _constraint(
        "A schema has a pattern that takes forever to match",
        "json_schema",
        json.dumps({"enum": ["a" * 60 + "!"], "pattern": "(a+)+$"}),
        _TRUE,
    ),
    _constraint(
        "A schema's references double 60 times",
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{
                        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)
                    },
                    "d60": {"type": "string"},
                },
            }
        ),
        _TRUE,
    ),
    _constraint(
        "A schema lists 20,000 integers", "json_schema", json.dumps({"enum": [*range(20_000)]}),
        _TRUE,
        error=None
    ),
    _template("A template loops without end", "{% for i in range(99999) %}{% for j in range(99999)"
              " %}{% endfor %}{% endfor %}"),
    _template("A filter makes 3 GB", "{{ 'a'|center(3000000000) }}"),
    _template("An operator makes 10 GB", "{{ 'a' * 10**10 }}"),
    _template("A method makes a terabyte", "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}"),
    chat_template,
    large_cell,
    wide_rows,
    wrong_name,
    deep_row,
)  # fmt: skip
