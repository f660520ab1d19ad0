"""The format of Seed-OSS: `<function=NAME><parameter=KEY>VALUE</parameter></function>` between markers of its own."""

from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, Thinking
from deltaserve.server.text.answers.tagged_calls import Tags, marked_tags

_TAGS = Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", on_own_lines=False)
FORMAT = AnswerSyntax(
    marked_tags("<seed:tool_call>", "</seed:tool_call>", _TAGS), Thinking("<seed:think>", "</seed:think>")
)
