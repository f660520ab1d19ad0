"""The format of Llama 4 and Llama 3.2: an answer that is a list of calls as Python writes them, `[f(a=1), g()]`."""

import ast
import json
import re
from collections.abc import Iterator, Mapping

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar, pattern_of

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}", re.ASCII)
_HEAD = re.compile(r"\s*\[\s*([A-Za-z_][\w.-]*)(\()?", re.ASCII)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_MAX_CHARS = 64 * 1024
_MAX_BRACKETS = 128
"""Closing brackets in the arguments of a call that are tried as its end."""
_JSON_NAMES = {"true": True, "false": False, "null": None, "none": None}


def _read(stream: AnswerStream) -> Wait[bool]:
    yield from stream.skip()
    if not (yield from stream.accept("[")):
        return False
    return (yield from stream.each_call(lambda: _read_call(stream), "]", _END, separator=","))


def _read_call(stream: AnswerStream) -> Wait[bool]:
    """A call is known when its last bracket has come: what is in it is not JSON."""
    name = yield from stream.pattern(_NAME)
    if name is None or name[0] not in stream.tools or not (yield from stream.accept("(")):
        return False
    text = ""
    for _ in range(_MAX_BRACKETS):
        more = yield from stream.until(")", most=_MAX_CHARS)
        if more is None or len(text) > _MAX_CHARS:
            return False
        text += more[0]
        arguments = _as_json(text) if _is_closed(text) else None
        if arguments is not None:
            stream.call(name[0], arguments)
            return True
        text += ")"
    return False


def _is_closed(text: str) -> bool:
    """Whether every bracket outside of strings is closed. Reading Python costs more than looking."""
    bare = _QUOTED.sub("", text)
    return all(bare.count(opening) == bare.count(closing) for opening, closing in ("()", "[]", "{}"))


def _as_json(text: str) -> str | None:
    """`a=1, b="x"` as a JSON object. None: it is not that, or only a part of it."""
    try:
        tree = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return None
        values = {str(keyword.arg): _value(keyword.value) for keyword in tree.keywords}
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair, which Python can spell, is no text
        return text
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> object:
    """A literal. Raises ValueError for anything else."""
    match node:
        case ast.Constant(str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            return dict(zip(map(str, _keys(keys)), map(_value, values), strict=True))
    raise ValueError("not a literal that JSON has")


def _keys(keys: list[ast.expr | None]) -> Iterator[object]:
    for key in keys:
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            raise ValueError("a key that JSON does not have")
        yield key.value


def _write(grammar: CallGrammar) -> str:
    """Values are JSON, whose names of constants are read as well. The bracket and the first name are one text, so that
    a text which begins otherwise is told apart there."""
    first = grammar.any_of(list(_calls(grammar, "[")))
    if not grammar.several:
        return f'{first} "]"'
    return f'{first} (", " {grammar.any_of(list(_calls(grammar, "")))})* "]"'


def _calls(grammar: CallGrammar, before: str) -> Iterator[str]:
    for name, schema in grammar.tools.items():

        def member(key: str, own: object, root: Mapping[str, object] = schema) -> str:
            return f"{grammar.literal(f'{key}=')} {grammar.json_part(own, root)}"

        yield f'{grammar.literal(f"{before}{name}(")} {grammar.members(schema, member, ", ")} ")"'


def _write_free(grammar: CallGrammar) -> str:
    """Any text but one that begins as a call of a tool does."""
    names = "|".join(map(pattern_of, grammar.tools))
    marker = rf"(?s:.*){pattern_of(_BEGIN)}(?s:.*)"
    return grammar.text_but(rf"\s*\[\s*({names})\((?s:.*)", marker)


FORMAT = AnswerSyntax(
    CallSyntax(
        _read,
        begins=(_BEGIN,),
        begins_content=("[",),
        head=_HEAD,
        inside=(_END,),
        write=_write,
        is_block=True,
        writes_free=_write_free,
    )
)
