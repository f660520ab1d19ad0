"""langchain-anthropic: messages, streams, tools."""

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool

from tools.clients.harness import SENTENCE, WEATHER, Server, require, run


def _look_up(city: str) -> str:
    """Weather of a city."""
    return "7 C"


_TOOL: Any = tool(WEATHER)(_look_up)


def _model(server: Server, max_tokens: int = 32) -> Any:
    fields: dict[str, Any] = {"base_url": server.url, "api_key": "none", "max_tokens": max_tokens}
    return ChatAnthropic(model=server.model, **fields)


def invoke(server: Server) -> None:
    reply = _model(server).invoke(SENTENCE)
    require(reply.content and reply.usage_metadata["input_tokens"], reply)


def stream(server: Server) -> None:
    require("".join(str(chunk.text) for chunk in _model(server).stream(SENTENCE)))


def bind_tools(server: Server) -> None:
    reply = _model(server, 200).bind_tools([_TOOL], tool_choice="any").invoke("Weather in Oslo?")
    require(reply.tool_calls and "city" in reply.tool_calls[0]["args"], reply)


if __name__ == "__main__":
    run([invoke, stream, bind_tools])
