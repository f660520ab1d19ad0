"""Tokens that a row may draw, as bits, and logits without the others."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.core.sampling import SamplingParams

WORD_BITS = 32
Mask = npt.NDArray[np.uint32]
"""[ceil(V / 32)]: bit i % 32 of word i // 32 is set where token i may be drawn."""
_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)  # [8]


def with_least_tokens(mask: Mask, params: SamplingParams, position: int) -> Mask:
    """The mask without stop ids before `min_tokens`, unless nothing else is left."""
    if not params.stop_token_ids or position >= params.min_tokens:
        return mask
    without = mask.copy()
    for token in params.stop_token_ids:
        without[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
    return without if without.any() else mask


def forbid(logits: Tensor, masks: Mapping[int, Mask]) -> None:
    """logits [N, V], in place: -inf where the mask of a line does not allow the token. Lines without a mask stay."""
    packed = np.stack(list(masks.values())).view(np.uint8)  # [n, 4 W], little endian
    bits = on_device(packed, logits.device)[:, :, None] & _BITS.to(logits.device)  # [n, 4 W, 8]
    forbidden = (bits == 0).view(len(packed), -1)[:, : logits.shape[1]]
    if len(masks) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
        return
    lines = on_device(np.array(list(masks), np.int64), logits.device)
    logits.index_copy_(0, lines, logits.index_select(0, lines).masked_fill_(forbidden, float("-inf")))
