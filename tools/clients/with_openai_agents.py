"""openai-agents: its default, the responses API, and chat completions; tools, output types, streams."""

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

from tools.clients.harness import SENTENCE, Server, require, run

set_tracing_disabled(True)
_CALLED: list[str] = []


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)


def _look_up(city: str) -> str:
    """Weather of a city."""
    _CALLED.append(city)
    return "7 C"


_TOOL: Any = function_tool(_look_up)


def _agent(server: Server, kind: Any = OpenAIResponsesModel, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    settings = fields.pop("model_settings", ModelSettings(max_tokens=64))
    model = kind(model=server.model, openai_client=client)
    return Agent(name="a", instructions="Be brief.", model=model, model_settings=settings, **fields)


def responses(server: Server) -> None:
    require(isinstance(Runner.run_sync(_agent(server), SENTENCE).final_output, str))


def responses_stream(server: Server) -> None:
    async def ask() -> int:
        result = Runner.run_streamed(_agent(server), SENTENCE)
        return len([event async for event in result.stream_events()])

    require(asyncio.run(ask()) > 3)


def _calls(server: Server, kind: Any) -> None:
    _CALLED.clear()
    settings = ModelSettings(max_tokens=200, tool_choice="required")
    Runner.run_sync(_agent(server, kind, tools=[_TOOL], model_settings=settings), "Weather in Oslo?")
    require(_CALLED, "no call")


def responses_tools(server: Server) -> None:
    _calls(server, OpenAIResponsesModel)


def responses_output_type(server: Server) -> None:
    settings = ModelSettings(max_tokens=200)
    made = Runner.run_sync(_agent(server, output_type=City, model_settings=settings), SENTENCE).final_output
    require(isinstance(made, City), made)


def chat_completions(server: Server) -> None:
    require(isinstance(Runner.run_sync(_agent(server, OpenAIChatCompletionsModel), SENTENCE).final_output, str))


def chat_completions_tools(server: Server) -> None:
    _calls(server, OpenAIChatCompletionsModel)


if __name__ == "__main__":
    run(
        [
            responses,
            responses_stream,
            responses_tools,
            responses_output_type,
            chat_completions,
            chat_completions_tools,
        ]
    )
