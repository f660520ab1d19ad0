"""What a chat template wants of a message, found by rendering probes: templates differ, and their names tell nothing.

A probe is a short conversation of made-up words. What comes out shows which form of a field the template reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from deltaserve.core.errors import DeltaserveError

Message = Mapping[str, object]


class Render(Protocol):
    """Renders a chat. Raises TemplateError where the template refuses it."""

    def __call__(self, chat: Sequence[Message], **options: object) -> str: ...


REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read an earlier turn's reasoning, the most common first."""


SYSTEM_ROLES = ("system", "developer")
"""Roles of what neither the user nor the model says; the second is OpenAI's newer name of the first."""


class TemplateError(DeltaserveError):
    """The template refuses these messages, or fails on them. The message is fit for the client."""


class ArgumentForm(Enum):
    """How the arguments of an earlier call are handed to the template."""

    OBJECT = "object"
    TEXT = "text"
    """JSON in a string: the template appends it to other text."""


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """What one template needs; decided once."""

    arguments: ArgumentForm = ArgumentForm.OBJECT
    takes_null: bool = True
    """Beside tool calls, content may be None. Otherwise "" stands for it."""
    takes_empty: bool = True
    """Beside tool calls, content may be "". Otherwise None stands for it."""
    text_roles: frozenset[str] = frozenset(("system", "user", "assistant", "tool"))
    """Roles whose content may be a string. That of the others must be a list of parts."""
    part_roles: frozenset[str] = frozenset()
    """Roles whose content may be a list of parts. That of the others is joined."""
    reasoning: str | None = None
    """The name under which it shows reasoning; None: it never does."""
    shows_name: bool = False
    """Whether it shows the `name` of a message."""
    short_ids: bool = False
    """Whether it takes only ids of calls that have nine letters or digits."""
    knows_developer: bool = False
    """Whether it treats the role `developer` otherwise than a role that it has never heard of."""
    shows_tools: bool = False
    """Whether it tells the model of the tools of a request."""
    several_systems: bool = True
    """Whether it shows two system messages that stand in front. Otherwise they are joined to one."""
    late_systems: bool = True
    """Whether it shows a later system message where it stands. Otherwise the turn before it takes its text."""


_WORD, _SECOND, _KEY, _VALUE, _CALLED = "qavuzo", "remiko", "tosabe", "lupimo", "gerafu"
_LONG_ID, _SHORT_ID = "call_0a1B2c3D4e5F6g7H", "a1B2c3D4e"
_ASKED: Message = {"role": "user", "content": "hello"}
_ANSWERED: Message = {"role": "assistant", "content": "fine"}
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": _VALUE}}}
_TOOL = {"type": "function", "function": {"name": _CALLED, "description": _WORD, "parameters": _PARAMETERS}}


def find_needs(render: Render) -> TemplateNeeds:
    """Raises TemplateError for a template that refuses one plain message of a user."""
    probe = _Probe(render)
    forms = {role: _find_forms(probe, role, before) for role, before in _BEFORE.items()}
    if forms["user"] == (False, False):
        render([_ASKED])  # raises with the template's own reason, if it has one
    calls = _find_calls(_Probe(render, _part_only(forms)))
    forms["tool"] = _find_forms(_Probe(render, _part_only(forms) - {"tool"}), "tool", calls.history()[:-1])
    probe = _Probe(render, _part_only(forms))
    knows_developer = _knows_developer(probe)
    system_roles = SYSTEM_ROLES if knows_developer else SYSTEM_ROLES[:1]
    return TemplateNeeds(
        arguments=calls.arguments,
        takes_null=calls.takes_null,
        takes_empty=calls.takes_empty,
        text_roles=frozenset(forms) - _part_only(forms),
        part_roles=frozenset(role for role, (_, takes_parts) in forms.items() if takes_parts) | _part_only(forms),
        reasoning=_find_reasoning(probe, calls),
        shows_name=probe.shows([{**_ASKED, "name": _WORD}], _WORD),
        short_ids=calls.short_ids,
        knows_developer=knows_developer,
        shows_tools=probe.shows([_ASKED], _CALLED, _KEY, tools=[_TOOL]),
        several_systems=all(_shows_several(probe, role) for role in system_roles),
        late_systems=all(_shows_late(probe, calls, role) for role in system_roles),
    )


