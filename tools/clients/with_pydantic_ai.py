"""pydantic-ai: text, streams, tools, output types, over chat completions and responses."""

import asyncio
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tools.clients.harness import SENTENCE, Server, require, run


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)


def _agent(server: Server, kind: Any = OpenAIChatModel, **fields: Any) -> Any:
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    settings: Any = {"max_tokens": 200}
    return Agent(kind(server.model, provider=provider), model_settings=settings, retries=0, **fields)


def text(server: Server) -> None:
    require(isinstance(_agent(server).run_sync(SENTENCE).output, str))


def stream(server: Server) -> None:
    async def ask() -> str:
        async with _agent(server).run_stream(SENTENCE) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    require(asyncio.run(ask()))


def output_type_by_tools(server: Server) -> None:
    require(isinstance(_agent(server, output_type=City).run_sync(SENTENCE).output, City))


def output_type_by_json_schema(server: Server) -> None:
    require(isinstance(_agent(server, output_type=NativeOutput(City)).run_sync(SENTENCE).output, City))


def responses(server: Server) -> None:
    require(isinstance(_agent(server, OpenAIResponsesModel).run_sync(SENTENCE).output, str))


if __name__ == "__main__":
    run([text, stream, output_type_by_tools, output_type_by_json_schema, responses])
