"""The environment of templates that others may have written.

It is Jinja's sandbox, which keeps templates from Python's internals, with the bounds of `bounds`.
Jinja lets calls, filters and some operators be intercepted. The rest is guarded in the syntax tree
before it is compiled: rounds of loops, what is printed, and what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import (
    StrictUndefined,
    Template,
    TemplateError,
    TemplateSyntaxError,
    meta,
    nodes,
    pass_context,
)
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from batchgen.util.templates import template_bounds as bounds

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
"""What rendering a template can raise: Jinja's errors, and those of the user's expressions."""
_ROUND, _PRINTED, _SIZED, _MADE = " round", " printed", " sized", " made"
"""Filters that guard the tree. No template can name them, because of their space."""
_MOST_SOURCE = 2**20
"""The most characters of a template. To compile a longer one would take minutes."""
_COMPARING = frozenset("eq == equalto ne != gt > greaterthan ge >= lt < lessthan le <= in".split())


class WholeRow(dict[str, Any]):
    """All columns of a row; to read one that it lacks is an error."""


class AbsentField(StrictUndefined):
    """A field that an object of a row lacks, which acts as null does: files of one format leave
    out what those of another one pad with null. A variable that is not there raises, as in
    StrictUndefined; so does either where it is printed or read further."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, WholeRow):
            return f"the row has no column {self._undefined_name!r}"
        return super()._undefined_message

    @property
    def is_null(self) -> bool:
        """Whether an object lacks it, and not the template's variables."""
        obj = self._undefined_obj
        return isinstance(obj, Mapping) and not isinstance(obj, WholeRow)

    def __bool__(self) -> bool:  # type: ignore[override]
        if not self.is_null:
            self._fail_with_undefined_error()
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        if not self.is_null:
            self._fail_with_undefined_error()
        return other is None or isinstance(other, AbsentField)

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        if not self.is_null:
            self._fail_with_undefined_error()
        return hash(None)


def is_null(value: object) -> bool:
    """Whether a value of a template is null: the test `is none`."""
    return value is None or (isinstance(value, AbsentField) and value.is_null)


class BoundedTemplate(Template):
    """A template of which each render has its bounds."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """The text, or TemplateLimit if it would take more time or characters than a render may."""
        with bounds.one_render():
            return super().render(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates take no more time and memory than template_bounds.py says."""

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
        self.filters |= {_ROUND: _round, _PRINTED: _printed, _SIZED: _sized, _MADE: bounds.made}
        self.tests |= {name: _sized_test(self.tests[name]) for name in _COMPARING}

    def said(self, error: TemplateError) -> str:
        """What Jinja says of a template, with a guess where a filter or test has a typo."""
        message = error.message or type(error).__name__
        if match := re.match(r"No (filter|test) named '(\w+)'", message):
            known = [*(self.filters if match[1] == "filter" else self.tests)]
            if near := get_close_matches(match[2], known, 1, 0.7):
                return f"{message.rstrip('.')}: did you mean {near[0]}?"
        return message

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        with bounds.one_render():  # constants are computed here
            return super().compile(*args, **kwargs)

    def parse_expression(self, source: str, result: str) -> nodes.Template:
        """The tree of a template that sets the variable `result` to what an expression is."""
        if len(source) > _MOST_SOURCE:
            raise bounds.TemplateLimit(f"it has more than {_MOST_SOURCE:,} characters")
        parser = Parser(self, source, state="variable")
        try:
            expression = parser.parse_expression()
        except RecursionError:
            raise bounds.TemplateLimit("it is nested too deeply") from None
        if not parser.stream.eos:
            rest = str(parser.stream.current)
            said = "= is no comparison: write ==" if rest == "=" else f"{rest} may not stand there"
            raise TemplateSyntaxError(said, 1)
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
            guarded = _Guards().visit(source)
            guarded.set_environment(self)
            return super()._generate(guarded, *args, **kwargs)
        except RecursionError:
            raise bounds.TemplateLimit("it is nested too deeply") from None

    def undeclared(self, tree: nodes.Template) -> set[str]:
        """The names that a template uses and does not set, without the globals."""
        with bounds.one_render():
            return meta.find_undeclared_variables(tree) - set(self.globals)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+":
            return bounds.made(left + right)  # twice as long as the longer one at most
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
                    _sized(argument)
        return bounds.made(super().call(__context, __obj, *args, **kwargs))

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
    """The environment of what reads the columns of a row, where an absent field is null."""
    env = BoundedEnvironment(undefined=AbsentField, **options)
    env.tests["none"] = is_null
    return env


def _bounded(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts what it makes before it makes it."""
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
        return bounds.made(f(*args, **kwargs))

    return bounded


_NEED_ALL = frozenset("join list sum sort unique groupby batch slice tojson string".split())
"""Filters that read all items of what they get."""


def _with_length(value: Any) -> Any:
    """The items of an iterator, each of them counted; any other value as it is."""
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
    def sized(*args: Any) -> Any:
        return test(*map(_sized, args))

    return sized


@pass_context  # so that it is not computed when the template is compiled
def _round(context: Context, characters: int) -> bool:
    """Count a round of a loop and the characters of its text."""
    bounds.tick()
    bounds.spend(characters)
    return True


def _printed(value: Any) -> Any:
    if type(value) is not str:
        bounds.spend(bounds.printed_size(value))
    elif len(value) >= bounds.SMALL:
        bounds.spend(len(value))
    return value


def _sized(value: Any) -> Any:
    """A value that will be compared or hashed: lists within lists can take forever."""
    if type(value) is not str and isinstance(value, (list, tuple, dict)):
        bounds.printed_size(value)
    return value


class _Guards(NodeTransformer):
    """Puts the guards into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        parts = node.find_all((nodes.Output, nodes.Concat, nodes.Call, nodes.Filter))
        data = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        most = data + bounds.SMALL * sum(len(getattr(part, "nodes", "1")) for part in parts)
        step = _filtered(nodes.Const(1 + most), _ROUND, node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            test = _filtered(nodes.Const(1), _ROUND, node.lineno)
            node.test = nodes.And(test, node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filtered(part, _PRINTED)
            for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, _PRINTED) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1 and nodes.Const in (type(node.expr), type(node.ops[0].expr)):
            return node  # no list is compared with another one
        node.expr = _unless_constant(node.expr)
        for operand in node.ops:
            operand.expr = _unless_constant(operand.expr)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if isinstance(called := node.node, nodes.Getattr):
            called.node = self.visit(called.node)  # a method, whatever keys there are
            node.node = nodes.Name("", "load")
            self.generic_visit(node)
            node.node = called
            return node
        return self.generic_visit(node)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        """Look for a key first: `doc.items` is what the object `doc` has under "items"."""
        self.generic_visit(node)
        return nodes.Getitem(node.node, nodes.Const(node.attr), node.ctx, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, _MADE) if node.ctx == "load" else node
        node.arg = _unless_constant(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _unless_constant(node.key)
        return node


def _unless_constant(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, _SIZED)


def _filtered(node: nodes.Expr, name: str, lineno: int | None = None) -> nodes.Expr:
    """The expression with a filter on it."""
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno or node.lineno)