def _find_forms(probe: "_Probe", role: str, before: Sequence[Message]) -> tuple[bool, bool]:
    """(shows a text, shows text parts) as content of this role."""
    answers = {"tool_call_id": before[-1]["tool_calls"][0]["id"]} if role == "tool" else {}  # type: ignore[index]
    parts = [{"type": "text", "text": _WORD}, {"type": "text", "text": _SECOND}]
    takes_text = probe.shows([*before, {"role": role, "content": _WORD, **answers}], _WORD)
    return takes_text, probe.shows_parts([*before, {"role": role, "content": parts, **answers}])


def _part_only(forms: Mapping[str, tuple[bool, bool]]) -> frozenset[str]:
    """Roles whose content must be parts: a role that shows neither form is given the one of the user's turns."""
    as_user = {(False, True), (False, False)} if forms["user"] == (False, True) else {(False, True)}
    return frozenset(role for role, form in forms.items() if form in as_user)


def _called(arguments: object, call_id: str, content: object, **more: object) -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": _CALLED, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


_BEFORE: Mapping[str, Sequence[Message]] = {
    "system": (),
    "user": (),
    "assistant": (_ASKED,),
    "tool": (_ASKED, _called({_KEY: _VALUE}, _SHORT_ID, "")),
}
"""Role |-> what stands before its message in a probe. A tool's is found out first."""


_LIST_SIGNS = ("'text':", '"text":', 'text\\"')
"""How Python and JSON spell a part of a list."""


def _in_order(text: str, *words: str) -> bool:
    """Whether the text has these words, and the first of each in this order, in whichever case."""
    places = [text.casefold().find(word) for word in words]
    return -1 not in places and places == sorted(places)


def _has(text: str, *words: str) -> bool:
    """Whether the text has these words, in whichever case: a template may write a text in capitals."""
    text = text.casefold()
    return all(word in text for word in words)


