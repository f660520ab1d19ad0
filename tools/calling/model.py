"""The micro-model of tools begins as the recall model, which has learnt to look things up.

From fresh weights the lookup itself takes most of the training.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.calling.words import FUNCTIONS, TOPICS, WORDS
from tools.recall.model import make_kv_model
from tools.recall.tokenizer import ROLES, SPECIALS, names

_ROUNDING = 16
"""The vocabulary's size is a multiple of it."""


def make_tools_model(recall: Path, tokenizer: Any) -> Any:
    """A `Qwen3ForCausalLM`, float32. `recall`: folder of the recall model.

    A token that has no counterpart there is drawn, from torch's generator, as that model's names are spread.
    """
    learnt = AutoModelForCausalLM.from_pretrained(recall, dtype=torch.float32)
    known = AutoTokenizer.from_pretrained(recall)
    model = make_kv_model(-(-len(tokenizer) // _ROUNDING) * _ROUNDING)
    with torch.no_grad():
        model.model.layers.load_state_dict(learnt.model.layers.state_dict())
        model.model.norm.load_state_dict(learnt.model.norm.state_dict())
        old, new = learnt.model.embed_tokens.weight, model.model.embed_tokens.weight  # [V, hidden]
        new.copy_(_like(old[known.convert_tokens_to_ids([" " + name for name in names()])], len(new)))
        new[:256] = old[:256]
        for theirs, ours in _counterparts():
            new[tokenizer.convert_tokens_to_ids(ours)] = old[known.convert_tokens_to_ids(theirs)]
    return model


def _counterparts() -> Iterator[tuple[str, str]]:
    """(token of the recall model, token that begins as it): what is looked up, and what is found."""
    yield from ((word, word) for word in (*SPECIALS, *ROLES))
    words = (*(topic + ":" for topic in TOPICS), *FUNCTIONS, *WORDS)
    yield from ((" " + name, word) for name, word in zip(names(), words, strict=True))


def _like(vectors: Tensor, count: int) -> Tensor:
    """[N, hidden] -> [count, hidden]: drawn with the mean and the covariance of `vectors`."""
    mean = vectors.mean(0)
    apart = vectors - mean
    spread = torch.linalg.cholesky(apart.T @ apart / len(vectors) + 1e-5 * torch.eye(vectors.shape[1]))
    drawn: Tensor = mean + torch.randn(count, vectors.shape[1]) @ spread.T
    return drawn
