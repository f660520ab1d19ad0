"""The micro-model that calls tools, and conversations whose every answer it knows."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.calling.conversations import Conversation, Shape
from tools.calling.evaluate import drawn, right_answers
from tools.calling.rows import Rows

TOOLS_MODEL = Path(__file__).resolve().parents[1] / "models" / "tools-micro"
_MOST_DRAWN = 400


@cache
def model_and_rows() -> tuple[Any, Rows]:
    """The model in transformers, and its tokenizer's rows."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TOOLS_MODEL, dtype=torch.float32).eval()
    return model, Rows(AutoTokenizer.from_pretrained(TOOLS_MODEL))


def known(seed: int, count: int, shape: Shape, wanted: Callable[[Conversation], bool]) -> Sequence[Conversation]:
    """The first `count` drawn ones that are wanted and in which the model by itself, in transformers, is right."""
    model, rows = model_and_rows()
    found: list[Conversation] = []
    for one in drawn(seed, _MOST_DRAWN, shape):
        if len(found) < count and wanted(one) and all(right_answers(model, rows, one)):
            found.append(one)
    assert len(found) == count
    return found
