"""A pass of a draft head: what it computes at once for some rows, and guesses behind some of those."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.attention_backend import AttentionBackend
from deltaserve.compute.layers.draft_head import DraftHead
from deltaserve.compute.layers.layer_kind import LastTokens
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.core.ids import RowId


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Positions [start, start + len(tokens)) of a row."""

    row: RowId
    start: int
    tokens: npt.NDArray[np.int64]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class HeadPass:
    """What a head computes at once."""

    pieces: Sequence[RowPiece]
    features: Tensor  # [T, F] of the token before each of the T of the pieces
    asked: Sequence[int]
    """Indexes of the pieces behind whose last token it guesses."""
    split_tokens: int
    least_likely: float
    """0: nobody asks how likely guesses are."""

    @property
    def is_of_last_tokens(self) -> bool:
        """Whether it guesses behind each token that it computes."""
        return len(self.asked) == len(self.features)

    @property
    def batch(self) -> Batch:
        queries = tuple(Query(piece.row, piece.start, len(piece.tokens)) for piece in self.pieces)
        return Batch(queries, self.split_tokens)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[T]"""
        return np.concatenate([piece.tokens for piece in self.pieces])

    @property
    def asked_batch(self) -> Batch:
        """The last token of each piece that is asked."""
        pieces = [self.pieces[index] for index in self.asked]
        return Batch(tuple(Query(piece.row, piece.end - 1, 1) for piece in pieces), self.split_tokens)

    @property
    def asked_places(self) -> npt.NDArray[np.int64]:
        """[A] where those stand among the T."""
        ends = np.cumsum([len(piece.tokens) for piece in self.pieces])
        places: npt.NDArray[np.int64] = ends[list(self.asked)] - 1
        return places


class Guesses(NamedTuple):
    """What comes of a pass, of the A pieces that were asked."""

    tokens: Sequence[int]  # [A]
    likely: Sequence[float]  # [A] of each; 1 where nobody asks
    features: Tensor  # [A, F] to guess behind those; valid until the next pass


class Passes(Protocol):
    """How passes are computed."""

    def run(self, of: HeadPass) -> Guesses: ...


class LaunchedPasses:
    """Passes whose kernels are launched one by one, with the attention of any batch."""

    def __init__(self, head: DraftHead, attention: AttentionBackend, group: int, device: torch.device) -> None:
        """`group`: of the head's pages."""
        self._head = head
        self._attention = attention
        self._group = group
        self._device = device

    def run(self, of: HeadPass) -> Guesses:
        batch = of.batch
        drafted = self._head.forward(
            on_device(of.tokens, self._device),
            on_device(batch.positions(), self._device),
            of.features,
            self._attention.begin_group(batch, self._group),
            None if of.is_of_last_tokens else self._last_tokens(of),
        )
        if not of.asked:
            return Guesses((), (), drafted.features)
        if not of.least_likely > 0.0:
            tokens: list[int] = self._head.guesses(drafted.normed).tolist()
            return Guesses(tokens, [1.0] * len(tokens), drafted.features)
        guesses, likely = self._head.weighed_guesses(drafted.normed)
        return Guesses(guesses.tolist(), likely.tolist(), drafted.features)

    def _last_tokens(self, of: HeadPass) -> LastTokens:
        attention = [self._attention.begin_group(of.asked_batch, self._group)] if of.asked else []
        return LastTokens(on_device(of.asked_places, self._device), attention)
