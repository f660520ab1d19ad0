"""Anthropic's library for Python: messages, streams, counting."""

from typing import Any

import anthropic

from tools.clients.harness import CITY_SCHEMA, SENTENCE, WEATHER, Server, require, run

_TOOL = {"name": WEATHER, "description": "Weather", "input_schema": CITY_SCHEMA}
_CACHED = {"cache_control": {"type": "ephemeral"}}


def _client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def _asked(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "max_tokens": 16, "messages": [{"role": "user", "content": SENTENCE}]} | fields


def _create(server: Server, **fields: Any) -> Any:
    return _client(server).messages.create(**_asked(server, **fields))


def models(server: Server) -> None:
    require(server.model in [model.id for model in _client(server).models.list()])


def message(server: Server) -> None:
    reply = _create(server, system="Be brief.", stop_sequences=["zzz"])
    require(reply.content[0].text and reply.stop_reason in ("end_turn", "max_tokens"), reply)


def cached_tokens_are_told(server: Server) -> None:
    system = [{"type": "text", "text": "Be brief and kind. " * 30, **_CACHED}]
    replies = [_create(server, system=system) for _ in range(2)]
    require(replies[1].usage.cache_read_input_tokens > 60, replies[1].usage)


def stream(server: Server) -> None:
    with _client(server).messages.stream(**_asked(server)) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    require(text and final.content[0].text == text and final.usage.output_tokens, final)


def count_tokens(server: Server) -> None:
    asked = _asked(server)
    del asked["max_tokens"]
    counted = _client(server).messages.count_tokens(**asked).input_tokens
    usage = _create(server).usage
    require(counted == usage.input_tokens + usage.cache_read_input_tokens, counted)


def tools_offered(server: Server) -> None:
    require(_create(server, tools=[_TOOL]).stop_reason in ("end_turn", "max_tokens", "tool_use"))


def tools_required(server: Server) -> None:
    reply = _create(server, tools=[_TOOL], tool_choice={"type": "any"}, max_tokens=200)
    call = next(block for block in reply.content if block.type == "tool_use")
    require(call.name == WEATHER and "city" in call.input, reply)
    said = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "7 C"}]},
    ]
    require(_create(server, messages=said, tools=[_TOOL]).type == "message")


def tools_streamed(server: Server) -> None:
    asked = _asked(server, tools=[_TOOL], tool_choice={"type": "tool", "name": WEATHER}, max_tokens=200)
    with _client(server).messages.stream(**asked) as events:
        final = events.get_final_message()
    require("city" in next(block for block in final.content if block.type == "tool_use").input, final)


def structured_output(server: Server) -> None:
    config = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    reply = _create(server, output_config=config, max_tokens=200)
    require(reply.content[0].text.lstrip().startswith("{"), reply)


def error_classes(server: Server) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"model": "x"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError),
    ]
    for fields, expected in wrong:
        try:
            _create(server, **fields)
        except expected:
            continue
        raise AssertionError(f"{fields} was taken")


if __name__ == "__main__":
    run(
        [
            models,
            message,
            cached_tokens_are_told,
            stream,
            count_tokens,
            tools_offered,
            tools_required,
            tools_streamed,
            structured_output,
            error_classes,
        ]
    )