class _Probe:
    """Renders, and looks for words in what comes out."""

    def __init__(self, render: Render, needs_parts: frozenset[str] = frozenset()) -> None:
        """`needs_parts`: roles whose texts are wrapped."""
        self._render = render
        self._needs_parts = needs_parts

    def text(self, messages: Sequence[Message], **options: object) -> str | None:
        """The rendered text; None where the template refuses."""
        try:
            return self._render([self._wrapped(message) for message in messages], **options)
        except TemplateError:
            return None

    def shows(self, messages: Sequence[Message], *words: str, **options: object) -> bool:
        text = self.text(messages, **options)
        return text is not None and _has(text, *words)

    def shows_in_order(self, messages: Sequence[Message], *words: str) -> bool:
        text = self.text(messages)
        return text is not None and _in_order(text, *words)

    def shows_parts(self, messages: Sequence[Message]) -> bool:
        """Whether two parts are shown as their texts, not as Python or JSON would spell a list."""
        text = self.text(messages)
        if text is None:
            return False
        return _has(text, _WORD, _SECOND) and not any(_has(text, sign) for sign in _LIST_SIGNS)

    def _wrapped(self, message: Message) -> Message:
        if message["role"] in self._needs_parts and isinstance(message["content"], str):
            return {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message


@dataclass(frozen=True, slots=True)
class _Calls:
    arguments: ArgumentForm
    short_ids: bool
    takes_null: bool
    takes_empty: bool

    def history(self, **more: object) -> list[Message]:
        """A call and its answer, in the form that was found."""
        call_id = _SHORT_ID if self.short_ids else _LONG_ID
        return [*_called_and_told(self.arguments, call_id, None if self.takes_null else "", **more)]


def _called_and_told(form: ArgumentForm, call_id: str, content: object, **more: object) -> Iterable[Message]:
    arguments: object = {_KEY: _VALUE} if form is ArgumentForm.OBJECT else f'{{"{_KEY}": "{_VALUE}"}}'
    return (
        _ASKED,
        _called(arguments, call_id, content, **more),
        {"role": "tool", "name": _CALLED, "content": _SECOND, "tool_call_id": call_id},
    )


def _find_calls(probe: _Probe) -> _Calls:
    """The first form that shows the call whole; where none does, one that the template does not fail on."""
    plain = probe.text([_ASKED]) or ""
    for call_id in (_LONG_ID, _SHORT_ID):
        for form in ArgumentForm:
            shown = [_shows_call(probe, form, call_id, content, plain) for content in (None, "", _WORD)]
            if any(shown):
                return _Calls(form, call_id == _SHORT_ID, shown[0], shown[1] or not shown[0])
    takes_null = probe.text([*_called_and_told(ArgumentForm.OBJECT, _LONG_ID, None)]) is not None
    return _Calls(ArgumentForm.OBJECT, short_ids=False, takes_null=takes_null, takes_empty=True)


def _shows_call(probe: _Probe, form: ArgumentForm, call_id: str, content: object, plain: str) -> bool:
    text = probe.text([*_called_and_told(form, call_id, content)])
    if text is None or not _has(text, _CALLED, _KEY, _VALUE):
        return False
    as_python = _has(text, f"'{_KEY}':")
    as_json_of_json = _has(text, f'\\"{_KEY}')
    shows_null = content is None and text.count("None") > plain.count("None")
    return not (as_python or as_json_of_json or shows_null)


def _find_reasoning(probe: _Probe, calls: _Calls) -> str | None:
    for name in REASONING_NAMES:
        answered: Message = {**_ANSWERED, name: _WORD}
        conversations = (calls.history(**{name: _WORD}), [_ASKED, answered, _ASKED], [_ASKED, answered])
        if any(probe.shows(conversation, _WORD) for conversation in conversations):
            return name
    return None


def _knows_developer(probe: _Probe) -> bool:
    """A template that prints any role's name prints this one as well, and its model has never seen it."""
    texts = [probe.text([{"role": role, "content": _WORD}, _ASKED]) for role in ("developer", _SECOND)]
    known, unheard = texts
    if known is None or not _has(known, _WORD):
        return False
    return unheard is None or known.casefold() != unheard.casefold().replace(_SECOND, "developer")


def _shows_several(probe: _Probe, role: str) -> bool:
    first, second = {"role": "system", "content": _WORD}, {"role": role, "content": _SECOND}
    return probe.shows_in_order([first, second, _ASKED], _WORD, _SECOND)


def _shows_late(probe: _Probe, calls: _Calls, role: str) -> bool:
    """Whether it stands behind what was said before it, also behind a tool's result, and before what is said next.

    Some templates collect all of them in front. Then a conversation that goes on changes the beginning of its prompt,
    and nothing of it is found in a cache.
    """
    asked, late, on = ({"role": r, "content": c} for r, c in (("user", _WORD), (role, _SECOND), ("user", _VALUE)))
    places = (
        probe.shows_in_order([{"role": "system", "content": _KEY}, asked, late], _WORD, _SECOND),
        probe.shows_in_order([asked, late, _ANSWERED, on], _WORD, _SECOND, _VALUE),
        probe.shows_in_order([asked, _ANSWERED, late, on], _WORD, _SECOND, _VALUE),
    )
    if not all(places):
        return False
    history = calls.history()
    has_calls = probe.shows(history, _CALLED, _SECOND)
    return not has_calls or probe.shows_in_order([*history, {**late, "content": _WORD}], _CALLED, _SECOND, _WORD)
