"""Jinja templates that users write and that are filled with the columns of a row. Prompts are
rendered with `RowTemplate`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, UndefinedError, nodes

from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names
from batchgen.util.templates.absent_field import WholeRow, is_null
from batchgen.util.templates.template_bounds import TemplateLimit
from batchgen.util.templates.template_sandbox import RENDER_ERRORS, row_environment

_SINGLE_BRACES = re.compile(r"(?<![{\w^}\]])\{\s*(\w+)\s*\}(?!\})")
"""Matches `{name}`, but not LaTeX such as `\\boxed{name}` and `x^{name}`."""


class _NullOutput(Exception):
    """Raised when a template prints a value that is null."""


class _NoData(Exception):
    """Raised when a template prints something that is not data, such as a method."""


class RowTemplate:
    """A compiled template over a row.

    Its variables are the columns; `row`, an object with all columns; and `row_index`, the row's
    index in the data set.

    The template runs in the sandbox, within the bounds of one render (template_bounds.py). Nothing
    is escaped for HTML, `tojson` writes plain JSON, and newlines are kept. A template may test
    whether a column is null (`{% if note %}`, `{{ note or '' }}`), but printing null is an error,
    so that no prompt says "None".

    Args:
        key: the key of the template in the configuration, for messages.
        source: the text of the template.
        columns: the names of the columns.

    Raises:
        ConfigError: the template does not compile, or uses unknown columns.
    """

    def __init__(self, key: str, source: str, columns: Collection[str]) -> None:
        env = row_environment(
            filters={"tojson": _to_json}, keep_trailing_newline=True, finalize=_data
        )
        self.key = key
        try:
            tree = env.parse(source)
            self._template = env.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{key}, line {error.lineno}: {env.message_of(error)}") from None
        except TemplateError as error:  # an unknown filter or test
            raise ConfigError(f"{key}: {env.message_of(error)}") from None
        _check_braces(key, tree, columns)
        # Each render copies the globals, and a dict is much faster to copy than Jinja's mapping.
        self._template.globals = dict(self._template.globals)
        self._only = _only_variable(tree)
        self._names = sorted(env.undeclared(tree))
        self._reads_row = "row" in self._names
        optional = _optional(tree) | {"row", "row_index"}
        for name in self._names:
            if name not in columns and name not in optional:
                raise ConfigError(
                    f"{key}: the data set has no column {name!r}: choose among "
                    f"{some_names(columns, name)}"
                )

    @property
    def uses_columns(self) -> bool:
        """Whether the text can differ from row to row."""
        return bool(self._names)

    def render(self, fields: Mapping[str, Any], row_index: int = 0) -> str:
        """Return the text for one row. Raises RequestError (missing_field, template_error)."""
        if self._only is not None and type(value := fields.get(self._only)) is str:
            return value
        try:
            with template_errors(self.key):
                row = WholeRow(fields) if self._reads_row else None
                return self._template.render({"row": row, "row_index": row_index, **fields})
        except UndefinedError as error:
            from batchgen.engine.interface.outputs import RequestError  # brings torch

            has = some_names(fields)
            raise RequestError(
                "missing_field", f"{self.key}: {error.message}; the row has {has}"
            ) from None
        except _NoData as error:
            from batchgen.engine.interface.outputs import RequestError

            raise RequestError(
                "template_error",
                f"{self.key} prints the method {error}, which is not data of the row: for the "
                f'field {error!r} of a column doc, write {{{{ doc["{error}"] }}}}',
            ) from None
        except _NullOutput:
            from batchgen.engine.interface.outputs import RequestError

            null = [
                name
                for name in self._names
                if name not in ("row", "row_index") and fields.get(name) is None
            ]
            raise RequestError(
                "missing_field",
                f"{self.key} prints a value that is null ({', '.join(null) or 'see the row'}): "
                f"write {{{{ {null[0] if null else 'name'} or '' }}}} to allow that",
            ) from None


@contextmanager
def template_errors(key: str) -> Iterator[None]:
    """Turn every error of rendering except UndefinedError into a RequestError."""
    try:
        yield
    except UndefinedError:
        raise
    except TemplateLimit as error:
        from batchgen.engine.interface.outputs import RequestError

        raise RequestError("template_error", f"{key}: {error}") from None
    except RENDER_ERRORS as error:
        from batchgen.engine.interface.outputs import RequestError

        text = " ".join(str(error).split())
        raise RequestError("template_error", f"{key}: {type(error).__name__}: {text}") from None


def _check_braces(key: str, tree: nodes.Template, columns: Collection[str]) -> None:
    """Raise ConfigError if a column's name is in single braces, as in Python's format strings."""
    for part in tree.find_all(nodes.TemplateData):
        for match in _SINGLE_BRACES.finditer(part.data):
            if match[1] in columns:
                raise ConfigError(
                    f"{key}: {match[0]} is plain text and not a column: write "
                    f"{{{{ {match[1]} }}}} for the column, or {{{{ {match[0]!r} }}}} for the text"
                )


def _data(value: Any) -> Any:
    """Return a value that a template prints. Raises _NullOutput for null, and _NoData for a value
    that is not data."""
    if value is None:
        raise _NullOutput
    if isinstance(value, Undefined):
        return value  # printing it raises an error that says what is missing
    if callable(value) or type(value).__module__.partition(".")[0] == "jinja2":
        raise _NoData(getattr(value, "__name__", type(value).__name__))
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: Any) -> str | None:
    return None if is_null(value) else str(value)


def _only_variable(tree: nodes.Template) -> str | None:
    """Return the variable if the template prints exactly one variable and nothing else; otherwise
    None."""
    if len(tree.body) == 1 and isinstance(output := tree.body[0], nodes.Output):
        if len(output.nodes) == 1 and isinstance(name := output.nodes[0], nodes.Name):
            return name.name
    return None


def _optional(tree: nodes.Template) -> set[str]:
    """Return the variables that the template tests with `is defined` or gives a default."""
    guarded = [t.node for t in tree.find_all(nodes.Test) if t.name in ("defined", "undefined")]
    guarded += [
        f.node for f in tree.find_all(nodes.Filter) if f.name in ("default", "d") and f.node
    ]
    return {node.name for node in guarded if isinstance(node, nodes.Name)}
