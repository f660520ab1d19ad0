"""Every template of two packages x conversations as agents send them, against transformers.

What we render must be what transformers renders of the same messages, or of the same messages spelled otherwise where
transformers itself would fail on them, lose a part or show how Python spells it. What we refuse, transformers refuses
too, or leaves a part of it out in silence.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, dropwhile, pairwise
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.conversation import left_out, shaped
from deltaserve.server.text.template import ChatTemplate, split_quoted
from deltaserve.server.text.template_needs import TemplateError
from tests.fixtures.source_archives import VERSIONS, published_files

pytestmark = pytest.mark.slow
Messages = Sequence[Mapping[str, Any]]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
NOT_FOR_PLAIN_CHATS = frozenset(
    {
        "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
        "fireworks-ai-llama-3-firefunction-v2.jinja",
    }
)
"""They fail without tools, in transformers as well. In their folders they stand beside a `default`, which is taken."""

ASKED = {"role": "user", "content": "What is the weather in Rome?"}
ON = {"role": "user", "content": "Tomorrow then?"}
SUNNY = {"role": "assistant", "content": "Sunny there."}
SYSTEMS = [{"role": "system", "content": "Briefly please."}, {"role": "developer", "content": "Politely also."}]


def call(number: int = 1, city: str = "Rome") -> dict[str, Any]:
    arguments = json.dumps({"city": city, "spell": 2})
    return {"id": f"call_{number}abcdefgh", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def told(number: int = 1, content: object = "degrees20") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}abcdefgh", "content": content}


def calling(*calls: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"role": "assistant", **fields, "tool_calls": list(calls or [call()])}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONVERSATIONS: Mapping[str, Messages] = {
    "user": [ASKED],
    "system": [{"role": "system", "content": "Briefly please."}, ASKED],
    "turns": [ASKED, SUNNY, ON],
    "call, content null": [ASKED, calling(content=None), told()],
    "call, content empty": [ASKED, calling(content=""), told()],
    "call, content": [ASKED, calling(content="Looking now."), told()],
    "two calls": [ASKED, calling(call(), call(2, "Oslo"), content=""), told(), told(2, "degrees3")],
    "call, then on": [ASKED, calling(content=None), told(), SUNNY, ON],
    "a result in parts": [ASKED, calling(content=""), told(content=parts("degrees20", "drywind"))],
    "reasoning_content beside a call": [ASKED, calling(content="", reasoning_content="I must look."), told()],
    "reasoning of a turn before": [ASKED, {**SUNNY, "reasoning": "I know."}, ON],
    "reasoning in the content": [ASKED, {**SUNNY, "content": "<think>\nhm\n</think>\n\nSunny there."}, ON],
    "developer": [{"role": "developer", "content": "Briefly please."}, ASKED],
    "parts": [{"role": "user", "content": parts("Firstly this.", "Secondly that.")}],
    "the system in parts": [{"role": "system", "content": parts("Briefly please.", "Politely also.")}, ASKED],
    "the assistant last": [ASKED, SUNNY],
    "two turns of the user": [ASKED, ON],
    "two words of the system": [*SYSTEMS, ASKED],
    "a later word of the system": [ASKED, SUNNY, SYSTEMS[0], ON],
    "a word of the system behind the user's": [SYSTEMS[1], ASKED, SYSTEMS[0]],
    "words of the system behind a result": [ASKED, calling(content=""), told(), *SYSTEMS],
    "control tokens": [{"role": "user", "content": "Spell <s> and </s> and <|im_end|> and <|end|> and <|"}],
}


def _each(messages: Messages, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    return [change(dict(message)) for message in messages]


def _with_arguments(change: Callable[[Any], Any]) -> Callable[[Messages], list[dict[str, Any]]]:
    def respelled(message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" in message:
            calls = message["tool_calls"]
            functions = [each["function"] for each in calls]
            changed = [{**function, "arguments": change(function["arguments"])} for function in functions]
            message["tool_calls"] = [{**each, "function": f} for each, f in zip(calls, changed, strict=True)]
        return message

    return lambda messages: _each(messages, respelled)


def _with_content(change: Callable[[Mapping[str, Any]], object]) -> Callable[[Messages], list[dict[str, Any]]]:
    return lambda messages: _each(messages, lambda message: {**message, "content": change(message)})


def _short_ids(messages: Messages) -> list[dict[str, Any]]:
    """Those that we make."""
    from_ours = shaped(messages, _NEEDS_SHORT)
    ids = ("tool_call_id", "tool_calls")
    both = zip(messages, from_ours, strict=True)
    respelled = [{**sent, **{name: ours[name] for name in ids if name in ours}} for sent, ours in both]
    return _objects(respelled)


_NEEDS_SHORT = ChatTemplate(
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id|length != 9 %}{{ raise_exception('9') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}{{ m.content }}{% endfor %}",
    (),
    {},
).needs
_objects = _with_arguments(lambda arguments: json.loads(arguments) if isinstance(arguments, str) else arguments)
_texts = _with_arguments(lambda arguments: json.dumps(arguments) if isinstance(arguments, dict) else arguments)


def _system_joined(messages: Messages) -> list[dict[str, Any]]:
    """Those in front in one."""
    rest = list(dropwhile(_is_system, messages))
    front = [dict(each) for each in messages[: len(messages) - len(rest)]]
    if len(front) > 1:
        front = [{**front[0], "content": "\n\n".join(each["content"] for each in front)}]
    return [*front, *map(dict, rest)]


def _system_taken_in(messages: Messages) -> list[dict[str, Any]]:
    """Later ones by the turn before, the assistant's by that behind it."""
    later = list(dropwhile(_is_system, messages))
    taken = [dict(each) for each in messages[: len(messages) - len(later)]]
    before = ""
    for message in map(dict, later):
        if _is_system(message) and taken[-1]["role"] == "assistant":
            before += message["content"] + "\n\n"
        elif _is_system(message):
            taken[-1]["content"] += "\n\n" + message["content"]
        else:
            taken.append({**message, "content": before + message["content"]} if before else message)
            before = ""
    return taken


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


