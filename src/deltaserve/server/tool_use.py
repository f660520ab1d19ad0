"""The tools of a request, and whether its answer may or must call them. Dialects read them out of their own words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from deltaserve.server.api_errors import excerpt, invalid

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1 << 20
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")
NAME_RULE = "a function's name has 1 to 128 characters a-z, A-Z, 0-9, _ and -"
NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}


class CallMode(Enum):
    """Whether an answer calls."""

    NONE = "none"
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the client offers."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """JSON schema of its arguments, an object. None: it has no arguments."""
    is_strict: bool = False
    """The client wants arguments that keep to the schema."""

    def as_template_takes_it(self) -> Mapping[str, object]:
        """In OpenAI's form, which templates are written for."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": dict(self.parameters or NO_PARAMETERS)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools and their use in one answer; without any by default. Made by `tool_use`."""

    tools: tuple[FunctionTool, ...] = ()
    """All that the model is told of."""
    mode: CallMode = CallMode.NONE
    allowed: frozenset[str] = frozenset()
    """Names that may be called."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""

    @property
    def callable(self) -> Mapping[str, Mapping[str, object]]:
        """Name of each function that may be called |-> the schema of its arguments."""
        if self.mode is CallMode.NONE:
            return {}
        return {tool.name: tool.parameters or NO_PARAMETERS for tool in self.tools if tool.name in self.allowed}


def tool_use(
    tools: Sequence[FunctionTool],
    mode: CallMode | None = None,
    only: Sequence[str] | None = None,
    *,
    is_parallel: bool = True,
) -> ToolUse:
    """Checked. `mode`: by default auto where there are tools. `only`: names that may be called, all by default.

    Raises ApiError 400.
    """
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"there are {len(tools)} tools, at most {MAX_TOOLS} are allowed")
    num_bytes = len(msgspec.json.encode([tool.as_template_takes_it() for tool in tools]))
    if num_bytes > MAX_TOOLS_BYTES:
        raise invalid("tools", f"tools have {num_bytes} bytes as JSON, at most {MAX_TOOLS_BYTES} are allowed")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if not _NAME.match(tool.name):
            raise invalid(f"tools[{index}].function.name", f"{excerpt(tool.name)}: {NAME_RULE}")
        if tool.name in names:
            raise invalid(f"tools[{index}].function.name", f"two functions have the name {tool.name}")
        _check_parameters(tool, f"tools[{index}].function.parameters")
        names.add(tool.name)
    unknown = next((name for name in only or () if name not in names), None)
    if unknown is not None:
        raise invalid("tool_choice", f"{excerpt(unknown)} is none of the tools")
    if not tools and mode not in (None, CallMode.NONE, CallMode.AUTO):
        raise invalid("tool_choice", "tool_choice asks for a call, and there are no tools")
    if not tools:
        return ToolUse()
    return ToolUse(tuple(tools), mode or CallMode.AUTO, frozenset(names if only is None else only), is_parallel)


def _check_parameters(tool: FunctionTool, param: str) -> None:
    """Arguments are an object: what its schema may say beyond that is for the model."""
    kind = (tool.parameters or NO_PARAMETERS).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid(param, f"arguments are an object, and the schema's type is {excerpt(kind)}")
