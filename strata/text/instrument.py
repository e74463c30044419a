"""Puts the meter into a template's syntax tree: where Jinja2 has no hook of its own, a call to the sandbox is written in.

Loops and macros pay for each turn, ``~``, slices and literals for what they make. The tree is changed and not the generated
code, so that a new version of Jinja2 compiles it like any other template.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


class Instrument(NodeTransformer):
    """Visit a parsed template once; it is changed in place and returned."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("meter_tick", nodes.Const(0)), node.test).set_lineno(node.lineno)
        return _pay_per_turn(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        return _pay_per_turn(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        return _pay_per_turn(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("meter_concat", *node.nodes).set_lineno(node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step))
        return _call("meter_cut", node.node, *bounds).set_lineno(node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("meter_made", node).set_lineno(node.lineno) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("meter_made", node).set_lineno(node.lineno) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("meter_made", node).set_lineno(node.lineno) if node.ctx == "load" and node.items else node


def _call(method: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


def _pay_per_turn(node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
    literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    tick = nodes.ExprStmt(_call("meter_tick", nodes.Const(literal)))
    node.body.insert(0, tick.set_lineno(node.lineno))
    return node
