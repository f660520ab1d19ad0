"""DeepSeek's format: calls between control tokens, `function`, the name and JSON in a fence (V3, R1), or name and JSON
alone (V3.1)."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_MAX_NAME = 256
_FENCE = "```"


def _read(stream: AnswerStream) -> Wait[bool]:
    return (yield from stream.each_call(lambda: _read_call(stream), _END))


def _read_call(stream: AnswerStream) -> Wait[bool]:
    if not (yield from stream.accept(_CALL)):
        return False
    head = yield from stream.until(_SEPARATOR, most=_MAX_NAME)
    is_fenced = head is not None and head[0] == "function"
    if is_fenced:
        head = yield from stream.until("\n", most=_MAX_NAME)
        yield from stream.accept(f"{_FENCE}json")
        yield from stream.skip()
    if head is None or head[0] not in stream.tools or (yield from stream.peek()) != "{":
        return False
    stream.begin_call(head[0])
    if (yield from stream.json_object(stream.arguments)):
        yield from stream.skip()
        if is_fenced and (yield from stream.accept(_FENCE)):
            yield from stream.skip()
        yield from stream.accept(_CALL_END)
    return True


def _write(grammar: CallGrammar) -> str:
    """Either form: a model was trained on one of them."""
    fenced = grammar.one_json(f"{_CALL}function{_SEPARATOR}", f"\n{_FENCE}json\n", f"\n{_FENCE}{_CALL_END}")
    bare = grammar.one_json(_CALL, _SEPARATOR, _CALL_END)
    either = (grammar.some(fenced, "\n"), grammar.some(bare))
    return f"{grammar.any_of(either)} {grammar.literal(_END)}"


FORMAT = AnswerSyntax(
    CallSyntax(_read, begins=(_BEGIN,), inside=(_END, _CALL, _SEPARATOR, _CALL_END), write=_write, is_block=True),
    THINK_TAGS,
)
