"""Conversations with tools whose every answer is known.

The system turn shows tools and some facts. A user asks about a topic: a tool that knows it is called with the
arguments that the question names, and its result is told; a fact is told; otherwise the answer is that it is unknown. A
user may also tell further facts. An answer begins with the topic, also one that calls, and what belongs to a topic
always stands right behind it: so each token of an answer is one lookup away from those before it, as in the recall
task.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.calling.words import ARGUMENTS, FUNCTIONS, NUMBERS, TOPICS, WORDS

Message = dict[str, Any]
UNKNOWN, NOTED = "unknown", "Noted."
_MOST_ARGUMENTS = 2
_MOST_RESULTS = 4
"""Words of a result."""
_NO_TOOLS = 0.05
"""Share of conversations without tools."""
_NUM_UNKNOWN = 3
"""Topics of which nothing is ever told."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of conversations, each drawn from 1, or what is named, up to these."""

    num_tools: int = 5
    """From 2 on; few conversations have none."""
    num_facts: int = 12
    """From 0 on; those of the system turn."""
    num_turns: int = 6
    """Questions of a user."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, and the topic that it knows."""

    name: str
    topic: str
    arguments: Mapping[str, str]
    """Name |-> type, "string" or "integer"."""

    def as_json(self) -> Message:
        """In OpenAI's form."""
        properties = {name: {"type": kind} for name, kind in self.arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.topic, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tools, and all messages in OpenAI's form, the right answers among them."""

    tools: Sequence[Tool]
    messages: Sequence[Message]

    def steps(self) -> Iterator[int]:
        """Index of each answer among the messages."""
        return (index for index, message in enumerate(self.messages) if message["role"] == "assistant")


def draw_conversation(rng: Random, shape: Shape) -> Conversation:
    """A conversation of at most that shape."""
    return _Drawing(rng, shape).conversation()


@dataclass(slots=True)
class _Drawing:
    """A conversation that is being drawn."""

    rng: Random
    shape: Shape
    tools: list[Tool] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """Topic |-> its value, as far as it was told."""
    unknown: list[str] = field(default_factory=list)
    """Topics of which nothing is told."""
    fresh: list[str] = field(default_factory=list)
    """Topics of which something may be told yet."""
    unused: list[tuple[str, str]] = field(default_factory=list)
    """Names and types of arguments that no tool has."""
    messages: list[Message] = field(default_factory=list)

    def conversation(self) -> Conversation:
        rng = self.rng
        topics = rng.sample(TOPICS, len(TOPICS))
        self.unknown, self.fresh = topics[:_NUM_UNKNOWN], topics[_NUM_UNKNOWN:]
        names = [(name, kind) for kind, names in ARGUMENTS.items() for name in names]
        self.unused = rng.sample(names, len(names))
        functions = rng.sample(FUNCTIONS, rng.randint(2, self.shape.num_tools) if rng.random() > _NO_TOOLS else 0)
        self.tools = [self._tool(name) for name in functions]
        told = self._new_facts(rng.randint(0, self.shape.num_facts))
        if told:
            self.messages.append({"role": "system", "content": f"Facts:{told}"})
        for _ in range(rng.randint(1, self.shape.num_turns)):
            self._turn()
        return Conversation(tuple(self.tools), tuple(self.messages))

    def _tool(self, name: str) -> Tool:
        arguments = dict(self.unused.pop() for _ in range(self.rng.randint(1, _MOST_ARGUMENTS)))
        return Tool(name, self.fresh.pop(), arguments)

    def _new_facts(self, count: int) -> str:
        new = {self.fresh.pop(): self._value() for _ in range(min(count, len(self.fresh)))}
        self.facts |= new
        return "".join(f"{topic}:{value};" for topic, value in new.items())

    def _value(self) -> str:
        return self.rng.choice(self.rng.choice((WORDS, NUMBERS)))

    def _turn(self) -> None:
        choice = self.rng.random()
        if choice < 0.55 and self.tools:
            self._ask_a_tool(self.rng.choice(self.tools))
        elif choice < 0.75 and self.facts:
            topic = self.rng.choice(list(self.facts))
            self._say(_question(topic, {}), f"{topic}:{self.facts[topic]}")
        elif choice < 0.9 or not self.fresh:
            self._ask_in_vain(self.rng.choice(self.unknown))
        else:
            self._say(f"Note {self._new_facts(self.rng.randint(1, 3))}", NOTED)

    def _say(self, question: str, answer: str) -> None:
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})

    def _ask_in_vain(self, topic: str) -> None:
        """A question that no tool and no fact answers; half of them name arguments, as those of tools do."""
        arguments = self.rng.sample(self.unused, self.rng.randint(1, _MOST_ARGUMENTS))
        named = {name: self._argument(kind) for name, kind in arguments} if self.rng.random() < 0.5 else {}
        self._say(_question(topic, named), f"{topic}:{UNKNOWN}")

    def _ask_a_tool(self, tool: Tool) -> None:
        arguments = {name: self._argument(kind) for name, kind in tool.arguments.items()}
        self.messages.append({"role": "user", "content": _question(tool.topic, arguments)})
        call_id = f"call_{len(self.messages)}"
        function = {"name": tool.name, "arguments": json.dumps(arguments)}
        calls = [{"id": call_id, "type": "function", "function": function}]
        self.messages.append({"role": "assistant", "content": f"{tool.topic}:{tool.name}", "tool_calls": calls})
        words = self.rng.sample((*WORDS, *NUMBERS), self.rng.randint(1, _MOST_RESULTS))
        result = " ".join(words)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        self.messages.append({"role": "assistant", "content": f"It is {result}."})

    def _argument(self, kind: str) -> str | int:
        """A text may be one of digits: the type says how it is written."""
        return int(self.rng.choice(NUMBERS)) if kind == "integer" else self._value()


def _question(topic: str, arguments: Mapping[str, object]) -> str:
    named = " and ".join(f"{name} {value}" for name, value in arguments.items())
    return f"?{topic}: with {named}" if named else f"?{topic}:"
