"""Agents that follow a drawn conversation through one of the dialects, and say what the model answered at each step."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.server import Api, Json
from tools.calling.conversations import Conversation, Message

MAX_TOKENS = 100
OnEvent = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, whatever the dialect."""

    text: str
    calls: tuple[tuple[str, Json], ...]
    """Name and arguments of each."""
    prompt_len: int
    cached_len: int
    output_len: int

    @property
    def said(self) -> tuple[str, tuple[tuple[str, Json], ...]]:
        return self.text, self.calls


def right(message: Message) -> tuple[str, tuple[tuple[str, Json], ...]]:
    """What `Reply.said` must be for an answer of a conversation."""
    called = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "", tuple((one["name"], json.loads(one["arguments"])) for one in called)


class Agent(ABC):
    """Keeps a conversation in the form of its dialect. The server's own answers are what it sends back."""

    path: str

    def __init__(
        self, api: Api, conversation: Conversation, *, is_streaming: bool, on_event: OnEvent = lambda: None
    ) -> None:
        """`on_event` is called after each event of a stream."""
        self.tools = [tool.as_json()["function"] for tool in conversation.tools]
        self.items: list[Json] = []
        self._api = api
        self._messages = conversation.messages
        self._is_streaming = is_streaming
        self._on_event = on_event
        self._ids: list[str] = []
        """Ids of calls that have no result yet."""

    def steps(self) -> Iterator[tuple[Message, Reply]]:
        """(right answer, what the server answered) of each step; results go to the calls that the server made."""
        for message in self._messages:
            if message["role"] == "assistant":
                yield message, self._ask()
            elif message["role"] == "tool":
                self.add_result(self._ids.pop(0) if self._ids else "call_none", message["content"])
            else:
                self.add_text(message["role"], message["content"])

    def _ask(self) -> Reply:
        body = {"model": self._api.model, "temperature": 0, **self.body()}
        if self._is_streaming:
            answer = self.put_together(self._events(body | {"stream": True}))
        else:
            got = self._api.http.post(self.path, json=body)
            assert got.status_code == 200, got.text
            answer = got.json()
        reply, self._ids = self.take(answer)
        return reply

    def _events(self, body: Json) -> Iterator[Json]:
        with self._api.http.stream("POST", self.path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event or event["error"] is None, event
                    yield event
                    self._on_event()

    @abstractmethod
    def add_text(self, role: str, text: str) -> None:
        """A message of the system or the user."""

    @abstractmethod
    def add_result(self, call_id: str, text: str) -> None: ...

    @abstractmethod
    def body(self) -> Json:
        """All fields of the request but those that are the same in every dialect."""

    @abstractmethod
    def put_together(self, events: Iterator[Json]) -> Json:
        """The whole answer that the events of a stream come to."""

    @abstractmethod
    def take(self, answer: Json) -> tuple[Reply, list[str]]:
        """Keeps the answer for the next request; what it says, and the ids of its calls."""


class ChatAgent(Agent):
    """An agent of `/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def add_text(self, role: str, text: str) -> None:
        self.items.append({"role": role, "content": text})

    def add_result(self, call_id: str, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def body(self) -> Json:
        tools = [{"type": "function", "function": function} for function in self.tools]
        asked = {"messages": self.items, "max_tokens": MAX_TOKENS}
        offered = {"tools": tools, "tool_choice": "auto"} if tools else {}
        return asked | offered | ({"stream_options": {"include_usage": True}} if self._is_streaming else {})

    def put_together(self, events: Iterator[Json]) -> Json:
        content, finish, usage = "", None, None
        calls: list[Json] = []
        for event in events:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                content += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls") or ():
                    if "id" in part:
                        assert part["index"] == len(calls)
                        calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        message = {"role": "assistant", "content": content or None} | ({"tool_calls": calls} if calls else {})
        return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}

    def take(self, answer: Json) -> tuple[Reply, list[str]]:
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = message.get("tool_calls") or []
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop"), choice
        self.items.append(message)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text, called = right(message)
        reply = Reply(text, called, usage["prompt_tokens"], cached, usage["completion_tokens"])
        return reply, [call["id"] for call in calls]


class ResponsesAgent(Agent):
    """An agent of `/v1/responses`."""

    path = "/v1/responses"

    def add_text(self, role: str, text: str) -> None:
        self.items.append({"role": role, "content": text})

    def add_result(self, call_id: str, text: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def body(self) -> Json:
        tools = [{"type": "function", **function} for function in self.tools]
        return {"input": self.items, "max_output_tokens": MAX_TOKENS} | ({"tools": tools} if tools else {})

    def put_together(self, events: Iterator[Json]) -> Json:
        deltas: dict[int, str] = {}
        last: Json = {}
        for last in events:
            if last["type"].endswith(".delta"):
                deltas[last["output_index"]] = deltas.get(last["output_index"], "") + last["delta"]
        assert last["type"] == "response.completed"
        response: Json = last["response"]
        for index, item in enumerate(response["output"]):
            assert deltas[index] == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        return response

    def take(self, answer: Json) -> tuple[Reply, list[str]]:
        assert answer["status"] == "completed", answer
        self.items += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        called = tuple((item["name"], json.loads(item["arguments"])) for item in calls)
        usage = answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        reply = Reply("".join(texts), called, usage["input_tokens"], cached, usage["output_tokens"])
        return reply, [item["call_id"] for item in calls]


class MessagesAgent(Agent):
    """An agent of `/v1/messages`."""

    path = "/v1/messages"

    def add_text(self, role: str, text: str) -> None:
        self.items.append({"role": role, "content": text})

    def add_result(self, call_id: str, text: str) -> None:
        """Results of one answer are blocks of one message."""
        if self.items[-1]["role"] != "user":
            self.items.append({"role": "user", "content": []})
        self.items[-1]["content"].append({"type": "tool_result", "tool_use_id": call_id, "content": text})

    def body(self) -> Json:
        tools = [_as_anthropics(function) for function in self.tools]
        system = {item["role"]: item["content"] for item in self.items[:1] if item["role"] == "system"}
        asked = {"messages": self.items[len(system) :], "max_tokens": MAX_TOKENS}
        return asked | system | ({"tools": tools, "tool_choice": {"type": "auto"}} if tools else {})

    def put_together(self, events: Iterator[Json]) -> Json:
        message: Json = {}
        arguments: dict[int, str] = {}
        for event in events:
            if event["type"] == "message_start":
                message = event["message"]
            elif event["type"] == "content_block_start":
                message["content"].append(event["content_block"])
            elif event["type"] == "content_block_delta" and "text" in event["delta"]:
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            elif event["type"] == "content_block_delta":
                index = event["index"]
                arguments[index] = arguments.get(index, "") + event["delta"]["partial_json"]
            elif event["type"] == "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
        for index, text in arguments.items():
            message["content"][index]["input"] = json.loads(text)
        return message

    def take(self, answer: Json) -> tuple[Reply, list[str]]:
        blocks = answer["content"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        assert answer["stop_reason"] == ("tool_use" if calls else "end_turn"), answer
        self.items.append({"role": "assistant", "content": blocks})
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        called = tuple((block["name"], block["input"]) for block in calls)
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        reply = Reply(text, called, usage["input_tokens"] + cached, cached, usage["output_tokens"])
        return reply, [block["id"] for block in calls]


def _as_anthropics(function: Mapping[str, Any]) -> Json:
    return {**{k: v for k, v in function.items() if k != "parameters"}, "input_schema": function["parameters"]}


AGENTS: Mapping[str, type[Agent]] = {"chat": ChatAgent, "responses": ResponsesAgent, "messages": MessagesAgent}
