"""Adds guards to the syntax tree of a template: filters that count iterations, prints, comparisons
and hashes. `template_sandbox` applies them before it compiles a template."""

from __future__ import annotations

from typing import Any

from jinja2 import (
    nodes,
    pass_context,
)
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from batchgen.util.templates import template_bounds as bounds

_ROUND, _PRINTED, _SIZED, _MADE = " round", " printed", " sized", " made"
"""The names of the guards. Templates cannot use them, because they begin with a space."""


@pass_context  # so that Jinja does not evaluate it at compile time
def _round(context: Context, characters: int) -> bool:
    """Count an iteration of a loop, and the characters that it makes."""
    bounds.tick()
    bounds.spend(characters)
    return True


def _printed(value: Any) -> Any:
    """Count a value that is printed, and return it."""
    if type(value) is not str:
        bounds.spend(bounds.printed_size(value))
    elif len(value) >= bounds.SMALL:
        bounds.spend(len(value))
    return value


def sized(value: Any) -> Any:
    """Count a value that will be compared or hashed, and return it. Comparing nested lists can take
    very long."""
    if type(value) is not str and isinstance(value, (list, tuple, dict)):
        bounds.printed_size(value)
    return value


GUARD_FILTERS = {_ROUND: _round, _PRINTED: _printed, _SIZED: sized, _MADE: bounds.count_made}
"""Name → guard."""


class TreeGuards(NodeTransformer):
    """Inserts the guards into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        parts = node.find_all((nodes.Output, nodes.Concat, nodes.Call, nodes.Filter))
        data = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        # A part without `nodes` counts once: `"1"` has the length 1.
        limit = data + bounds.SMALL * sum(len(getattr(part, "nodes", "1")) for part in parts)
        step = _filtered(nodes.Const(1 + limit), _ROUND, node.lineno)
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
            return node  # a comparison with a constant is fast
        node.expr = _unless_constant(node.expr)
        for operand in node.ops:
            operand.expr = _unless_constant(operand.expr)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if isinstance(function := node.node, nodes.Getattr):
            function.node = self.visit(function.node)  # a call is of a method, never of a key
            node.node = nodes.Name("", "load")
            self.generic_visit(node)
            node.node = function
            return node
        return self.generic_visit(node)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        """Read a key before an attribute: `doc.items` is the value of the key "items" of `doc`."""
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
    """Apply a filter to an expression."""
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno or node.lineno)
