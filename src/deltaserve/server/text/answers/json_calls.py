"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`. Arguments are passed on as they are."""

import msgspec

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ('"name"', '"tool_name"')
_BEFORE = (*_NAMES, '"type"', '"id"', '"tool_call_id"')
"""What may stand before them."""
_MAX_NAME = 256


def read_json_call(stream: AnswerStream, *, any_order: bool) -> Wait[bool]:
    """Say the call that begins here. False: it is none.

    `any_order`: the name may stand behind the arguments, so that nothing is said before the object is complete;
    otherwise what does not begin with it is no call.
    """
    if (yield from stream.peek()) != "{":
        return False
    name = yield from _head(stream)
    if name is None:
        return any_order and (yield from _read_whole(stream))
    if name not in stream.tools:
        return False
    char = yield from stream.peek()
    if char == "{":
        stream.begin_call(name)
        if not (yield from stream.json_object(stream.arguments)):
            return True
    else:
        text = yield from _as_text(stream, char)
        if text is None:
            return False
        stream.call(name, text)
    yield from _skip_rest(stream)
    return True


def read_json_list(stream: AnswerStream, *ends: str) -> Wait[bool]:
    """Say the calls of a JSON list that begins here, and read what ends it. False: the first is none."""
    if not (yield from stream.accept("[")):
        return False
    return (yield from stream.each_call(lambda: read_json_call(stream, any_order=False), "]", *ends, separator=","))


def _skip_rest(stream: AnswerStream) -> Wait[None]:
    """Read texts behind the arguments, such as an id, and the brace."""
    yield from stream.skip()
    while (yield from stream.accept(",")):
        yield from stream.skip()
        yield from stream.json_string(_MAX_NAME)
        yield from stream.skip()
        yield from stream.accept(":")
        yield from stream.skip()
        if (yield from stream.json_string(_MAX_NAME)) is None:
            return
        yield from stream.skip()
    yield from stream.accept("}")


def _head(stream: AnswerStream) -> Wait[str | None]:
    """Read `{"name": NAME, "arguments":` up to the arguments, or to a brace where there are none. None: it is other."""
    name: str | None = None
    opened = "{"
    while (yield from stream.accept(opened)):
        yield from stream.skip()
        key = yield from stream.json_string(_MAX_NAME)
        yield from stream.skip()
        if key is None or not (yield from stream.accept(":")):
            return None
        yield from stream.skip()
        if key.strip('"') in _ARGUMENTS:
            return name
        value = yield from stream.json_string(_MAX_NAME)
        if key not in _BEFORE or value is None:
            return None
        name = _text_of(value) if key in _NAMES else name
        yield from stream.skip()
        if name is not None and (yield from stream.peek()) == "}":
            return name
        opened = ","
    return None


def _as_text(stream: AnswerStream, char: str) -> Wait[str | None]:
    """Arguments that are not an object: a text that holds one, null or nothing."""
    if char == '"':
        value = yield from stream.json_string()
        text = None if value is None else _text_of(value)
        return text if text is None or text.strip() else "{}"
    if char == "}" or (yield from stream.accept("null")):
        return "{}"
    return None


def _read_whole(stream: AnswerStream) -> Wait[bool]:
    """The object from where it was tried on, in any order."""
    stream.rewind()
    stream.hold()
    yield from stream.skip()
    texts: list[str] = []
    if not (yield from stream.json_object(texts.append)):
        return False
    try:
        call = msgspec.json.decode("".join(texts), type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(call["name"], type=str)
    except (ValueError, KeyError, RecursionError):
        return False
    arguments = next((bytes(call[key]).decode() for key in _ARGUMENTS if key in call), "{}")
    if name not in stream.tools or not arguments.startswith("{"):
        return False
    stream.call(name, arguments)
    return True


def _text_of(value: str) -> str | None:
    """The text that a JSON string spells; None: it spells none."""
    try:
        return msgspec.json.decode(value, type=str)
    except ValueError:
        return None
