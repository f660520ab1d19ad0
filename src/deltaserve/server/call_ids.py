"""Ids that tie a tool's result to its call. Agents leave out either of them, or both."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from deltaserve.server.api_errors import ApiError, excerpt, invalid
from deltaserve.server.text.template_needs import SYSTEM_ROLES

Message = Mapping[str, object]
"""A message in OpenAI's form: `tool_calls` is a list of {"function": {"name": ...}}, with or without an "id"."""


@dataclass(frozen=True, slots=True)
class Tied:
    """A conversation whose results are known by their calls."""

    messages: Sequence[Message]
    """Each call and each tool message has an id; the results of a turn stand in the order of its calls, since many
    templates show no ids, and their models take the first result for that of the first call. What the system says
    among the results stands behind them."""
    order: Sequence[int]
    """Index of each message as the client sent it."""


@dataclass(slots=True)
class _CallOfTurn:
    name: object
    id: object
    made_up: str
    number: int
    """Place in its turn."""
    is_answered: bool = False


class _OpenCalls:
    """The calls of one assistant turn, while their results come. Constant time for each: a body may hold thousands."""

    def __init__(self, calls: Sequence[_CallOfTurn], index: int = 0) -> None:
        """`index`: of the turn's message. Raises ApiError 400 where two calls have one id."""
        self.index = index
        self._by_id: dict[object, _CallOfTurn] = {}
        for call in calls:
            if call.id and self._by_id.setdefault(call.id, call) is not call:
                param = f"messages[{index}].tool_calls[{call.number}].id"
                text = f"{param} is {excerpt(call.id)} again: results of calls in one turn could not be told apart"
                raise invalid(param, text)
        self._by_name: dict[object, deque[_CallOfTurn]] = {}
        for call in calls:
            self._by_name.setdefault(call.name, deque()).append(call)
        self._all = deque(calls)
        self._calls = calls

    def answered(self, given: object, name: object, param: str) -> _CallOfTurn:
        """The call with this id, else the first that lacks a result and an id: of those with this name, if any.

        Raises ApiError 400 naming `param`, where the id stands, for a result of no call or of one that has its own.
        """
        call = self._by_id.get(given) or _open(self._by_name.get(name), given) or _open(self._all, given)
        if call is None:
            raise _of_no_call(given, param)
        if call.is_answered:
            raise invalid(param, f"{param} is {excerpt(given)} again: this call has its result")
        call.is_answered = True
        if not call.id:
            call.id = given or call.made_up
            self._by_id[call.id] = call
        return call

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def end(self) -> None:
        """Raises ApiError 400 for a call without a result before one that has its own: by their order, as many
        templates show them, the later one's result would be this one's."""
        last = max((call.number for call in self._calls if call.is_answered), default=-1)
        lacking = next((call.number for call in self._calls[: last + 1] if not call.is_answered), None)
        if lacking is not None:
            param = f"messages[{self.index}].tool_calls[{lacking}]"
            text = "has no result, and a later call of its turn has one: it could be taken for this one's"
            raise invalid(param, f"{param} {text}")


def _open(queue: deque[_CallOfTurn] | None, given: object) -> _CallOfTurn | None:
    while queue and queue[0].is_answered:
        queue.popleft()
    return queue[0] if queue and not (given and queue[0].id) else None


def _of_no_call(given: object, param: str) -> ApiError:
    if given:
        text = f"is {excerpt(given)}, and no call in the assistant's turn before it has this id"
    else:
        text = "is not there, and no call in the assistant's turn before it lacks a result"
    return invalid(param, f"{param} {text}")


def tied(messages: Sequence[Message]) -> Tied:
    """The conversation with an id in every call and every tool message. An id that only the result has becomes the
    call's, and one that neither has is made up.

    Raises ApiError 400 for results that could be taken for those of another call.
    """
    calls: list[_CallOfTurn] = []
    turn = _OpenCalls(())
    keys: list[tuple[int, int]] = []  # (index of the turn, place in it) by which messages are ordered
    answers: dict[int, _CallOfTurn] = {}
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            param = f"messages[{index}].tool_call_id"
            answers[index] = turn.answered(message.get("tool_call_id"), message.get("name"), param)
            keys.append((turn.index, answers[index].number))
            continue
        if message["role"] in SYSTEM_ROLES:  # results that follow are still the turn's, and stand beside its calls
            keys.append((turn.index, turn.num_calls))
            continue
        turn.end()
        own = list(_calls(message, len(calls)))
        calls += own
        turn = _OpenCalls(own, index)
        keys.append((index, -1))
    turn.end()
    each = iter(calls)
    completed = [_completed(message, answers.get(index), each) for index, message in enumerate(messages)]
    order = sorted(range(len(messages)), key=keys.__getitem__)
    return Tied([completed[index] for index in order], order)


def _calls(message: Message, num_before: int) -> Iterator[_CallOfTurn]:
    calls = _list_of(message)
    given = {call.get("id") for call in calls}
    numbers = count(num_before)
    for place, call in enumerate(calls):
        name = call["function"]["name"]  # type: ignore[index]
        # Kimi K2 was trained on ids of this form; to other models an id is any text.
        made_up = next(each for each in (f"functions.{name}:{number}" for number in numbers) if each not in given)
        yield _CallOfTurn(name, call.get("id"), made_up, place)


def _list_of(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _completed(message: Message, answer: _CallOfTurn | None, calls: Iterator[_CallOfTurn]) -> Message:
    if answer is not None:
        return {**message, "tool_call_id": answer.id}
    inner = _list_of(message)
    if not inner:
        return message
    pairs = [(call, next(calls)) for call in inner]
    return {**message, "tool_calls": [{**call, "id": found.id or found.made_up} for call, found in pairs]}
