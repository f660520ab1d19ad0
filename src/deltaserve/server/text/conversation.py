"""A conversation in the words of one template, and what of it the template leaves out."""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deltaserve.server.text.system_turns import is_system, with_systems_shown
from deltaserve.server.text.template_needs import REASONING_NAMES, ArgumentForm, Message, TemplateError, TemplateNeeds

_SHORT_ID_LEN = 9
_ID_LETTERS = string.ascii_letters + string.digits
Shown = Callable[[Sequence[Message]], str]
"""Renders shaped messages. Raises TemplateError."""


def shaped(messages: Sequence[Message], needs: TemplateNeeds) -> list[Message]:
    """Messages in OpenAI's words as the template wants them: content is None, text or text parts, arguments are an
    object or its JSON, reasoning has any of its names. There may be fewer of them: see `with_systems_shown`."""
    return [_shaped(message, needs) for message in with_systems_shown(messages, needs)]


def _shaped(message: Message, needs: TemplateNeeds) -> Message:
    calls = _list_of(message.get("tool_calls"))
    role = "system" if message["role"] == "developer" else message["role"]  # OpenAI's newer name of it
    content = _content(message.get("content"), role, bool(calls), needs)
    shown = {"role": message["role"] if needs.knows_developer else role, "content": content}
    reasoning = next((message[name] for name in REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is not None:
        # One that shows none in any probe may still read it for options that the request gives.
        names = ("reasoning_content", "thinking") if needs.reasoning is None else (needs.reasoning,)
        shown |= dict.fromkeys(names, reasoning)
    if message.get("name") is not None:
        shown["name"] = message["name"]
    if message.get("tool_call_id") is not None:
        shown["tool_call_id"] = _call_id(message["tool_call_id"], needs)
    if calls:
        shown["tool_calls"] = [_call(call, needs) for call in calls]
    return shown


def marked_end(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """The messages with a mark that nobody can guess behind the last one's text, and the mark."""
    mark, last = f"\ue000{secrets.token_hex(12)}\ue002", messages[-1]
    parts = _list_of(last.get("content"))
    text = "".join(str(part["text"]) for part in parts) if parts else str(last.get("content") or "")
    return [*messages[:-1], {**last, "content": text + mark}], mark


def _list_of(value: object) -> list[Mapping[str, object]]:
    return value if isinstance(value, list) else []


def _content(content: object, role: object, has_calls: bool, needs: TemplateNeeds) -> object:
    if not content:
        is_null = content is None and has_calls
        if has_calls and not (needs.takes_null if is_null else needs.takes_empty):
            is_null = not is_null
        return None if is_null else "" if role in needs.text_roles else []
    if isinstance(content, str):
        return content if role in needs.text_roles else [{"type": "text", "text": content}]
    if role in needs.part_roles:
        return content
    # Nothing between them, as templates that take parts do: what was not sent is not added.
    return "".join(str(part["text"]) for part in _list_of(content))


def _call(call: Mapping[str, object], needs: TemplateNeeds) -> Message:
    function = call["function"]
    assert isinstance(function, Mapping), "checked where it was read"
    arguments = function["arguments"]
    if needs.arguments is ArgumentForm.OBJECT and isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
    elif needs.arguments is ArgumentForm.TEXT and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    shown = {**call, "function": {**function, "arguments": arguments}}
    return shown | ({"id": _call_id(call["id"], needs)} if "id" in call else {})


def _call_id(call_id: object, needs: TemplateNeeds) -> object:
    """The id itself, or nine letters and digits made of it where the template takes no others."""
    text = str(call_id)
    if not needs.short_ids or (len(text) == _SHORT_ID_LEN and text.isascii() and text.isalnum()):
        return call_id
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return "".join(
        _ID_LETTERS[number // len(_ID_LETTERS) ** place % len(_ID_LETTERS)] for place in range(_SHORT_ID_LEN)
    )


def new_short_id() -> str:
    """An id of a call that any template takes."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_SHORT_ID_LEN))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a message that the template does not show."""

    index: int
    field: str
    """content, reasoning, name, or tool_calls[k]"""
    is_whole: bool
    """Nothing else of the turn says it: the model would answer another conversation."""


def left_out(messages: Sequence[Message], needs: TemplateNeeds, render: Shown) -> list[LeftOut]:
    """What of these messages (as `shaped` takes them) does not come out of the template.

    Found by rendering a conversation of the same shape whose texts are made-up words: real texts may stand in it twice.
    """
    found = []
    if not needs.shows_name:
        named = (i for i, message in enumerate(messages) if message.get("name") and message["role"] != "tool")
        found = [LeftOut(index, "name", is_whole=False) for index in named]
    if not _is_plain(messages, needs):
        found += _lost_words(messages, needs, render)
    return found


def _is_plain(messages: Sequence[Message], needs: TemplateNeeds) -> bool:
    """Turns that every template shows: a first word of the system, then user and assistant in turn, all with text, the
    last of them the user's: some templates drop what an assistant has begun."""
    turns = messages[1:] if messages and is_system(messages[0]) else messages
    roles = [message["role"] for message in turns]
    in_turn = all(role == ("assistant" if index % 2 else "user") for index, role in enumerate(roles))
    unsure = ("tool_calls",) if needs.reasoning else ("tool_calls", *REASONING_NAMES)
    return in_turn and len(turns) % 2 == 1 and not any(message.get(name) for message in turns for name in unsure)


def _lost_words(messages: Sequence[Message], needs: TemplateNeeds, render: Shown) -> list[LeftOut]:
    words: dict[str, LeftOut] = {}
    copies = [_copy(index, message, needs, words) for index, message in enumerate(messages)]
    try:
        text = render(shaped(copies, needs))
    except TemplateError:  # it looks into the texts; those that came, it has taken
        return []
    shown = {*_MADE_UP.findall(text.casefold())}  # a template may write all in capitals
    return [lost for word, lost in words.items() if word not in shown]


_MADE_UP = re.compile("w[0-9]+q")
"""Words that `_copy` makes. All are found at once: a look for each would be quadratic in the number of messages."""


def _copy(index: int, message: Message, needs: TemplateNeeds, words: dict[str, LeftOut]) -> Message:
    """The message with made-up words for its texts; each goes into `words`. Reasoning that the template is known to
    show is left alone: it is the template's to drop that of earlier turns."""

    def word(field: str, *, is_whole: bool) -> str:
        made = f"w{len(words)}q"
        words[made] = LeftOut(index, field, is_whole)
        return made

    copy = dict(message)
    content, calls = message.get("content"), _list_of(message.get("tool_calls"))
    if isinstance(content, str) and content.strip():
        copy["content"] = word("content", is_whole=not calls)
    elif isinstance(content, list) and content:
        copy["content"] = [{"type": "text", "text": word("content", is_whole=not calls)}]
    if calls:
        copy["tool_calls"] = [
            {**call, "function": {**_function(call), "name": word(f"tool_calls[{k}]", is_whole=True)}}
            for k, call in enumerate(calls)
        ]
    if needs.reasoning is None and any(message.get(name) for name in REASONING_NAMES):
        made = word("reasoning", is_whole=False)
        copy |= {name: made for name in REASONING_NAMES if name in message}
    return copy


def _function(call: Mapping[str, object]) -> Mapping[str, object]:
    function = call["function"]
    assert isinstance(function, Mapping), "checked where it was read"
    return function
