"""CountingTransformer: inserts checks into a compiled template where Jinja has no hook. Pure."""

from typing import cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from dynamo.text.chat_template.filters import CHECK, CONCAT, LOOP, OUT

DATA_CHARS = 256  # Template text up to this length is not counted within a macro; the macro's calls are.


class CountingTransformer(NodeTransformer):
    """Insert checks where Jinja has no hook: loops, literals, slices, `~`, and output collected into a value."""

    def __init__(self) -> None:
        self._collecting = 0
        """Number of enclosing macros and blocks whose output becomes a value."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (Jinja's interface)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, LOOP)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._collect(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._collect(node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:  # noqa: N802
        return self._collect(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self._collect(node)
        node.filter = nodes.Filter(node.filter, CHECK, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if self._collecting:
            node.nodes = [self._counted(one) for one in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node.nodes[0], CONCAT, *node.nodes[1:])

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if all(isinstance(one, nodes.Const) for one in node.items) else _filtered(node, CHECK)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_plain = node.ctx != "load" or all(isinstance(one, nodes.Const) for one in node.items)
        return node if is_plain else _filtered(node, CHECK)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_plain = all(isinstance(pair.value, nodes.Const) for pair in node.items)
        return node if is_plain else _filtered(node, CHECK)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, OUT) if isinstance(node.arg, nodes.Slice) else node

    def _collect(self, node: nodes.Node) -> nodes.Node:
        self._collecting += 1
        self.generic_visit(node)
        self._collecting -= 1
        return node

    def _counted(self, node: nodes.Expr) -> nodes.Expr:
        if not isinstance(node, nodes.TemplateData):
            return _filtered(node, OUT)
        if len(node.data) <= DATA_CHARS:
            return node
        return _filtered(nodes.Const(node.data, lineno=node.lineno), OUT)


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, list(args), [], None, None, lineno=node.lineno)
