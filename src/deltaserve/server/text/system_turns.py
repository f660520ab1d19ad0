"""System messages where a template shows no more than one: joined, or taken in by the turns beside them."""

from collections.abc import Sequence
from itertools import groupby, takewhile

from deltaserve.server.text.template_needs import SYSTEM_ROLES, Message, TemplateNeeds

_BETWEEN = "\n\n"


def is_system(message: Message) -> bool:
    """Whether neither the user nor the model says it."""
    return message["role"] in SYSTEM_ROLES


def with_systems_shown(messages: Sequence[Message], needs: TemplateNeeds) -> list[Message]:
    """The conversation with its system messages where the template shows them.

    What is added to the conversation changes nothing of what stands before it: a later system message never goes to
    the front, so that the pages of earlier prompts are found again.
    """
    num_leading = sum(1 for _ in takewhile(is_system, messages))
    leading, rest = list(messages[:num_leading]), list(messages[num_leading:])
    if len(leading) > 1 and not needs.several_systems:
        leading = [_with_behind(leading[0], _text(leading[1:]))]
    if not needs.late_systems:
        rest = _folded(rest)
    return leading + rest


def _folded(messages: Sequence[Message]) -> list[Message]:
    """System texts go behind that of the user's or tool's message before them, else before that of the user's message
    behind them, else they are a user's message."""
    folded: list[Message] = []
    waiting = ""  # what is to be said behind the assistant's message that is the last
    for are_system, group in groupby(messages, is_system):
        run = list(group)
        if not are_system:
            if waiting and run[0]["role"] == "user":
                run[0] = _with_before(run[0], waiting)
            elif waiting:
                folded.append({"role": "user", "content": waiting})
            waiting = ""
            folded += run
        elif folded[-1]["role"] == "assistant":
            waiting = _text(run)
        else:
            folded[-1] = _with_behind(folded[-1], _text(run))
    return [*folded, {"role": "user", "content": waiting}] if waiting else folded


def _text(messages: Sequence[Message]) -> str:
    """Their texts, joined at once: one after the other would take quadratic time."""
    return _BETWEEN.join(filter(None, map(_own_text, messages)))


def _own_text(message: Message) -> str:
    content = message.get("content")
    return "".join(str(part["text"]) for part in content) if isinstance(content, list) else str(content or "")


def _with_behind(message: Message, text: str) -> Message:
    """The message's own content keeps its form: templates may show parts otherwise than a text."""
    content = message.get("content")
    if not (content and text):
        return {**message, "content": content or text}
    if isinstance(content, list):
        return {**message, "content": [*content, _part(_BETWEEN + text)]}
    return {**message, "content": f"{content}{_BETWEEN}{text}"}


def _with_before(message: Message, text: str) -> Message:
    content = message.get("content")
    if not content:
        return {**message, "content": text}
    if isinstance(content, list):
        return {**message, "content": [_part(text + _BETWEEN), *content]}
    return {**message, "content": f"{text}{_BETWEEN}{content}"}


def _part(text: str) -> Message:
    return {"type": "text", "text": text}
