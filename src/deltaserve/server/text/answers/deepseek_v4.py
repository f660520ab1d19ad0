"""DeepSeek V4's format: that of V3.2 with another word around the calls."""

from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax
from deltaserve.server.text.answers.tagged_calls import DSML, DSML_MARK, tagged_block

_BEGIN, _END = f"<{DSML_MARK}tool_calls>", f"</{DSML_MARK}tool_calls>"
FORMAT = AnswerSyntax(tagged_block(_BEGIN, _END, DSML, DSML_MARK), THINK_TAGS)
