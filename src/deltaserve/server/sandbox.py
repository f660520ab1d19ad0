"""Jinja's sandbox with limits on work: a template may come with a model folder, and must neither hang nor fill memory.

Every turn of a loop and every call is a step. Nothing between two steps may be large: numbers that become sizes, and
strings that grow, are bounded, and lists are weighed with all they hold before anything walks through them.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from deltaserve.server import sandbox_text as text
from deltaserve.server.template_work import Steps

MAX_SIZE = 100_000
"""Largest number a call or filter is given (widths, counts, ranges), and characters of a repeated string."""
MAX_SLOW_CHARS = 1024 * 1024
"""Of a string given to a filter that looks at its characters one by one."""
MAX_INTEGER_BITS = 1 << 14
_JINJAS_OWN = ("_loop_vars", "_block_vars")
"""Arguments that compiled templates add."""
STEPS_KEY = "steps!"
"""Variable that holds the Steps of a rendering; no template can spell it."""

_DROPPED = ("format", "pprint", "random", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
"""Filters of web pages, of cost hard to foresee, and chance."""
_QUICK_NAMES = """
    attr capitalize center count d default e escape first forceescape indent int float join last length lower
    replace reverse safe string tojson trim truncate upper
"""
_QUICK = frozenset(_QUICK_NAMES.split())
"""Filters that take a long string in one go."""
_SHALLOW_NAMES = """
    boolean callable defined false float integer iterable mapping none number sequence string true undefined
