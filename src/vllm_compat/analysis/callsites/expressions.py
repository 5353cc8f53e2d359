"""Expressions of the downstream that are no calls → what is known of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vllm_compat.analysis.callsites.names import Names, is_hook
from vllm_compat.analysis.callsites.values import NOTHING, Value


class Expressions(Names):
    """Read expressions, calls aside."""

    def on_Name(self, node: ast.Name) -> Value:
        self.package.refer(node.id, self.context.guarded)
        return self.env.get(node.id, NOTHING)

    def on_Constant(self, node: ast.Constant) -> Value:
        return NOTHING

    def on_Await(self, node: ast.Await) -> Value:
        return self.evaluate(node.value)

    def on_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.assign(node.target, value, node.value)
        return value

    def on_IfExp(self, node: ast.IfExp) -> Value:
        self.test(node.test)
        with self.under(guards=self.guards_of(node.test), tested=self.tested_in(node.test)):
            before = dict(self.env)
            self.narrow(node.test)
            left = self.evaluate(node.body)
            self.env = dict(before)
            self.narrow(node.test, False)
            right = self.evaluate(node.orelse)
            self.env = before
        return left | right

    def on_BoolOp(self, node: ast.BoolOp) -> Value:
        value = NOTHING
        outer = self.context
        for item in node.values:
            one = self.evaluate(item)
            self.use(one, "truth")
            value = value | one
            if isinstance(node.op, ast.And):
                self.enter(tested=self.tested_in(item))
        self.context = outer
        return value

    def on_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            self.use(value, "truth")
        return NOTHING

    def on_Compare(self, node: ast.Compare) -> Value:
        operands = [node.left, *node.comparators]
        values = [self.evaluate(operand) for operand in operands]
        for index, operator in enumerate(node.ops):
            if isinstance(operator, (ast.In, ast.NotIn)):
                self.use(values[index + 1], "contains")
            elif values[index].calls and self.notes is not None:
                whole = ast.Compare(ast.Name("x"), [operator], [operands[index + 1]])
                self.use(values[index], "compared", ast.unparse(whole)[2:])
        return NOTHING

    def on_Attribute(self, node: ast.Attribute) -> Value:
        self.package.refer(node.attr, self.context.guarded)
        known = self.narrowed(node)
        if known is not None:
            return known
        return self.attribute(self.evaluate(node.value), node.attr, node)

    def on_Subscript(self, node: ast.Subscript) -> Value:
        known = self.narrowed(node)
        if known is not None:
            return known
        value = self.evaluate(node.value)
        self.evaluate(node.slice)
        self.use(value, "subscript", node.slice)
        if value.items:
            return Value(value.items, True)
        if isinstance(node.slice, ast.Slice):
            return NOTHING
        return Value(tuple(f"{path}[]" for path in value.vllm_paths if path.count("[]") < 2))

    def on_Starred(self, node: ast.Starred) -> Value:
        self.use(self.evaluate(node.value), "iterate")
        return NOTHING

    def on_Lambda(self, node: ast.Lambda) -> Value:
        before = dict(self.env)
        for argument in arguments_of(node.args):
            self.env[argument.arg] = NOTHING
        for default in (*node.args.defaults, *node.args.kw_defaults):
            self.evaluate(default)
        self.evaluate(node.body)
        self.env = before
        return NOTHING

    # Containers.

    def on_List(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        values = [self.evaluate(item) for item in node.elts]
        items = {path for value in values if value.instance for path in value.paths}
        return Value(items=tuple(sorted(items)) if len(items) == 1 else ())

    on_Set = on_Tuple = on_List

    def on_Dict(self, node: ast.Dict) -> Value:
        for key, item in zip(node.keys, node.values, strict=True):
            self.evaluate(key)
            value = self.evaluate(item)
            self.use(value, "assigned", key if key is not None else "**")
            if key is not None and is_hook(key):
                self.package.hooks.update(self.class_names(item))
        return NOTHING

    def on_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        return self._comprehension(node.generators, node.elt)

    on_SetComp = on_GeneratorExp = on_ListComp

    def on_DictComp(self, node: ast.DictComp) -> Value:
        return self._comprehension(node.generators, node.key, node.value)

    def _comprehension(self, generators: list[ast.comprehension], *elements: ast.expr) -> Value:
        """Return what a comprehension contains: its last element's value."""
        before = dict(self.env)
        for generator in generators:
            self.iterate(generator.target, generator.iter)
            for condition in generator.ifs:
                self.test(condition)
        value = [self.evaluate(element) for element in elements][-1]
        self.env = before
        return Value(items=value.paths if value.instance else ())

    def iterate(self, target: ast.expr, iterable: ast.expr) -> None:
        """Take into account that a target gets one item after the other."""
        value = self.evaluate(iterable)
        self.use(value, "iterate", target)
        self.assign(target, Value(value.items, True) if value.items else NOTHING, None)


def arguments_of(arguments: ast.arguments) -> Iterator[ast.arg]:
    """Iterate over a function's parameters, ``*`` and ``**`` left out."""
    yield from arguments.posonlyargs
    yield from arguments.args
    yield from arguments.kwonlyargs
