"""Reasoning between `<think>` and `</think>`, of models without a format of calls of their own (DeepSeek R1's)."""

from deltaserve.server.text.answers.answer_format import THINK_TAGS, AnswerFormat

FORMAT = AnswerFormat(thinking=THINK_TAGS)
