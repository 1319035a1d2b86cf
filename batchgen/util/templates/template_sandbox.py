"""The sandbox in which templates that strangers may have written are rendered.

`BoundedEnvironment` is Jinja's sandbox, which protects Python's internals, with the limits of
`template_bounds`. Jinja can intercept calls, filters and some operators. Other operations are
guarded in the syntax tree before it is compiled (`template_guards`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import (
    Template,
    TemplateError,
    TemplateSyntaxError,
    meta,
    nodes,
)
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.util.templates import template_bounds as bounds
from batchgen.util.templates.absent_field import AbsentField, is_null
from batchgen.util.templates.template_guards import GUARD_FILTERS, TreeGuards, sized

RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The errors that rendering a template can raise: Jinja's, and those of the user's expressions."""
_MOST_SOURCE = 2**20
"""The most characters of a template. Compiling a longer one would take minutes."""
_COMPARING = frozenset("eq == equalto ne != gt > greaterthan ge >= lt < lessthan le <= in".split())


class BoundedTemplate(Template):
    """A template whose renders are limited."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render the template. Raises TemplateLimit if it would take more time or characters than
        allowed."""
        with bounds.one_render():
            return super().render(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are limited in time and memory, see template_bounds.py."""

    template_class = BoundedTemplate
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(
        self,
        *,
        filters: Mapping[str, Callable[..., Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.globals.update(variables or {})
        self.globals.pop("lipsum", None)
        self.filters.update(filters or {})
        self.filters = {name: _bounded(name, f) for name, f in self.filters.items()}
        self.filters |= GUARD_FILTERS
        self.tests |= {name: _sized_test(self.tests[name]) for name in _COMPARING}

    def message_of(self, error: TemplateError) -> str:
        """Return Jinja's message about a template. If the name of a filter or test seems
        misspelled, a suggestion is added."""
        message = error.message or type(error).__name__
        if match := re.match(r"No (filter|test) named '(\w+)'", message):
            known = [*(self.filters if match[1] == "filter" else self.tests)]
            if near := get_close_matches(match[2], known, 1, 0.7):
                return f"{message.rstrip('.')}: did you mean {near[0]}?"
        return message

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        with bounds.one_render():  # compiling evaluates constant expressions
            return super().compile(*args, **kwargs)

    def parse_expression(self, source: str, result: str) -> nodes.Template:
        """Return the syntax tree of a template that assigns the value of an expression to the
        variable `result`."""
        if len(source) > _MOST_SOURCE:
            raise bounds.TemplateLimit(f"it has more than {_MOST_SOURCE:,} characters")
        parser = Parser(self, source, state="variable")
        try:
            expression = parser.parse_expression()
        except RecursionError:
            raise bounds.TemplateLimit("it is nested too deeply") from None
        if not parser.stream.eos:
            rest = str(parser.stream.current)
            reason = (
                "= does not compare: write ==" if rest == "=" else f"{rest} is not allowed there"
            )
            raise TemplateSyntaxError(reason, 1)
        target = nodes.Name(result, "store", lineno=1)
        tree = nodes.Template([nodes.Assign(target, expression, lineno=1)], lineno=1)
        tree.set_environment(self)
        return tree

    def _parse(self, source: str, *args: Any, **kwargs: Any) -> nodes.Template:
        if len(source) > _MOST_SOURCE:
            raise bounds.TemplateLimit(f"it has more than {_MOST_SOURCE:,} characters")
        try:
            return super()._parse(source, *args, **kwargs)
        except RecursionError:
            raise bounds.TemplateLimit("it is nested too deeply") from None

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        try:
            guarded = TreeGuards().visit(source)
            guarded.set_environment(self)
            return super()._generate(guarded, *args, **kwargs)
        except RecursionError:
            raise bounds.TemplateLimit("it is nested too deeply") from None

    def undeclared(self, tree: nodes.Template) -> set[str]:
        """Return the names that a template reads but does not set, except globals."""
        with bounds.one_render():
            return meta.find_undeclared_variables(tree) - set(self.globals)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+":
            return bounds.count_made(left + right)  # at most twice as long as the longer text
        bounds.before_operator(operator, left, right)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        bounds.tick()
        if type(__obj) is BuiltinMethodType:
            if __obj.__name__ in bounds.GROWING:
                args = tuple(map(_with_length, args))
                bounds.before_method(__obj.__self__, __obj.__name__, [*args, *kwargs.values()])
            else:
                for argument in args:
                    sized(argument)
        return bounds.count_made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        format = wrapped

        @wraps(format)
        def bounded(*args: Any, **kwargs: Any) -> str:
            bounds.before_format(value.__self__, [args, kwargs])
            return format(*args, **kwargs)

        return bounded


def row_environment(**options: Any) -> BoundedEnvironment:
    """Return an environment for templates and expressions over rows, in which a missing field is
    null."""
    env = BoundedEnvironment(undefined=AbsentField, **options)
    env.tests["none"] = is_null
    return env


def _bounded(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its result is counted before it is computed."""
    if name in bounds.FREE:
        return f
    at = 1 if hasattr(f, "jinja_pass_arg") else 0
    reads_all = name in _NEED_ALL

    @wraps(f)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        bounds.tick()
        if len(args) > at:
            if reads_all:
                args = (*args[:at], _with_length(args[at]), *args[at + 1 :])
            bounds.before_filter(name, args[at], [*args[at + 1 :], *kwargs.values()])
        return bounds.count_made(f(*args, **kwargs))

    return bounded


_NEED_ALL = frozenset("join list sum sort unique groupby batch slice tojson string".split())
"""Filters that read all items of their input."""


def _with_length(value: Any) -> Any:
    """Convert an iterator to a list, counting its items. Other values are returned unchanged."""
    if hasattr(value, "__next__"):
        return list(_counted(value))
    return value


def _counted(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        bounds.tick()
        bounds.spend(1)
        yield item


def _sized_test(test: Any) -> Callable[..., Any]:
    @wraps(test)
    def bounded(*args: Any) -> Any:
        return test(*map(sized, args))

    return bounded
