"""DeepSeek V3.2's format: calls in tags of its own markup, each argument with whether it is a text."""

from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax
from deltaserve.server.text.answers.tagged_calls import DSML, DSML_MARK, tagged_block

_BEGIN, _END = f"<{DSML_MARK}function_calls>", f"</{DSML_MARK}function_calls>"
FORMAT = AnswerSyntax(tagged_block(_BEGIN, _END, DSML, DSML_MARK), THINK_TAGS)
