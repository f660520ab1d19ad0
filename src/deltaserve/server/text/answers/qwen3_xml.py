"""The format of Qwen3-Coder and Qwen3.5: `<function=NAME><parameter=KEY>VALUE</parameter></function>` between
`<tool_call>` and its end, each value on lines of its own."""

from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax
from deltaserve.server.text.answers.tagged_calls import Tags, marked_tags

_TAGS = Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", on_own_lines=True)
FORMAT = AnswerSyntax(marked_tags("<tool_call>", "</tool_call>", _TAGS), THINK_TAGS)
