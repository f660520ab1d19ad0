"""langchain-openai: chats, completions, tools, structured output, responses."""

import asyncio
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tools.clients.harness import SENTENCE, WEATHER, Server, require, run


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)


def _look_up(city: str) -> str:
    """Weather of a city."""
    return "7 C"


_TOOL: Any = tool(WEATHER)(_look_up)


def _model(server: Server, **fields: Any) -> Any:
    asked = {"model": server.model, "base_url": f"{server.url}/v1", "api_key": "none", "max_tokens": 32} | fields
    return ChatOpenAI(**asked)


def invoke(server: Server) -> None:
    require(_model(server).invoke(SENTENCE).content)


def stream(server: Server) -> None:
    require("".join(str(chunk.content) for chunk in _model(server).stream(SENTENCE)))


def astream_and_batch(server: Server) -> None:
    async def ask() -> int:
        return len([chunk async for chunk in _model(server).astream(SENTENCE)])

    require(asyncio.run(ask()) and len(_model(server).batch(["hi", "ho"])) == 2)


def completions(server: Server) -> None:
    client: Any = OpenAI(model=server.model, base_url=f"{server.url}/v1", api_key="none", max_tokens=8)
    require(isinstance(client.invoke("One, two,"), str))


def bind_tools(server: Server) -> None:
    reply = _model(server, max_tokens=200).bind_tools([_TOOL], tool_choice="any").invoke("Weather in Oslo?")
    require(reply.tool_calls and "city" in reply.tool_calls[0]["args"], reply)


def structured_output_by_json_schema(server: Server) -> None:
    made = _model(server, max_tokens=200).with_structured_output(City, method="json_schema").invoke(SENTENCE)
    require(isinstance(made, City), made)


def structured_output_by_function_calling(server: Server) -> None:
    made = _model(server, max_tokens=200).with_structured_output(City, method="function_calling").invoke(SENTENCE)
    require(isinstance(made, City), made)


def responses_api(server: Server) -> None:
    model = _model(server, use_responses_api=True)
    require(model.invoke(SENTENCE).text and "".join(str(chunk.text) for chunk in model.stream(SENTENCE)))


if __name__ == "__main__":
    run(
        [
            invoke,
            stream,
            astream_and_batch,
            completions,
            bind_tools,
            structured_output_by_json_schema,
            structured_output_by_function_calling,
            responses_api,
        ]
    )
