"""Functions as chat completions offer them."""

from collections.abc import Sequence
from typing import Literal

from deltaserve.server.body_fields import UnknownFields
from deltaserve.server.chat_messages import MessagePart, count_others
from deltaserve.server.tool_use import FunctionTool


class FunctionDefinition(MessagePart):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolDefinition(MessagePart):
    """A tool; there are functions alone."""

    type: Literal["function"]
    function: FunctionDefinition


def function_tools(given: Sequence[ToolDefinition], unknown: UnknownFields) -> list[FunctionTool]:
    """The functions, unchecked. Fields of theirs that nobody knows are counted."""
    tools = []
    for each in given:
        count_others(each, "tools[]", unknown)
        count_others(each.function, "tools[].function", unknown)
        function = each.function
        tools.append(FunctionTool(function.name, function.description, function.parameters, bool(function.strict)))
    return tools