SPELLINGS: Mapping[str, tuple[str, Callable[[Messages], list[dict[str, Any]]]]] = {
    "the system joined": ("the template shows only the first, or refuses two", _system_joined),
    "the system taken in": (
        "the template refuses a later word of the system, leaves it out, or shows it before what was said before it: "
        "a conversation that goes on would change the beginning of its prompt",
        _system_taken_in,
    ),
    "arguments as text": ("the template appends them to text: transformers fails on an object", _texts),
    "null as empty": (
        "the template fails on null beside calls, or prints None",
        _with_content(lambda m: "" if m["content"] is None else m["content"]),
    ),
    "empty as null": (
        "the template shows calls of a turn without content only where it is null",
        _with_content(lambda m: None if m["content"] == "" and "tool_calls" in m else m["content"]),
    ),
    "parts joined": (
        "the template would show Python's spelling of a list in this role, or fail on it",
        _with_content(
            lambda m: "".join(part["text"] for part in m["content"]) if isinstance(m["content"], list) else m["content"]
        ),
    ),
    "text as parts": (
        "the template reads parts only, and shows nothing of a text",
        _with_content(lambda m: parts(m["content"]) if isinstance(m["content"], str) else m["content"]),
    ),
    "ids of nine characters": ("the template takes no others, and the ids of an agent are what they are", _short_ids),
    "reasoning under its other name": (
        "the template reads `reasoning`, which transformers does not fill from the other names",
        lambda messages: _each(
            messages, lambda m: {**m, "reasoning": m.get("reasoning_content") or m.get("reasoning")}
        ),
    ),
    "developer as system": (
        "OpenAI's newer name: templates that know no developer print its name, which their models have never seen",
        lambda messages: _each(messages, lambda m: {**m, "role": "system"} if m["role"] == "developer" else m),
    ),
}
"""Intended difference |-> (reason, how transformers is told the same)."""


