"""What templates want of a message: small ones made here, each after a kind of need that published ones have."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.server.call_ids import tied
from deltaserve.server.text.conversation import left_out, shaped
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.template_needs import ArgumentForm, TemplateError, TemplateNeeds

Messages = Sequence[Mapping[str, object]]

TURN = "{{ '[' + m.role + ']' }}"
CALLS_AS_JSON = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments | tojson }};{% endfor %}"
)
CALLS_AS_TEXT = "{% for c in m.tool_calls or [] %}{{ c.function.name + ':' + c.function.arguments }};{% endfor %}"
CALLS_BARE = "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments }};{% endfor %}"
CALLS_BY_KEY = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %};{% endfor %}"
)
PARTS = (
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content or [] %}{{ p.text }}|{% endfor %}{% endif %}"
)


def each(body: str, before: str = "") -> str:
    """A template that says `body` of every message."""
    return f"{before}{{% for m in messages %}}{TURN}{body}{{% endfor %}}[assistant]"


TEMPLATES = {
    "arguments as JSON": each("{{ m.content or '' }}" + CALLS_AS_JSON),
    "arguments by key": each("{{ m.content or '' }}" + CALLS_BY_KEY),
    "arguments appended": each("{{ m.content or '' }}" + CALLS_AS_TEXT),
    "arguments printed": each("{{ m.content or '' }}" + CALLS_BARE),
    "content appended": each("{{ '' + m.content }}" + CALLS_AS_JSON),
    "content printed": each("{{ m.content }}" + CALLS_AS_JSON),
    "calls where content is none": each(
        "{% if m.tool_calls and m.content is none %}" + CALLS_AS_JSON + "{% else %}{{ m.content }}{% endif %}"
    ),
    "parts": each(PARTS + CALLS_AS_JSON),
    "parts of users": each(
        "{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content or '' }}{% endif %}" + CALLS_AS_JSON
    ),
    "nothing but parts": each("{% for p in m.content or [] %}{{ p['text'] }}|{% endfor %}" + CALLS_AS_JSON),
    "reasoning_content": each("<{{ m.reasoning_content }}>{{ m.content or '' }}" + CALLS_AS_JSON),
    "thinking": each("<{{ m.thinking }}>{{ m.content or '' }}" + CALLS_AS_JSON),
    "reasoning": each("<{{ m.reasoning }}>{{ m.content or '' }}" + CALLS_AS_JSON),
    "reasoning of the last turn": each(
        "{% if loop.last or loop.nextitem.role == 'tool' %}<{{ m.reasoning_content }}>{% endif %}{{ m.content or '' }}"
        + CALLS_AS_JSON
    ),
    "names": each("{{ m.name or '' }}={{ m.content or '' }}" + CALLS_AS_JSON),
    "short ids": each(
        "{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('ids of 9 only') }}{% endif %}"
        "#{{ c.id }}{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{{ m.content or '' }}"
        + CALLS_AS_JSON
    ),
    "developer": each(
        "{% if m.role == 'developer' %}(from its developer){% endif %}{{ m.content or '' }}" + CALLS_AS_JSON
    ),
    "no calls": each("{{ m.content or '' }}"),
    "the system first or not at all": each(
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
        "{{ m.content or '' }}" + CALLS_AS_JSON
    ),
    "one word of the system": (
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
        + TURN
        + "{{ m.content or '' }}"
        + CALLS_AS_JSON
        + "{% endif %}{% endfor %}[assistant]"
    ),
    "the system in front": (
        "{% for m in messages if m.role == 'system' %}[system]{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}"
        + TURN
        + "{{ m.content or '' }}"
        + CALLS_AS_JSON
        + "{% endfor %}[assistant]"
    ),
    "one word of a developer": (
        "{% for m in messages %}{% if loop.first or m.role not in ('system', 'developer') %}"
        "[{{ 'instructions' if m.role in ('system', 'developer') else m.role }}]{{ m.content or '' }}"
        + CALLS_AS_JSON
        + "{% endif %}{% endfor %}[assistant]"
    ),
    "no late system but behind a result": each(
        "{% if m.role != 'system' or loop.first or loop.previtem.role != 'tool' %}{{ m.content or '' }}{% endif %}"
        + CALLS_AS_JSON
    ),
    "all in capitals": "{% filter upper %}"
    + each("<{{ m.thinking }}>{% for p in m.content or [] %}{{ p['text'] }}|{% endfor %}" + CALLS_AS_JSON)
    + "{% endfilter %}",
}
COMMON = TemplateNeeds()
NEEDS: Mapping[str, Mapping[str, object]] = {
    "arguments appended": {"arguments": ArgumentForm.TEXT},
    "arguments printed": {"arguments": ArgumentForm.TEXT},
    "content appended": {"takes_null": False},
    "content printed": {"takes_null": False},
    "calls where content is none": {"takes_empty": False, "takes_null": True},
    "parts": {"part_roles": {"system", "user", "assistant", "tool"}},
    "parts of users": {"part_roles": {"user"}},
    "nothing but parts": {"text_roles": set(), "part_roles": {"system", "user", "assistant", "tool"}},
    "reasoning_content": {"reasoning": "reasoning_content"},
    "thinking": {"reasoning": "thinking"},
    "reasoning": {"reasoning": "reasoning"},
    "reasoning of the last turn": {"reasoning": "reasoning_content"},
    "names": {"shows_name": True},
    "short ids": {"short_ids": True},
    "developer": {"knows_developer": True},
    "the system first or not at all": {"several_systems": False, "late_systems": False},
    "one word of the system": {"several_systems": False, "late_systems": False},
    "the system in front": {"late_systems": False},
    "one word of a developer": {"knows_developer": True, "several_systems": False, "late_systems": False},
    "no late system but behind a result": {"late_systems": False},
    "all in capitals": {
        "text_roles": set(),
        "part_roles": {"system", "user", "assistant", "tool"},
        "reasoning": "thinking",
    },
}
FIELDS = list(TemplateNeeds.__slots__)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_need_is_found_by_what_comes_out(name: str) -> None:
    needs = ChatTemplate(TEMPLATES[name], (), {}).needs
    found = {field: getattr(needs, field) for field in FIELDS if getattr(needs, field) != getattr(COMMON, field)}
    wanted = {field: value for field, value in NEEDS.get(name, {}).items() if value != getattr(COMMON, field)}
    assert found == wanted


ASKED = {"role": "user", "content": "Weather?"}


def call(
    arguments: object = '{"city": "Rome"}', call_id: str = "call_0123456789", name: str = "look"
) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def told(content: object = "20C", call_id: str = "call_0123456789") -> dict[str, object]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


CONVERSATIONS: Mapping[str, Messages] = {
    "content null": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call()]}, told()],
    "content absent": [ASKED, {"role": "assistant", "tool_calls": [call()]}, told()],
    "content empty": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call()]}, told()],
    "arguments an object": [ASKED, {"role": "assistant", "tool_calls": [call({"city": "Rome"})]}, told()],
    "arguments empty": [ASKED, {"role": "assistant", "tool_calls": [call("")]}, told()],
    "result in parts": [
        ASKED,
        {"role": "assistant", "tool_calls": [call()]},
        told([{"type": "text", "text": "20"}, {"type": "text", "text": "C"}]),
    ],
    "reasoning_content": [ASKED, {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call()]}, told()],
    "reasoning": [ASKED, {"role": "assistant", "reasoning": "hm", "tool_calls": [call()]}, told()],
    "thinking": [ASKED, {"role": "assistant", "thinking": "hm", "tool_calls": [call()]}, told()],
    "developer": [{"role": "developer", "content": "Be brief."}, ASKED],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "We"}, {"type": "text", "text": "ather?"}]}],
    "words of the system": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be polite."},
        ASKED,
        {"role": "system", "content": "Be true."},
    ],
}


def rendered(template: ChatTemplate, messages: Messages) -> str:
    return template.render(shaped(messages, template.needs), {}).text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_comes_out_whole(name: str, conversation: str) -> None:
    """Whichever way an agent writes it: its words are there, and nothing of Python's or JSON's spelling of a list."""
    template, messages = ChatTemplate(TEMPLATES[name], (), {}), CONVERSATIONS[conversation]
    text = rendered(template, messages).casefold()
    lost = {part.field for part in left_out(messages, template.needs, lambda shown: template.render(shown, {}).text)}
    has_calls, has_reasoning = "tool" in str(messages), "hm" in str(messages)
    if has_calls and name == "no calls":
        assert "tool_calls[0]" in lost
    elif has_calls:
        assert "look" in text and ("rome" in text) == (conversation != "arguments empty")
        assert text.replace("|", "").endswith("20c[assistant]")
    elif name == "names":
        assert "=we" in text
    assert ("hm" in text) == (has_reasoning and template.needs.reasoning is not None)
    assert ("reasoning" in lost) == (has_reasoning and template.needs.reasoning is None)
    assert not any(sign in text for sign in ("none", "'text'", '"text"', "{'", '\\"'))
    if conversation == "developer":
        start = {"developer": "[developer](from its developer)", "one word of a developer": "[instructions]"}
        assert text.startswith(start.get(name, "[system]"))
    if conversation == "words of the system":
        places = [text.find(word) for word in ("brief", "polite", "weather", "true")]
        assert -1 not in places and places == sorted(places) and not lost


def test_ids_that_the_template_takes_are_made_of_those_it_does_not() -> None:
    template = ChatTemplate(TEMPLATES["short ids"], (), {})
    messages: list[Mapping[str, object]] = [
        ASKED,
        {
            "role": "assistant",
            "tool_calls": [call(call_id="call_a"), call(call_id="call_b"), call(call_id="a1B2c3D4e")],
        },
        *(told(call_id=call_id) for call_id in ("call_a", "call_b", "a1B2c3D4e")),
    ]
    shown = shaped(messages, template.needs)
    called = [each["id"] for each in shown[1]["tool_calls"]]  # type: ignore[attr-defined]
    assert called == [message["tool_call_id"] for message in shown[2:]]
    assert len(set(called)) == 3 and called[2] == "a1B2c3D4e" and all(len(call_id) == 9 for call_id in called)


SYSTEM = {"role": "system", "content": "Be brief."}
SUNNY = {"role": "assistant", "content": "Sunny"}
FOLDED: Mapping[str, tuple[Messages, str]] = {
    "behind the user's": ([ASKED, SYSTEM, SUNNY, ASKED], "[user]Weather?\n\nBe brief.[assistant]Sunny[user]Weather?"),
    "behind the user's parts": (
        [{"role": "user", "content": [{"type": "text", "text": "Hm?"}]}, SYSTEM],
        "[user]Hm?\n\nBe brief.",
    ),
    "parts behind the user's": (
        [ASKED, {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "so."}]}],
        "[user]Weather?\n\nBe so.",
    ),
    "behind a result": (
        [ASKED, {"role": "assistant", "tool_calls": [call()]}, told(), SYSTEM],
        '[user]Weather?[assistant]look:{"city": "Rome"};[tool]20C\n\nBe brief.',
    ),
    "behind an empty result": (
        [ASKED, {"role": "assistant", "tool_calls": [call()]}, told(""), SYSTEM],
        '[user]Weather?[assistant]look:{"city": "Rome"};[tool]Be brief.',
    ),
    "before the next user's": (
        [ASKED, SUNNY, SYSTEM, ASKED],
        "[user]Weather?[assistant]Sunny[user]Be brief.\n\nWeather?",
    ),
    "behind the assistant's alone": ([ASKED, SUNNY, SYSTEM], "[user]Weather?[assistant]Sunny[user]Be brief."),
    "between two of the assistant's": (
        [ASKED, SUNNY, SYSTEM, SUNNY],
        "[user]Weather?[assistant]Sunny[user]Be brief.[assistant]Sunny",
    ),
    "two": (
        [SYSTEM, ASKED, SYSTEM, {"role": "developer", "content": "Be true."}],
        "[system]Be brief.[user]Weather?\n\nBe brief.\n\nBe true.",
    ),
    "one without a text": ([ASKED, {"role": "system", "content": ""}], "[user]Weather?"),
    "two in front": (
        [SYSTEM, {"role": "developer", "content": "Be true."}, ASKED],
        "[system]Be brief.\n\nBe true.[user]Weather?",
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_words_of_the_system_are_taken_in_where_the_template_shows_only_the_first(name: str) -> None:
    messages, wanted = FOLDED[name]
    template = ChatTemplate(TEMPLATES["the system first or not at all"], (), {})
    assert rendered(template, messages) == f"{wanted}[assistant]"


def grown(draw: random.Random) -> Iterator[list[Mapping[str, object]]]:
    """A conversation with words of the system anywhere, each time that the model is to answer."""
    messages: list[Mapping[str, object]] = []
    texts = iter(f"said{number}." for number in range(1000))

    def say(role: str) -> None:
        said: object = next(texts)
        messages.append({"role": role, "content": [{"type": "text", "text": said}] if draw.random() < 0.3 else said})

    def systems() -> None:
        for _ in range(draw.choice((0, 0, 1, 2))):
            say(draw.choice(("system", "developer")))

    systems()
    for turn in range(6):
        say("user")
        systems()
        yield list(messages)
        if draw.random() < 0.5:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call(call_id=f"call_{turn}")]})
            systems()
            messages.append(told(next(texts), f"call_{turn}"))
            systems()
            yield list(messages)
        say("assistant")
        systems()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"no calls", "short ids", "reasoning of the last turn"}))
def test_a_prompt_is_the_beginning_of_the_next_turns(name: str, seed: int) -> None:
    """What the system says later never changes what stands before: that is found again in a cache."""
    template = ChatTemplate(TEMPLATES[name], (), {})
    prompts = []
    for messages in grown(random.Random(seed)):
        text = rendered(template, tied(messages).messages)
        lost = left_out(messages, template.needs, lambda shown: template.render(shown, {}).text)
        assert not [part for part in lost if part.is_whole]
        prompts.append(re.sub(r"\[assistant\]$", "", text, flags=re.IGNORECASE))
    for before, after in pairwise(prompts):
        assert after.startswith(before)


LOSSES: Mapping[str, tuple[str, Messages, Sequence[tuple[int, str, bool]]]] = {
    "a later word of the system": (
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
        [ASKED, {"role": "assistant", "content": "Sunny"}, {"role": "system", "content": "Sunny"}, ASKED],
        [],
    ),
    "what the system says": (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
        [*[{"role": "system", "content": "Sunny"}] * 2, ASKED, {"role": "system", "content": "Sunny"}, ASKED],
        [(0, "content", True), (1, "content", True)],
    ),
    "the second call": (
        each("{{ m.content or '' }}{% for c in (m.tool_calls or [])[:1] %}{{ c | tojson }}{% endfor %}"),
        [ASKED, {"role": "assistant", "tool_calls": [call(), call(call_id="call_b")]}, told(), told(call_id="call_b")],
        [(1, "tool_calls[1]", True)],
    ),
    "a tool's answer": (
        "{% for m in messages if m.role != 'tool' %}{{ m.content or '' }}" + CALLS_AS_JSON + "{% endfor %}",
        [ASKED, {"role": "assistant", "tool_calls": [call()]}, told()],
        [(2, "content", True)],
    ),
    "what is said beside a call": (
        each("{% if m.tool_calls %}" + CALLS_AS_JSON + "{% else %}{{ m.content }}{% endif %}"),
        [ASKED, {"role": "assistant", "content": "Let me look.", "tool_calls": [call()]}, told()],
        [(1, "content", False)],
    ),
    "the call beside what is said": (
        each("{% if m.content %}{{ m.content }}{% else %}" + CALLS_AS_JSON + "{% endif %}"),
        [ASKED, {"role": "assistant", "content": "Let me look.", "tool_calls": [call()]}, told()],
        [(1, "tool_calls[0]", True)],
    ),
    "what an assistant has begun": (
        "{% for m in messages %}{% if not loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        [ASKED, {"role": "assistant", "content": "Sunny"}],
        [(1, "content", True)],
    ),
    "an only turn of an assistant": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        [{"role": "assistant", "content": "Sunny"}],
        [(0, "content", True)],
    ),
    **{
        f"nothing by |{change}": (
            each(f"{{{{ m.content | {change} }}}}"),
            [ASKED, {"role": "assistant", "content": "Sunny", "reasoning_content": "hm"}, ASKED],
            [(1, "reasoning", False)],
        )
        for change in ("upper", "title", "capitalize", "lower", "trim")
    },
    "nothing of calls by |upper": (
        each("{{ (m.content or '') | upper }}" + CALLS_AS_JSON.replace(".name", ".name | upper")),
        [ASKED, {"role": "assistant", "content": "Look", "tool_calls": [call()]}, told()],
        [],
    ),
    "a name": (each("{{ m.content }}"), [{**ASKED, "name": "ann"}], [(0, "name", False)]),
    "nothing": (
        each("{{ m.content or '' }}" + CALLS_AS_JSON),
        [
            {"role": "system", "content": " "},
            ASKED,
            {"role": "assistant", "tool_calls": [call()]},
            told(""),
            ASKED,
            ASKED,
        ],
        [],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_template_leaves_out_is_found(name: str) -> None:
    source, messages, wanted = LOSSES[name]
    template = ChatTemplate(source, (), {})
    lost = left_out(messages, template.needs, lambda shown: template.render(shown, {}).text)
    assert [(part.index, part.field, part.is_whole) for part in lost] == wanted


REASONS = {
    "{% if messages|length > 1 %}{{ raise_exception('Roles must\nalternate: user/assistant') }}{% endif %}x": (
        "refuses these messages: Roles must alternate: user/assistant"
    ),
    "{% if messages|length > 1 %}{{ 'a' + messages[1].content }}{% endif %}x": 'concatenate str (not "int") to str',
    "{% if messages|length > 1 %}{{ messages[0].nothing.more }}{% endif %}x": "has no attribute 'nothing'",
    "{% if messages|length > 1 %}{{ raise_exception('no <|end|> please: ' + messages[0].content) }}{% endif %}x": (
        "no <|end|> please: say <|end|>"
    ),
    "{% if messages|length > 1 %}{{ raise_exception('word ' * 2000) }}{% endif %}x": "word word word",
}


@pytest.mark.parametrize("source", REASONS)
def test_the_reason_of_a_refusal_is_told_in_one_line(source: str) -> None:
    template = ChatTemplate(source, ["<|end|>"], {})
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "user", "content": "say <|end|>"}, {"role": "user", "content": 7}], {})
    assert REASONS[source] in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_template_that_takes_no_plain_message_in_any_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="for tools only"):
        ChatTemplate("{% if not tools %}{{ raise_exception('for tools only') }}{% endif %}", (), {})


def test_what_is_left_out_of_a_long_chat_costs_no_square_of_time() -> None:
    """All made-up words are found by one pass over the text: a look for each took 46 s of 40,000 messages."""
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", (), {})
    messages = [{"role": "user", "content": "so"}] * 40_000
    assert not left_out(messages, template.needs, lambda shown: template.render(shown, {}).text)
