"""litellm: its OpenAI and hosted vLLM routes, its translation to responses and to Anthropic's messages."""

import asyncio
import json
from typing import Any

import litellm

from tools.clients.harness import CITY_SCHEMA, SENTENCE, WEATHER, Server, require, run

_TOOL: Any = {"type": "function", "function": {"name": WEATHER, "description": "Weather", "parameters": CITY_SCHEMA}}


def _asked(server: Server, route: str = "openai", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": SENTENCE}]
    where = {"model": f"{route}/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none"}
    return {**where, "messages": messages, "max_tokens": 16, "num_retries": 0} | fields


def completion(server: Server) -> None:
    reply: Any = litellm.completion(**_asked(server))
    require(reply.choices[0].message.content, reply)


def completion_by_hosted_vllm(server: Server) -> None:
    reply: Any = litellm.completion(**_asked(server, "hosted_vllm"))
    require(reply.choices[0].message.content, reply)


def stream(server: Server) -> None:
    chunks: Any = litellm.completion(**_asked(server, stream=True))
    require("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def acompletion(server: Server) -> None:
    reply: Any = asyncio.run(litellm.acompletion(**_asked(server)))
    require(reply.choices[0].message.content, reply)


def tools_required(server: Server) -> None:
    reply: Any = litellm.completion(**_asked(server, tools=[_TOOL], tool_choice="required", max_tokens=200))
    require("city" in json.loads(reply.choices[0].message.tool_calls[0].function.arguments), reply)


def response_format(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    reply: Any = litellm.completion(**_asked(server, response_format=schema, max_tokens=200))
    require("city" in json.loads(reply.choices[0].message.content), reply)


def responses(server: Server) -> None:
    where = {"model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none"}
    reply: Any = litellm.responses(input=SENTENCE, max_output_tokens=16, **where)
    require(reply.output, reply)


def anthropic_route(server: Server) -> None:
    asked = _asked(server, "anthropic") | {"api_base": server.url}
    reply: Any = litellm.completion(**asked)
    require(reply.choices[0].message.content, reply)


if __name__ == "__main__":
    run(
        [
            completion,
            completion_by_hosted_vllm,
            stream,
            acompletion,
            tools_required,
            response_format,
            responses,
            anthropic_route,
        ]
    )