def theirs(source: str, messages: Messages) -> str | None:
    """None where transformers fails."""
    try:
        [text], _ = render_jinja_template(
            [_each(messages, dict)], chat_template=source, add_generation_prompt=True, **NAMES
        )
    except Exception:  # a template raises any type
        return None
    return str(text)


def ours(template: ChatTemplate, messages: Messages) -> tuple[str | None, list[str]]:
    """(None where the template refuses or would leave out a turn, fields that it leaves out)."""
    try:
        rendered = template.render(shaped(messages, template.needs), {})
    except TemplateError:
        return None, []
    lost = left_out(messages, template.needs, lambda shown: template.render(shown, {}).text)
    text = "".join(piece for piece, _ in split_quoted(rendered, re.compile(r"(?!)")))
    return (None if any(part.is_whole for part in lost) else text), [part.field for part in lost]


def words(messages: Messages) -> Iterator[str]:
    """What must be seen of a conversation, reasoning aside."""
    for message in messages:
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for each in message.get("tool_calls", ()):
            texts += [each["function"]["name"], *map(str, json.loads(each["function"]["arguments"]))]
        for text in texts:
            yield from re.findall(r"\w{5,}", text.split("</think>")[-1])


_SIGNS = ("'text':", '"text":', 'text\\"', "'city':", 'city\\"')
"""How Python and JSON in JSON spell what a template did not expect."""


def is_whole(text: str | None, plain: str, messages: Messages) -> bool:
    """Whether a rendering shows all of a conversation as it should."""
    if text is None or text.count("None") > plain.count("None"):
        return False
    if not all(word in text for word in words(messages)) or any(sign in text for sign in _SIGNS):
        return False
    later = list(dropwhile(_is_system, messages))
    pairs = [pair for pair in pairwise(later) if any(map(_is_system, pair))]
    return all(_last_place(text, one) < _last_place(text, other) for one, other in pairs)


def _last_place(text: str, message: Mapping[str, Any]) -> int:
    """Where the words of a message stand, the last time."""
    return max((text.rfind(word) for word in words([message])), default=-1)


def difference(template: ChatTemplate, source: str, messages: Messages) -> str | None:
    """What is wrong with our rendering; None: nothing, or it is intended."""
    text, lost = ours(template, messages)
    as_sent = theirs(source, _objects(messages))
    plain = theirs(source, [ASKED]) or ""
    if text is None:
        spelled = as_sent if as_sent is not None else theirs(source, _texts(messages))
        return "we refuse what they show whole" if is_whole(spelled, plain, messages) and not lost else None
    if text == as_sent:
        return None
    for number in (1, 2, 3):
        for names in combinations(SPELLINGS, number):
            respelled: Messages = _objects(messages)
            for name in names:
                respelled = SPELLINGS[name][1](respelled)
            if theirs(source, respelled) == text:
                is_free = {"developer as system", "reasoning under its other name"} & {*names}
                if is_free or not is_whole(as_sent, plain, messages):
                    return None
                return f"{' and '.join(names)} without need"
    return "another text"


@pytest.mark.parametrize("package", VERSIONS)
def test_conversations_are_rendered_as_transformers_renders_them(package: str, pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    archives = pytestconfig.cache.mkdir("source_archives")
    templates = {name: content.decode() for name, content in published_files(package, archives, ".jinja")}
    wrong, num_rendered = [], 0
    for file, source in sorted(templates.items()):
        control = {*re.findall(r"<[|\uff5c][^<>\s]{1,40}>", source), *NAMES.values()}
        try:
            template = ChatTemplate(source, control, NAMES)
        except ConfigError as error:
            if file not in NOT_FOR_PLAIN_CHATS:
                wrong.append(f"{file}: {error}")
            continue
        for name, messages in CONVERSATIONS.items():
            found = difference(template, source, messages)
            num_rendered += 1
            if found:
                wrong.append(f"{file}, {name}: {found}")
    assert not wrong, "\n".join(wrong)
    assert num_rendered >= 60 * len(CONVERSATIONS)
