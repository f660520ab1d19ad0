"""Answers as models write them, by format, and drawn conversations: what a reader must make of them is known."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Value = object


@dataclass(frozen=True)
class Call:
    """A call and its arguments."""

    name: str
    arguments: Mapping[str, Value]


@dataclass(frozen=True)
class Turn:
    """What an answer says."""

    calls: Sequence[Call]
    content: str = ""
    """Before the calls."""
    after: str = ""
    reasoning: str = ""


TOOLS: Mapping[str, Mapping[str, object]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "unit": {"$ref": "#/$defs/Unit"},
        },
        "$defs": {"Unit": {"enum": ["C", "F"]}},
    },
    "ping-2": {"type": "object", "properties": {}},
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": ["string", "null"]}},
    },
}

_WORDS = (
    "Rome",
    "\u4f60\u597d",
    "caf\u00e9",
    "\U0001f600",
    "a b",
    "",
    "it's",
    'say "hi"',
    "1",
    "true",
    "null",
    "x < y",
    "{a: 1}",
    "[1]",
)
_LINES = ("one\ntwo", "  indented", "tab\there", "back\\slash", "<b>bold</b>", "a, b; c", "f(x)", "100%", "</p>")


def _text(rng: random.Random) -> str:
    return rng.choice((*_WORDS, *_LINES))


def _json(rng: random.Random, depth: int) -> Value:
    kinds: list[Callable[[], Value]] = [
        lambda: rng.randrange(-1000, 10**12),
        lambda: rng.choice((0.5, -1.25, 1e-9, 3.0)),
        lambda: rng.choice((True, False, None)),
        lambda: _text(rng),
    ]
    if depth:
        kinds += [
            lambda: [_json(rng, depth - 1) for _ in range(rng.randrange(3))],
            lambda: {rng.choice(("a", "k_2", "key")): _json(rng, depth - 1) for _ in range(rng.randrange(3))},
        ]
    return rng.choice(kinds)()


def _arguments(rng: random.Random, name: str) -> dict[str, Value]:
    if name == "ping-2":
        return {}
    if name == "write_file":
        return {"path": _text(rng), "text": rng.choice(_LINES)}
    every: dict[str, Callable[[], Value]] = {
        "city": lambda: _text(rng),
        "days": lambda: rng.randrange(-5, 100),
        "exact": lambda: rng.random() < 0.5,
        "where": lambda: {"at": _json(rng, 2), "of": [_json(rng, 1)]},
        "tags": lambda: [_json(rng, 2) for _ in range(rng.randrange(4))],
        "limit": lambda: rng.choice((None, 0.25, 7)),
        "unit": lambda: rng.choice("CF"),
    }
    return {key: every[key]() for key in rng.sample(sorted(every), rng.randrange(len(every) + 1))}


def drawn(seed: int, *, alone: bool) -> Turn:
    """`alone`: the format has no text beside calls."""
    rng = random.Random(seed)
    names = [rng.choice(sorted(TOOLS)) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    calls = [Call(name, _arguments(rng, name)) for name in names]
    said = rng.choice(("", "", "Let me look.", "I <think> so:\nwait", "\u4f60\u597d < tool", "a\n\n\nb"))
    after = rng.choice(("", "", "", "Done."))
    return Turn(calls, "" if alone else said, "" if alone else after, rng.choice(("", "hm", "first\n\nthen </thi nk>")))


@dataclass(frozen=True)
class Writer:
    """One format, as templates and models write it."""

    calls: Callable[[Sequence[Call]], str]
    think: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")
    alone: bool = False
    markers: Sequence[str] = field(default_factory=tuple)
    """Those that a vocabulary may have as control tokens."""

    def answer(self, turn: Turn) -> str:
        """The whole of it."""
        begin, end = self.think or ("", "")
        reasoning = f"{begin}{turn.reasoning}{end}" if turn.reasoning and self.think else ""
        content = turn.content + "\n" if turn.content else ""
        return reasoning + content + self.calls(turn.calls) + ("\n" + turn.after if turn.after else "")


def _dump(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Value) -> str:
    return value if isinstance(value, str) else _dump(value)


def hermes(calls: Sequence[Call]) -> str:
    each = (f'{{"name": "{call.name}", "arguments": {_dump(call.arguments)}}}' for call in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in each)


def hermes_arguments_first(calls: Sequence[Call]) -> str:
    each = (f'{{"arguments": {_dump(call.arguments)}, "name": "{call.name}"}}' for call in calls)
    return "\n".join(f"<tool_call>{text}</tool_call>" for text in each)


def qwen3_xml(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in call.arguments.items())
        + "</function>\n</tool_call>"
        for call in calls
    )


def minimax_m2(calls: Sequence[Call]) -> str:
    return (
        "<minimax:tool_call>\n"
        + "".join(
            f'<invoke name="{call.name}">\n'
            + "".join(f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in call.arguments.items())
            + "</invoke>\n"
            for call in calls
        )
        + "</minimax:tool_call>"
    )


_BEGIN, _END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEP = "<\uff5ctool\u2581sep\uff5c>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    each = (f"{_CALL}function{_SEP}{call.name}\n```json\n{_dump(call.arguments)}\n```{_CALL_END}" for call in calls)
    return _BEGIN + "\n".join(each) + _END


def deepseek_v31(calls: Sequence[Call]) -> str:
    return _BEGIN + "".join(f"{_CALL}{call.name}{_SEP}{_dump(call.arguments)}{_CALL_END}" for call in calls) + _END


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{call.name}", "parameters": {_dump(call.arguments)}}}' for call in calls)


def pythonic(calls: Sequence[Call]) -> str:
    each = (f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in calls)
    return f"[{', '.join(each)}]"


def _gemma_value(value: Value, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(v, quote) for v in value) + "]"
    return json.dumps(value)


def gemma(calls: Sequence[Call], begin: str = "<|tool_call>", end: str = "<tool_call|>", quote: str = '<|"|>') -> str:
    return "".join(f"{begin}call:{call.name}{_gemma_value(call.arguments, quote)}{end}" for call in calls)


def function_gemma(calls: Sequence[Call]) -> str:
    return gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>")


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_dump(call.arguments)}" for call in calls)


def mistral_numbered(calls: Sequence[Call]) -> str:
    ids = (f"a1B2c3D4{number}" for number in range(len(calls)))
    each = zip(calls, ids, strict=True)
    return "".join(f"[TOOL_CALLS]{call.name}[CALL_ID]{id_}[ARGS]{_dump(call.arguments)}" for call, id_ in each)


def mistral_list(calls: Sequence[Call]) -> str:
    each = (f'{{"name": "{call.name}", "arguments": {_dump(call.arguments)}, "id": "a1B2c3D4e"}}' for call in calls)
    return f"[TOOL_CALLS][{', '.join(each)}]"


def _glm(calls: Sequence[Call], line: str) -> str:
    return line.join(
        f"<tool_call>{call.name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_bare(value)}</arg_value>{line}"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def glm45(calls: Sequence[Call]) -> str:
    return _glm(calls, "\n")


def glm47(calls: Sequence[Call]) -> str:
    return _glm(calls, "")


def kimi_k2(calls: Sequence[Call]) -> str:
    begin, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    each = (f"{begin}functions.{c.name}:{k}{arguments}{_dump(c.arguments)}{end}" for k, c in enumerate(calls))
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


_DSML = "\uff5cDSML\uff5c"


def deepseek_v32(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Value) -> str:
        is_text = "true" if isinstance(value, str) else "false"
        return f'<{_DSML}parameter name="{key}" string="{is_text}">{_bare(value)}</{_DSML}parameter>\n'

    each = (
        f'<{_DSML}invoke name="{call.name}">\n'
        + "".join(argument(key, value) for key, value in call.arguments.items())
        + f"</{_DSML}invoke>\n"
        for call in calls
    )
    return f"<{_DSML}function_calls>\n{''.join(each)}</{_DSML}function_calls>"


def deepseek_v4(calls: Sequence[Call]) -> str:
    return deepseek_v32(calls).replace("function_calls>", "tool_calls>")


def seed_oss(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={key}>{_bare(value)}</parameter>\n" for key, value in call.arguments.items())
        + "</function>\n</seed:tool_call>"
        for call in calls
    )


def granite(calls: Sequence[Call], begin: str = "<|tool_call|>", end: str = "") -> str:
    each = (f'{{"name": "{call.name}", "arguments": {_dump(call.arguments)}}}' for call in calls)
    return f"{begin}[{', '.join(each)}]{end}"


def phi4(calls: Sequence[Call]) -> str:
    return granite(calls, end="<|/tool_call|>")


def phi4_old(calls: Sequence[Call]) -> str:
    return granite(calls, "functools")


def cohere(calls: Sequence[Call]) -> str:
    each = (
        f'{{"tool_call_id": "{k}", "tool_name": "{c.name}", "parameters": {_dump(c.arguments)}}}'
        for k, c in enumerate(calls)
    )
    listed = ",\n    ".join(each)
    return f"<|START_ACTION|>[\n    {listed}\n]<|END_ACTION|>"


_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>", *_THINK)
_GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
_MISTRAL_THINK = ("[THINK]", "[/THINK]")
_GLM = (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", *_THINK),
)
_SEED = ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")
_COHERE = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>")
WRITERS: Mapping[str, tuple[str, Writer]] = {
    "hermes": ("hermes", Writer(hermes, markers=_TOOL_CALL)),
    "hermes, arguments first": ("hermes", Writer(hermes_arguments_first, markers=_TOOL_CALL)),
    "qwen3_xml": ("qwen3_xml", Writer(qwen3_xml, markers=_TOOL_CALL)),
    "minimax_m2": ("minimax_m2", Writer(minimax_m2, markers=("<minimax:tool_call>", "</minimax:tool_call>", *_THINK))),
    "deepseek_v3": ("deepseek_v3", Writer(deepseek_v3, markers=(_BEGIN, _END, _CALL, _CALL_END, _SEP))),
    "deepseek_v31": ("deepseek_v3", Writer(deepseek_v31, markers=(_BEGIN, _END, _CALL, _CALL_END, _SEP))),
    "llama3_json": ("llama3_json", Writer(llama3_json, None, alone=True, markers=("<|python_tag|>",))),
    "llama3_json, tagged": (
        "llama3_json",
        Writer(lambda calls: "<|python_tag|>" + llama3_json(calls), None, markers=("<|python_tag|>",)),
    ),
    "pythonic": ("pythonic", Writer(pythonic, None, alone=True, markers=("<|python_start|>", "<|python_end|>"))),
    "pythonic, tagged": (
        "pythonic",
        Writer(
            lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>",
            None,
            markers=("<|python_start|>", "<|python_end|>"),
        ),
    ),
    "gemma": ("gemma", Writer(gemma, ("<|channel>thought\n", "\n<channel|>"), markers=_GEMMA)),
    "functiongemma": (
        "gemma",
        Writer(function_gemma, None, markers=("<start_function_call>", "<end_function_call>", "<escape>")),
    ),
    "mistral": ("mistral", Writer(mistral, _MISTRAL_THINK, markers=_MISTRAL)),
    "mistral, numbered": ("mistral", Writer(mistral_numbered, _MISTRAL_THINK, markers=_MISTRAL)),
    "mistral, a list": ("mistral", Writer(mistral_list, None, markers=("[TOOL_CALLS]",))),
    "glm45": ("glm45", Writer(glm45, markers=_GLM)),
    "glm47": ("glm45", Writer(glm47, markers=_GLM)),
    "kimi_k2": ("kimi_k2", Writer(kimi_k2, markers=_KIMI)),
    "deepseek_v32": ("deepseek_v32", Writer(deepseek_v32, markers=(_DSML, *_THINK))),
    "deepseek_v4": ("deepseek_v4", Writer(deepseek_v4, markers=(_DSML, *_THINK))),
    "seed_oss": ("seed_oss", Writer(seed_oss, ("<seed:think>", "</seed:think>"), markers=_SEED)),
    "granite": ("granite", Writer(granite, None, markers=("<|tool_call|>",))),
    "phi4": ("granite", Writer(phi4, None, markers=("<|tool_call|>", "<|/tool_call|>"))),
    "phi4, older": ("granite", Writer(phi4_old, None)),
    "cohere": ("cohere", Writer(cohere, ("<|START_THINKING|>", "<|END_THINKING|>"), markers=_COHERE)),
}
"""What is written |-> (branch that reads it, writer)."""
JSON_BYTES = (
    *("hermes", "hermes, arguments first", "deepseek_v3", "deepseek_v31", "llama3_json", "llama3_json, tagged"),
    *("mistral", "mistral, numbered", "mistral, a list", "kimi_k2", "granite", "phi4", "phi4, older", "cohere"),
)
"""Those that carry arguments as JSON."""
