"""MiniMax's format: calls as `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in one block."""

from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax
from deltaserve.server.text.answers.tagged_calls import Tags, tagged_block

_TAGS = Tags('<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>", on_own_lines=False)
FORMAT = AnswerSyntax(tagged_block("<minimax:tool_call>", "</minimax:tool_call>", _TAGS), THINK_TAGS)
