"""The model in transformers on this machine: scores computed without our own code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from deltaserve.commands.verify.client import Score, VerifyError
from deltaserve.core.errors import ConfigError
from deltaserve.core.sizes import size
from deltaserve.launch.compose import Checkpoint
from deltaserve.model.open_source import format_half, open_source

_HEADROOM = 1.3
"""Memory needed per byte of weights: activations, and what loading takes in passing."""


class TransformersReference:
    """Scores tokens in float32, or in the checkpoint's own type where float32 does not fit."""

    def __init__(self, folder: Path) -> None:
        """Loads the model. Raises ConfigError when it does not fit into memory, or the folder is none."""
        checkpoint = Checkpoint.open(str(folder))
        self.vocab_size = checkpoint.spec.vocab_size
        self.stored = checkpoint.spec.dtype
        self.dtype = self._choose_dtype(checkpoint)
        self.name = f"transformers {str(self.dtype).removeprefix('torch.')}"
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = _load(checkpoint.path, self.dtype)

    @staticmethod
    def _choose_dtype(checkpoint: Checkpoint) -> torch.dtype:
        own = getattr(torch, checkpoint.spec.dtype.value)
        free = psutil.virtual_memory().available
        for dtype in (torch.float32, own):
            need = checkpoint.num_values * dtype.itemsize * _HEADROOM
            if need <= free:
                return dtype
        raise ConfigError(
            f"--model-path {checkpoint.path}: needs {size(round(need))} of memory, {size(free)} are free; "
            "compare with another server instead: --reference URL"
        )

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> list[Score]:
        """Scores of tokens 1 .. n-1. Raises VerifyError for a token the model does not know."""
        if max(tokens) >= self.vocab_size:
            raise VerifyError(f"token {max(tokens)} is outside the reference's vocabulary of {self.vocab_size}")
        logits = self._model(torch.tensor([list(tokens)])).logits[0, :-1]  # [T-1, V]
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        best = logprobs.max(-1).values
        return [Score(a, b) for a, b in zip(own.tolist(), best.tolist(), strict=True)]


def _load(path: Path, dtype: torch.dtype) -> Any:
    source = open_source(path)
    half = format_half(source, "reference")
    if half is None:
        raise ConfigError(f"--model-path {path}: is {source.format}; use --reference, or a folder that is not")
    return half.load(source, dtype)
