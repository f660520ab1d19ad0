"""Jinja's sandbox with limits on work: a template may come with a model folder, and must neither hang nor fill memory.

Every turn of a loop and every call is a step. Nothing between two steps may be large: numbers that become sizes, and
strings that grow, are bounded.
"""

import functools
import re
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from deltaserve.base.errors import DeltaserveError

MAX_STEPS = 300_000
"""About a second; a conversation of ten thousand messages needs about a tenth of it."""
MAX_RENDER_S = 5.0
MAX_SIZE = 100_000
"""Largest number a call or filter is given (widths, counts, ranges), and characters of a repeated string."""
MAX_STRING_CHARS = 32 * 1024 * 1024
"""Of a string that one step makes."""
STEPS_KEY = "steps!"
"""Variable that holds the Steps of a rendering; no template can spell it."""
_WIDE_FORMAT = re.compile(r"[0-9]{4,}")


class TooMuchWork(DeltaserveError):
    """The template was stopped."""


@dataclass(slots=True)
class Steps:
    """What one rendering has done so far."""

    num_steps: int = 0
    stop_at: float = field(default_factory=lambda: time.monotonic() + MAX_RENDER_S)

    def step(self) -> None:
        """One turn of a loop, or one call."""
        self.num_steps += 1
        if self.num_steps > MAX_STEPS or time.monotonic() > self.stop_at:
            raise TooMuchWork(f"{self.num_steps} steps")

    def grow(self, num_chars: int) -> None:
        """A string of this length was made."""
        if num_chars > MAX_STRING_CHARS:
            raise TooMuchWork(f"a string of {num_chars} characters")
        # A long string copied at every step is work as well.
        self.num_steps += num_chars >> 10
        self.step()


class Sandbox(ImmutableSandboxedEnvironment):
    """Counts steps, and refuses what would make one step large."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        self.filters.pop("format")
        self.filters |= {name: _limited(function) for name, function in self.filters.items()}
        self.filters |= {"replace": _replace, "join": _join}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template, macros included."""
        count_step(__context)
        _check_sizes((*args, *kwargs.values()))
        if isinstance(__obj, types.BuiltinMethodType) and isinstance(__obj.__self__, str):
            if __obj.__name__ == "replace":
                count = {name: value for name, value in kwargs.items() if name == "count"}  # the rest is Jinja's own
                return _replace(__context, __obj.__self__, *args, **count)
            if __obj.__name__ == "join":
                return _join(__context, args[0], __obj.__self__)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator between two values of the template."""
        if operator == "**" or (operator == "*" and _repeat_len(left, right) > MAX_SIZE):
            raise jinja2.exceptions.SecurityError(f"operator {operator} is limited")
        if operator == "%" and isinstance(left, str):
            raise jinja2.exceptions.SecurityError("string formatting by % is not allowed")
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            context.parent[STEPS_KEY].grow(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, unless its text asks for a width of thousands."""
        safe = super().wrap_str_format(value)
        if safe is not None and _WIDE_FORMAT.search(value.__self__):
            raise jinja2.exceptions.SecurityError("a format this wide is not allowed")
        return safe


class _Counted(NodeTransformer):
    """Puts a step at the head of each loop's body, and makes `~` a call that knows how long its result is."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        step = nodes.ExprStmt(_call_of(count_step, [], node.lineno))
        node.body.insert(0, step.set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call_of(concat, node.nodes, node.lineno)


def _call_of(function: Callable[..., Any], args: list[nodes.Expr], lineno: int) -> nodes.Call:
    """A node that calls a function of this module; a template has no way to write one itself."""
    name = nodes.ImportedName(f"{__name__}.{function.__name__}")
    call = nodes.Call(name, [nodes.ContextReference(), *args], [], None, None)
    call.set_lineno(lineno)
    return call


def count_step(context: Context) -> None:
    """Called by compiled templates at each turn of a loop."""
    context.parent[STEPS_KEY].step()


def concat(context: Context, *values: object) -> str:
    """The operator `~`, called by compiled templates."""
    parts = [str(value) for value in values]
    context.parent[STEPS_KEY].grow(sum(map(len, parts)))
    return "".join(parts)


@jinja2.pass_context
def _replace(context: Context, text: object, old: str, new: str, count: int | None = None) -> str:
    """str.replace, as method and as filter."""
    whole = str(text)
    context.parent[STEPS_KEY].grow(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


@jinja2.pass_context
def _join(context: Context, values: Iterable[object], separator: str = "", attribute: str | None = None) -> str:
    """str.join, as method and as filter."""
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    parts = [str(value) for value in values]
    context.parent[STEPS_KEY].grow(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no large numbers."""

    @functools.wraps(function)  # keeps the marks of filters that want the context or environment
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check_sizes((*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return limited


def _check_sizes(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int) and value > MAX_SIZE for value in values):
        raise jinja2.exceptions.SecurityError(f"a number above {MAX_SIZE} is not allowed here")


def _repeat_len(left: Any, right: Any) -> int:
    """Length of `left * right` when one of them is a sequence."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0
