"""Conversations in other words than those of chat completions: made into messages, and errors told in their words."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from deltaserve.server.api_errors import ApiError, invalid, unsupported
from deltaserve.server.chat_messages import ChatMessage
from deltaserve.server.field_errors import first_error, listed, only, shown
from deltaserve.server.jobs import Job

Part = TypeVar("Part", bound=BaseModel)
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(?:\.(.*))?")
_TOOL = re.compile(r"tools\[(\d+)\]\.function\.(.*)")


@dataclass(slots=True)
class Turns:
    """Messages in OpenAI's form as they are made."""

    messages: list[dict[str, object]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Where the client wrote each."""
    call_places: dict[tuple[int, int], str] = field(default_factory=dict)
    """(index of a message, number of a call in it) |-> where the client wrote the call."""
    tool_places: list[str] = field(default_factory=list)
    """Where the client wrote each tool; empty: they are all that it wrote, in order."""

    def add(self, place: str, **message: object) -> None:
        self.messages.append(message)
        self.places.append(place)

    def call(self, place: str, call_id: str, name: str, arguments: object) -> None:
        """A call: of the assistant's turn that is the last, or of one of its own."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(place, role="assistant", content=None)
        calls = self.messages[-1].setdefault("tool_calls", [])
        assert isinstance(calls, list)
        self.call_places[len(self.messages) - 1, len(calls)] = place
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def read(self) -> list[ChatMessage]:
        """Raises ApiError 400 naming the place."""
        return [read_part(ChatMessage, each, place) for each, place in zip(self.messages, self.places, strict=True)]


def read_part(model: type[Part], value: Mapping[str, object], place: str) -> Part:
    """An object inside a body. Raises ApiError 400 naming its field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        wrong = first_error(error)
        wrong.rename(f"{place}.{wrong.param}" if wrong.param else place)
        raise wrong from error


def place_of(turns: Turns, names: Mapping[str, str], parts: Mapping[str, str]) -> Callable[[str], str]:
    """The client's name of a field by that of chat completions. `names`: those that differ. `parts`: names of
    the fields of messages, calls and tools; of those of a message or call that are not in it the place alone is told,
    since the client wrote no such field."""

    def found(param: str) -> str:
        message = _MESSAGE.fullmatch(param)
        if message is not None and int(message[1]) < len(turns.places):
            index, call, part = int(message[1]), message[2], message[3] or ""
            place = turns.places[index] if call is None else turns.call_places[index, int(call)]
            return f"{place}.{parts[part]}" if part in parts else place
        tool = _TOOL.fullmatch(param)
        if tool is not None:
            index = int(tool[1])
            place = turns.tool_places[index] if turns.tool_places else f"tools[{index}]"
            return f"{place}.{parts.get(tool[2], tool[2])}"
        theirs = next((name for name in names if re.match(rf"{re.escape(name)}\b", param)), None)
        return param if theirs is None else names[theirs] + param.removeprefix(theirs)

    return found


@contextmanager
def told_by(name: Callable[[str], str]) -> Iterator[None]:
    """Errors name fields as `name` has them."""
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            error.rename(name(error.param))
        raise


def named_job(job: Job, name: Callable[[str], str]) -> Job:
    """`job`, which is refused by the client's name of a grammar that cannot be followed."""
    if job.constraint is None:
        return job
    parts = [replace(part, param=name(part.param)) for part in job.constraint.parts]
    return replace(job, constraint=replace(job.constraint, param=name(job.constraint.param), parts=parts))


def kind_of(value: Mapping[str, object], kinds: Collection[str], place: str) -> str:
    """The `type` of an object. Raises ApiError 400 for one that is none of `kinds`."""
    kind, param = value.get("type"), f"{place}.type"
    quoted = [f'"{each}"' for each in kinds]
    if not isinstance(kind, str):
        raise invalid(param, f"{param} is {shown(kind)}, expected {listed(quoted, 'or')}")
    if kind not in kinds:
        raise unsupported(param, f"{param} is {shown(kind)}, {only(quoted)} supported")
    return kind
