"""Ids that tie a tool's answer to its call. Agents leave out either of them, or both."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deltaserve.server.api_errors import invalid

Message = Mapping[str, object]
"""A message in OpenAI's form: `tool_calls` is a list of {"function": {"name": ...}}, with or without an "id"."""


@dataclass(slots=True)
class _CallOfTurn:
    name: object
    id: object
    made_up: str
    is_answered: bool = False


class _OpenCalls:
    """The calls of one assistant turn, while their answers come. Constant time for each: a body may hold thousands."""

    def __init__(self, calls: Sequence[_CallOfTurn]) -> None:
        self._by_id = _queues((call.id, call) for call in calls if call.id)
        self._by_name = _queues((call.name, call) for call in calls)
        self._all = deque(calls)

    def answered(self, given: object, name: object) -> _CallOfTurn | None:
        """The call with this id, else the first that lacks an answer and an id: of those with this name, if any."""
        call = self._with_id(given) or _open(self._by_name.get(name), given) or _open(self._all, given)
        if call is not None:
            call.is_answered = True
            call.id = call.id or given or call.made_up
        return call

    def _with_id(self, given: object) -> _CallOfTurn | None:
        queue = self._by_id.get(given)
        if not queue:
            return None
        return queue.popleft() if len(queue) > 1 else queue[0]  # of one id again: the next call; the last is kept


def _queues(pairs: Iterator[tuple[object, _CallOfTurn]]) -> dict[object, deque[_CallOfTurn]]:
    queues: dict[object, deque[_CallOfTurn]] = {}
    for key, call in pairs:
        queues.setdefault(key, deque()).append(call)
    return queues


def _open(queue: deque[_CallOfTurn] | None, given: object) -> _CallOfTurn | None:
    while queue and queue[0].is_answered:
        queue.popleft()
    return queue[0] if queue and not (given and queue[0].id) else None


def tied(messages: Sequence[Message]) -> list[Message]:
    """The messages with an id in every call and every tool message. An id that only the answer has becomes the call's.

    Raises ApiError 400 for a tool message that answers no call of the assistant turn before it.
    """
    calls: list[_CallOfTurn] = []
    turn = _OpenCalls(())
    answers: dict[int, object] = {}
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            own = list(_calls(message, len(calls)))
            calls += own
            turn = _OpenCalls(own)
            continue
        call = turn.answered(message.get("tool_call_id"), message.get("name"))
        if call is None:
            text = "a tool message must answer a call of the assistant turn before it"
            raise invalid(f"messages[{index}].tool_call_id", text)
        answers[index] = call.id
    each = iter(calls)
    return [_completed(message, answers.get(index), each) for index, message in enumerate(messages)]


def _calls(message: Message, num_before: int) -> Iterator[_CallOfTurn]:
    for number, call in enumerate(_list_of(message)):
        name = call["function"]["name"]  # type: ignore[index]
        # Kimi K2 was trained on ids of this form; to other models an id is any text.
        yield _CallOfTurn(name, call.get("id"), f"functions.{name}:{num_before + number}")


def _list_of(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _completed(message: Message, answer: object, calls: Iterator[_CallOfTurn]) -> Message:
    if answer is not None:
        return {**message, "tool_call_id": answer}
    inner = _list_of(message)
    if not inner:
        return message
    pairs = [(call, next(calls)) for call in inner]
    return {**message, "tool_calls": [{**call, "id": found.id or found.made_up} for call, found in pairs]}
