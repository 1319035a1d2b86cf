"""Expressions that users write over the columns of a row, such as `mark == 1 and text|length >
200`. Options like `--where` are compiled to a `RowExpression`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError, Undefined, nodes

from batchgen.util.errors import ConfigError
from batchgen.util.shorten import beginning, some_names
from batchgen.util.templates import template_bounds as bounds
from batchgen.util.templates.absent_field import WholeRow, is_null
from batchgen.util.templates.template_sandbox import RENDER_ERRORS, row_environment

OWN_NAMES = ("row_id", "row_index", "row")
"""The variables of an expression besides the columns: the row's id, its index, and all columns as
one object."""
_RESULT = "_result"


class ExpressionFailed(ValueError):
    """Raised if an expression cannot be evaluated in a row. The message names its key and says
    why."""


class RowExpression:
    """A compiled Jinja expression over a row.

    Its variables are the columns, and OWN_NAMES unless a column has the same name. As in templates,
    a missing field of an object is null. The expression runs in the sandbox, within the bounds of
    one render. Its value depends only on the row, so the filter `random` does not exist.

    Args:
        key: the option or key with the expression, for messages.
        source: the text of the expression.
        columns: the names of the columns.

    Attributes:
        names: the columns that are read, in the order of `columns`.
    """

    def __init__(self, key: str, source: str, columns: Collection[str]) -> None:
        """Compile the expression. Raises ConfigError, which names the `key`, if it does not compile
        or reads an unknown name."""
        env = row_environment()
        del env.filters["random"]
        self._key, self.source = key, source
        try:
            tree = env.parse_expression(source, _RESULT)
            loaded = (node for node in tree.find_all(nodes.Name) if node.ctx == "load")
            names = list(dict.fromkeys(node.name for node in loaded))
            self._read = {name: fields_read(tree, name) for name in names}
            self._template = env.from_string(tree)
        except TemplateError as error:  # the syntax, an unknown filter, a bound
            raise ConfigError(
                f"{key}: {env.message_of(error)} (in {beginning(source, 80)!r})"
            ) from None
        variables = {*columns, *OWN_NAMES}
        self._globals = {
            n: env.globals[n] for n in names if n in env.globals and n not in variables
        }
        for name in names:
            if name not in variables and name not in self._globals:
                raise _unknown(key, name, columns)
        if "row" in names and "row" not in columns:
            for name in self._read["row"] or ():
                if name not in columns:
                    raise _unknown(key, name, columns)
        self._variables = tuple(name for name in names if name not in self._globals)
        self.names = self._columns(columns)

    def attributes(self, name: str) -> frozenset[str] | None:
        """Return the fields of a variable that are read by name; None if the variable is read as a
        whole."""
        return self._read.get(name, frozenset())

    def value(self, fields: Mapping[str, Any], row_id: str = "", row_index: int = 0) -> Any:
        """Evaluate the expression in a row. Raises ExpressionFailed if that fails."""
        values: dict[str, Any] = dict(self._globals)
        for name in self._variables:
            if name in fields:
                values[name] = fields[name]
            elif name in OWN_NAMES:
                row = WholeRow(fields) if name == "row" else None
                values[name] = {"row_id": row_id, "row_index": row_index, "row": row}[name]
        try:
            with bounds.one_render():
                context = self._template.new_context(values, shared=True)
                for _ in self._template.root_render_func(context):
                    pass
                return _complete(context.vars[_RESULT])
        except RENDER_ERRORS as error:
            raise self._failed(error, fields) from None

    def is_true(self, fields: Mapping[str, Any], row_id: str = "", row_index: int = 0) -> bool:
        """Whether the value in a row is true in Python's sense. Raises ExpressionFailed if the
        evaluation fails."""
        return bool(self.value(fields, row_id, row_index))

    def _columns(self, columns: Collection[str]) -> tuple[str, ...]:
        """Return the columns that are read, in the order of the data."""
        read = {name for name in self._variables if name in columns}
        if "row" in self._variables and "row" not in columns:
            fields = self._read["row"]
            read |= set(columns) if fields is None else fields
        return tuple(name for name in columns if name in read)

    def _failed(self, error: Exception, fields: Mapping[str, Any]) -> ExpressionFailed:
        text = " ".join(str(error).split())
        if not isinstance(error, TemplateError):
            text = f"{type(error).__name__}: {text}"
        null = [name for name in self.names if fields.get(name) is None]
        hint = f"; null in this row: {some_names(null)}" if null else ""
        return ExpressionFailed(f"{self._key}: {text}{hint}")


def _complete(value: Any) -> Any:
    """Return the value of an expression. Lazy results, such as those of the filter `map`, become
    lists."""
    if isinstance(value, Iterator | range):
        items = []
        for item in value:
            bounds.tick()
            bounds.spend(1)
            items.append(_known(item))
        return items
    return _known(value)


def _known(value: Any) -> Any:
    """Return a value, with null for a missing field. Raises UndefinedError for a name that does not
    exist."""
    if isinstance(value, Undefined):
        if not is_null(value):
            str(value)  # raises what is missing
        return None
    return value


def fields_read(tree: nodes.Template, name: str) -> frozenset[str] | None:
    """Return the fields of a variable that a template reads by name; None if the variable is also
    read as a whole."""
    fields, num_reads, num_field_reads = set[str](), 0, 0
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Getitem)):
        if isinstance(node, nodes.Name):
            num_reads += node.name == name and node.ctx == "load"
        elif isinstance(owner := node.node, nodes.Name) and owner.name == name:  # type: ignore[attr-defined]
            if isinstance(node, nodes.Getattr):
                fields.add(node.attr)
                num_field_reads += 1
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                fields.add(str(node.arg.value))
                num_field_reads += 1
    return frozenset(fields) if num_reads == num_field_reads else None


def _unknown(key: str, name: str, columns: Collection[str]) -> ConfigError:
    graded = (
        "; the steps of post write it: set post=[{Grade: …}], or run `batchgen grade` on a "
        "finished job"
    )
    return ConfigError(
        f"{key}: there is no column {name!r}: choose among {some_names(columns, name)}"
        + (graded if name == "mark" else "")
    )