"""
_SHALLOW_TESTS = frozenset(_SHALLOW_NAMES.split())
"""They look at what a value is, not into it."""
_METHODS: dict[type, frozenset[str]] = {
    str: text.METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    float: frozenset({"is_integer"}),
}
"""Type |-> its methods that a template may call."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Counts steps, and refuses what would make one step large."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        for name in _DROPPED:
            self.filters.pop(name)
        for name in self.tests.keys() - _SHALLOW_TESTS:
            self.tests[name] = _limited(name, cast(Callable[..., Any], self.tests[name]))
        for name, function in [*self.filters.items(), *_FILTERS.items()]:
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """A filter whose arguments and result are weighed."""
        self.filters[name] = _limited(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template, macros included."""
        steps = _steps(__context)
        steps.step()
        given = {name: value for name, value in kwargs.items() if name not in _JINJAS_OWN}
        values = (*args, *given.values())
        _check_sizes(values)
        for value in values:
            if not (isinstance(value, Namespace) and isinstance(__obj, Macro)):  # a macro may write to one
                steps.weigh(value)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) or isinstance(__obj, types.BuiltinMethodType):
            _check_method(owner, __obj.__name__)
        if isinstance(owner, str):
            result = text.call_method(steps, owner, __obj, args, given)
        else:
            result = super().call(__context, __obj, *args, **kwargs)
        return steps.taken(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator between two values of the template."""
        repeated = _repeat_len(left, right) if operator == "*" else 0
        if operator == "**" or repeated > MAX_SIZE:
            raise SecurityError(f"operator {operator} is limited")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("string formatting by % is not allowed")
        if operator == "*" and _product_bits(left, right) > MAX_INTEGER_BITS:
            raise SecurityError("a product this long is not allowed")
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _steps(context).grow(len(left) + len(right))
        return _steps(context).taken(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, with a look at what it would make."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None
        if value.__name__ != "format":
            raise SecurityError(f"{value.__name__} is not allowed")
        return functools.partial(text.checked_format, safe, str(value.__self__))


class _Counted(NodeTransformer):
    """Puts a step at the head of each loop's body, and has made, kept and compared values weighed."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        step = nodes.ExprStmt(_call_of(count_step, [nodes.Const(num_chars)], node.lineno))
        node.body.insert(0, step.set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call_of(concat, node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef) or node.target.find(nodes.NSRef):
            node.node = _weighed(node.node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _call_of(taken, [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: nodes.Expr) -> nodes.Expr:
        if all(isinstance(item, nodes.Const) for item in node.iter_child_nodes()):
            return node
        self.generic_visit(node)
        return _call_of(weighed, [node], node.lineno)


def _weighed(node: Any) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call_of(weighed, [node], node.lineno)


def _call_of(function: Callable[..., Any], args: list[nodes.Expr], lineno: int) -> nodes.Call:
    """A node that calls a function of this module; a template has no way to write one itself."""
    name = nodes.ImportedName(f"{__name__}.{function.__name__}")
    call = nodes.Call(name, [nodes.ContextReference(), *args], [], None, None)
    call.set_lineno(lineno)
    return call


# ---------------------------------------------------------------- called by compiled templates


def count_step(context: Context, num_chars: int) -> None:
    """At each turn of a loop. `num_chars`: of plain text that a turn writes at most."""
    steps = _steps(context)
    steps.num_steps += num_chars >> 11
    steps.step()


def concat(context: Context, *values: object) -> str:
    """The operator `~`."""
    steps = _steps(context)
    for value in values:
        steps.weigh(value)
    parts = [str(value) for value in values]
    steps.grow(sum(map(len, parts)))
    return "".join(parts)


def weighed(context: Context, value: object) -> object:
    """What is made by `[...]`, compared, or given to a namespace."""
    weight = _steps(context).weigh(value)
    if weight > MAX_SIZE:
        _steps(context).look()
    return value


def taken(context: Context, value: object) -> object:
    """What a slice has copied."""
    return _steps(context).taken(value)


@jinja2.pass_context
def _finalize(context: Context, value: object) -> str:
    """Everything that is printed."""
    _steps(context).weigh(value)
    return str(_steps(context).taken(str(value)))


# ---------------------------------------------------------------- filters and tests


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that takes no large numbers, and only weighed values."""
    wanted = _PassArg.from_obj(function)

    @jinja2.pass_context
    def limited(context: Context, *args: Any, **kwargs: Any) -> Any:
        steps = _steps(context)
        values = (*args, *kwargs.values())
        _check_sizes(values[1:])
        for value in values:
            if steps.weigh(value) > MAX_SLOW_CHARS and isinstance(value, str) and name not in _QUICK:
                raise SecurityError(f"{name} of a string this long is not allowed")
        steps.look()
        return steps.taken(function(*_leading(wanted, context), *args, **kwargs))

    return limited


def _leading(wanted: _PassArg | None, context: Context) -> tuple[Any, ...]:
    """What a filter wants to be given first."""
    match wanted:
        case _PassArg.context:
            return (context,)
        case _PassArg.eval_context:
            return (context.eval_ctx,)
        case _PassArg.environment:
            return (context.environment,)
    return ()


@jinja2.pass_context
def _replace(context: Context, value: object, old: str, new: str, count: int | None = None) -> str:
    return text.replace(_steps(context), str(value), old, new, count)


@jinja2.pass_context
def _join(context: Context, values: Any, separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    return text.join(_steps(context), values, separator)


@jinja2.pass_context
def _indent(context: Context, value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    return text.indent(_steps(context), str(value), " " * width if isinstance(width, int) else width, first, blank)


@jinja2.pass_context
def _trim(context: Context, value: object, chars: str | None = None) -> str:
    return str(text.call_method(_steps(context), str(value), str(value).strip, (chars,)))


@jinja2.pass_context
def _sum(context: Context, values: Any, attribute: str | None = None, start: float = 0) -> float:
    """Of numbers alone: lists would be copied once for each item."""
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    numbers = [start, *values]
    if not all(isinstance(value, int | float) for value in numbers):
        raise SecurityError("a sum of other things than numbers is not allowed")
    total: float = sum(numbers)
    return total


@jinja2.pass_context
def _escape(context: Context, value: object) -> str:
    """A plain string, as all others: pages of HTML are not made here."""
    return text.escape(_steps(context), str(value))


_FILTERS: dict[str, Callable[..., Any]] = {
    "replace": _replace,
    "join": _join,
    "indent": _indent,
    "trim": _trim,
    "sum": _sum,
    "safe": str,
    "e": _escape,
    "escape": _escape,
    "forceescape": _escape,
}


# ---------------------------------------------------------------- what is refused


def _steps(context: Context) -> Steps:
    steps: Steps = context.parent[STEPS_KEY]
    return steps


def _check_sizes(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int) and value > MAX_SIZE for value in values):
        raise SecurityError(f"a number above {MAX_SIZE} is not allowed here")


def _check_method(owner: object, name: str) -> None:
    for kind, names in _METHODS.items():
        if isinstance(owner, kind) and name in names:
            return
    raise SecurityError(f"calling {name} is not allowed")


def _product_bits(left: Any, right: Any) -> int:
    """Of `left * right` when both are integers."""
    both = isinstance(left, int) and isinstance(right, int)
    return left.bit_length() + right.bit_length() if both else 0


def _repeat_len(left: Any, right: Any) -> int:
    """Length of `left * right` when one of them is a sequence."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0
