"""OpenAI's library for Python: chats, completions, responses."""

import asyncio
import json
from typing import Any

import openai
from pydantic import BaseModel, Field

from tools.clients.harness import CITY_SCHEMA, SENTENCE, WEATHER, Check, Server, require, run

_TOOL: Any = {"type": "function", "function": {"name": WEATHER, "description": "Weather", "parameters": CITY_SCHEMA}}
_FLAT: Any = {"type": "function", "name": WEATHER, "description": "Weather", "parameters": CITY_SCHEMA, "strict": True}


class City(BaseModel):
    """What `parse` is to make."""

    city: str = Field(max_length=20)


def _client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _chat(server: Server, **fields: Any) -> Any:
    asked = {"model": server.model, "messages": [{"role": "user", "content": SENTENCE}], "max_tokens": 16} | fields
    return _client(server).chat.completions.create(**asked)


def models(server: Server) -> None:
    require(server.model in [model.id for model in _client(server).models.list()])


def chat(server: Server) -> None:
    reply = _chat(server)
    require(reply.choices[0].message.content and reply.usage.completion_tokens, reply)


def chat_stream(server: Server) -> None:
    chunks = list(_chat(server, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    require(text and chunks[-1].usage.total_tokens, chunks[-1])


def chat_logprobs(server: Server) -> None:
    reply = _chat(server, logprobs=True, top_logprobs=2, n=2)
    require(all(len(choice.logprobs.content[0].top_logprobs) == 2 for choice in reply.choices), reply)


def chat_seed(server: Server) -> None:
    texts = {_chat(server, seed=7, temperature=1).choices[0].message.content for _ in range(2)}
    require(len(texts) == 1, texts)


def chat_async(server: Server) -> None:
    async def ask() -> list[Any]:
        client: Any = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        body = {"model": server.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        return await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(8)))

    require(all(reply.usage.completion_tokens for reply in asyncio.run(ask())))


def chat_json_object(server: Server) -> None:
    reply = _chat(server, response_format={"type": "json_object"}, max_tokens=100, stop=["}"], temperature=0)
    require(reply.choices[0].message.content.lstrip().startswith("{"), reply)


def chat_parse(server: Server) -> None:
    messages = [{"role": "user", "content": SENTENCE}]
    reply = _client(server).chat.completions.parse(
        model=server.model, messages=messages, response_format=City, max_tokens=200
    )
    require(isinstance(reply.choices[0].message.parsed, City), reply)


def chat_tools_offered(server: Server) -> None:
    require(_chat(server, tools=[_TOOL]).choices[0].finish_reason in ("stop", "length", "tool_calls"))


def chat_tools_required(server: Server) -> None:
    reply = _chat(server, tools=[_TOOL], tool_choice="required", max_tokens=200)
    (call, *_) = reply.choices[0].message.tool_calls
    require(call.function.name == WEATHER and "city" in json.loads(call.function.arguments), reply)


def chat_tools_streamed(server: Server) -> None:
    named = {"type": "function", "function": {"name": WEATHER}}
    chunks = list(_chat(server, tools=[_TOOL], tool_choice=named, max_tokens=200, stream=True))
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    require(parts and parts[0].function.name == WEATHER, chunks[-1])
    require("city" in json.loads("".join(part.function.arguments or "" for part in parts if part.index == 0)))


def chat_tool_history(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": WEATHER, "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7 C"},
    ]
    require(_chat(server, messages=messages, tools=[_TOOL]).usage.prompt_tokens)


def completions(server: Server) -> None:
    reply = _client(server).completions.create(
        model=server.model, prompt=["One, two,", "A, B,"], max_tokens=4, echo=True, logprobs=1
    )
    require([choice.text[:2] for choice in reply.choices] == ["On", "A,"], reply)


def error_classes(server: Server) -> None:
    for fields, expected in (({"model": "x"}, openai.NotFoundError), ({"max_tokens": 0}, openai.BadRequestError)):
        try:
            _chat(server, **fields)
        except expected:
            continue
        raise AssertionError(f"{fields} was taken")


def _respond(server: Server, **fields: Any) -> Any:
    asked = {"model": server.model, "input": SENTENCE, "max_output_tokens": 16} | fields
    return _client(server).responses.create(**asked)


def responses(server: Server) -> None:
    reply = _respond(server)
    require(reply.output_text and reply.usage.input_tokens_details.cached_tokens >= 0, reply)


def responses_conversation(server: Server) -> None:
    said = [
        {"role": "user", "content": "hi"},
        *_respond(server).output,
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    require(_respond(server, input=said, instructions="Be brief.").output_text is not None)


def responses_stream(server: Server) -> None:
    asked = {"model": server.model, "input": SENTENCE, "max_output_tokens": 100, "temperature": 0}
    with _client(server).responses.stream(**asked) as stream:
        numbers = [event.sequence_number for event in stream]
        final = stream.get_final_response() if numbers else None
    require(numbers == sorted(numbers) and final is not None and final.output_text, final)


def responses_parse(server: Server) -> None:
    asked = {"model": server.model, "input": SENTENCE, "max_output_tokens": 200}
    reply = _client(server).responses.parse(text_format=City, **asked)
    require(isinstance(reply.output_parsed, City), reply)


def responses_tools(server: Server) -> None:
    reply = _respond(server, tools=[_FLAT], tool_choice="required", max_output_tokens=200)
    call = next(item for item in reply.output if item.type == "function_call")
    require("city" in json.loads(call.arguments), reply)
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "7 C"}
    said = [{"role": "user", "content": "Weather?"}, *reply.output, told]
    require(_respond(server, input=said, tools=[_FLAT]).status in ("completed", "incomplete"))


def responses_state_is_refused(server: Server) -> None:
    try:
        _respond(server, previous_response_id="resp_1")
    except openai.BadRequestError as error:
        require(error.param == "previous_response_id", error)
        return
    raise AssertionError("it was taken")


CHECKS: list[Check] = [
    models,
    chat,
    chat_stream,
    chat_logprobs,
    chat_seed,
    chat_async,
    chat_json_object,
    chat_parse,
    chat_tools_offered,
    chat_tools_required,
    chat_tools_streamed,
    chat_tool_history,
    completions,
    error_classes,
    responses,
    responses_conversation,
    responses_stream,
    responses_parse,
    responses_tools,
    responses_state_is_refused,
]

if __name__ == "__main__":
    run(CHECKS)
