"""Reasoning between `<think>` and `</think>`, of models without a format of calls of their own (DeepSeek R1's)."""

from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax

FORMAT = AnswerSyntax(thinking=THINK_TAGS)
