"""Steps with prompts in pieces: what is computed between two meetings of a step's tokens (layers/stretches.py) is
recorded once for each of a few numbers of tokens, and replayed: one launch in place of about ten.

Keys and values are written, and attention and recurrent states computed, as without: how they are depends on the step.
T tokens are computed as the next larger number that is recorded; rows in vain begin as token 0 and met nobody, or are
as another row, so that they are numbers like others, and nobody reads them. (As in vLLM and SGLang, there called
piecewise CUDA graphs.)

What one piece leaves for another lies in buffers that all numbers of tokens and all layers share, outside of the memory
of the recordings: that is used again by the next piece.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention, StepStates
from deltaserve.compute.executor.recordable_models import token_bucket, token_buckets, why_no_pieces
from deltaserve.compute.executor.recorded_steps import why_not_recorded
from deltaserve.compute.executor.recordings import RecordingFailed, Recordings
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.layers.decoder import Decoder, Hidden
from deltaserve.compute.layers.layer_kind import LastTokens
from deltaserve.compute.layers.stretches import Standing

_log = logging.getLogger(__name__)


class _Buffers(NamedTuple):
    """What pieces read and write: [T, ..] each."""

    ids: Tensor  # [2, T] int64: tokens, positions
    turns: tuple[tuple[Tensor, Tensor], ...]  # cos, signed sin [T, 1, R]
    standings: tuple[Standing, ...]
    """Those that differ in shapes or types of their tensors."""
    mets: tuple[Tensor, ...]
    """What comes of meetings, likewise."""

    def first(self, num_tokens: int) -> "_Buffers":
        """Those of the first tokens."""
        return _Buffers(
            self.ids[:, :num_tokens],
            tuple((cos[:num_tokens], sin[:num_tokens]) for cos, sin in self.turns),
            tuple(_first(standing, num_tokens) for standing in self.standings),
            tuple(met[:num_tokens] for met in self.mets),
        )


class _Layout(NamedTuple):
    """Which of the buffers are whose."""

    whole: _Buffers
    standing_of: tuple[int, ...]
    """What each stretch leaves."""
    met_of: tuple[int, ...]
    """What each stretch reads of the meeting before it; the first one reads none."""


class _Lens(NamedTuple):
    """Numbers of tokens."""

    step: int
    bucket: int
    """What the step is computed as."""
    read: int
    """Those that the last stretch computes."""


class StepPieces:
    """Computes steps as its decoder does. Pieces are recorded when a number of tokens comes first, most of them before
    a worker is ready (warm_up.py); with the first ones, the last stretches of as many tokens as rows may draw. For one
    thread."""

    def __init__(self, decoder: Decoder, max_tokens: int, max_rows: int, recordings: Recordings) -> None:
        """`max_tokens`: of a step whose pieces are recorded; one of `token_buckets`."""
        self.max_tokens = max_tokens
        self._usual_ends = token_buckets(min(max_tokens, token_bucket(max_rows)))
        self._decoder = decoder
        self.recordings = recordings
        self._num_layers = len(decoder.spec.layers)
        self._layout: _Layout | None = None
        self._begun: dict[int, list[Callable[[], None]]] = {}
        """Number of tokens |-> all stretches but the last one."""
        self._ended: dict[int, Callable[[], None]] = {}
        """Number of tokens |-> the last one."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Sequence[StepAttention],
        last: LastTokens | None = None,
        states: Sequence[StepStates] = (),
    ) -> Hidden:
        """See Decoder.forward. Of a step that is replayed the result is valid until the next one."""
        num_read = len(tokens) if last is None else len(last.tokens)
        step = self._replayed(_Lens(len(tokens), token_bucket(len(tokens)), num_read))
        if step is None:
            return self._decoder.forward(tokens, positions, attention, last, states)
        return self._decoder.follow(step, step.begin(tokens, positions), attention, last, states)

    def _replayed(self, lens: _Lens) -> "_ReplayedStretches | None":
        """None: such a step is not recorded."""
        if lens.bucket > self.max_tokens:
            return None
        if self.recordings.has_failed:
            self._drop()
            return None
        try:
            layout = self._prepared(lens)
        except RecordingFailed:
            self._drop()
            return None
        ended = self._ended[token_bucket(lens.read)] if lens.read else None
        return _ReplayedStretches(layout, self._begun[lens.bucket], ended, lens)

    def _drop(self) -> None:
        self._layout = None
        self._begun.clear()
        self._ended.clear()

    def _prepared(self, lens: _Lens) -> _Layout:
        has_begun = lens.bucket in self._begun
        what = f"the last stretch of {token_bucket(lens.read)} tokens" if has_begun else f"{lens.bucket} tokens"
        layout = self._layout = self._layout or self.recordings.attempt(what, self._laid_out)
        self._record_missing(layout, lens, what)
        return layout

    def _laid_out(self) -> _Layout:
        """Shapes and types are those of a step of one token, of which all is computed here but the meetings."""
        decoder, made = self._decoder, _Making(self.max_tokens)
        ids = torch.zeros((2, self.max_tokens), dtype=torch.int64, device=decoder.device)
        embedded = decoder.embed(ids[0, :1])
        turns = decoder.turns(ids[1, :1], embedded.dtype)
        stretches = decoder.stretches(turns)
        standing, standing_of, met_of = stretches.begin(embedded, None), [], [0]
        for number in range(1, self._num_layers + 1):
            standing_of.append(made.standing(standing))
            met = stretches.room(number, 1, embedded)
            met_of.append(made.met(met))
            standing = stretches.go_on(number, stretches.enter(number, met, standing))
        standing_of.append(made.standing(standing))
        tables = tuple((_room(cos, self.max_tokens), _room(sin, self.max_tokens)) for cos, sin in turns)
        whole = _Buffers(ids, tables, tuple(made.standings), tuple(made.mets))
        return _Layout(whole, tuple(standing_of), tuple(met_of))

    def _record_missing(self, layout: _Layout, lens: _Lens, what: str) -> None:
        """All at once, since the host waits for the device each time."""
        wanted = {*self._usual_ends, token_bucket(lens.read)} if lens.read else set(self._usual_ends)
        ends = sorted(wanted - self._ended.keys(), reverse=True)
        num_begun = 0 if lens.bucket in self._begun else self._num_layers
        at = layout.whole.first(lens.bucket)
        runs = [partial(self._compute, layout, at, number) for number in range(num_begun)]
        runs += [partial(self._compute, layout, layout.whole.first(end), self._num_layers) for end in ends]
        if not runs:
            return
        replays = self.recordings.record_each(what, runs)
        if num_begun:
            self._begun[lens.bucket] = replays[:num_begun]
        self._ended.update(zip(ends, replays[num_begun:], strict=True))
        _log.debug("CUDA graphs: %d pieces are recorded for a step of %d tokens", len(runs), lens.bucket)

    def _compute(self, layout: _Layout, at: _Buffers, number: int) -> None:
        """A stretch, from buffers to buffers."""
        decoder, stretches = self._decoder, self._decoder.stretches(at.turns)
        if number == 0:
            x = decoder.embed(at.ids[0])
            for kept, made in zip(at.turns, decoder.turns(at.ids[1], x.dtype), strict=True):
                kept[0].copy_(made[0])
                kept[1].copy_(made[1])
            standing = stretches.begin(x, None)
        else:
            before = at.standings[layout.standing_of[number - 1]]
            entered = stretches.enter(number, at.mets[layout.met_of[number]], before)
            standing = stretches.go_on(number, entered)
        _put(standing, at.standings[layout.standing_of[number]])


class _ReplayedStretches:
    """Stretches of one step, computed by replays."""

    def __init__(
        self, layout: _Layout, begun: Sequence[Callable[[], None]], ended: Callable[[], None] | None, lens: _Lens
    ) -> None:
        """`ended` None: no token is read."""
        self._layout = layout
        self._begun = begun
        self._ended = ended
        self._lens = lens
        self._at = layout.whole.first(lens.step)
        self._at_end = self._at if lens.read == lens.step else layout.whole.first(lens.read)

    def begin(self, tokens: Tensor, positions: Tensor) -> Standing:
        """Stretch 0."""
        whole, in_vain = self._layout.whole, slice(self._lens.step, self._lens.bucket)
        self._at.ids[0].copy_(tokens)
        self._at.ids[1].copy_(positions)
        if self._lens.step < self._lens.bucket:
            whole.ids[:, in_vain].zero_()
            for met in whole.mets:
                met[in_vain].zero_()
        self._begun[0]()
        return self._at.standings[self._layout.standing_of[0]]

    def enter(self, number: int, met: Tensor, before: Standing) -> Standing:
        """Puts what the stretch reads into its buffers. Where that is a part of the step's tokens, rows in vain are as
        the first of them, so that they choose no experts of their own."""
        layout, at = self._layout, self._of(number)
        place, kept = layout.met_of[number], at.standings[layout.standing_of[number - 1]]
        at.mets[place].copy_(met)
        if before is not kept:
            _put(before, kept._replace(meeting=()))
            x, _, waiting = layout.whole.standings[layout.standing_of[number - 1]]
            for tensor in (x, *waiting, layout.whole.mets[place]):
                tensor[len(met) : token_bucket(len(met))].copy_(tensor[:1])
        return kept

    def go_on(self, number: int, entered: Standing) -> Standing:
        replay = self._ended if number == len(self._begun) else self._begun[number]
        assert replay is not None
        replay()
        return self._of(number).standings[self._layout.standing_of[number]]

    def _of(self, number: int) -> _Buffers:
        return self._at_end if number == len(self._begun) else self._at


class _Making:
    """Buffers of a layout, made when their shapes and types are met first."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._rooms: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._places: dict[tuple[int, ...], int] = {}
        """Identities of a standing's tensors |-> its index."""
        self.standings: list[Standing] = []
        self.mets: list[Tensor] = []

    def standing(self, like: Standing) -> int:
        """Index of the one with room for such tensors."""
        meeting = tuple(self._room(f"meeting {index}", tensor) for index, tensor in enumerate(like.meeting))
        waiting = tuple(self._room(f"waiting {index}", tensor) for index, tensor in enumerate(like.waiting))
        found = Standing(self._room("x", like.x), meeting, waiting)
        place = self._places.setdefault(tuple(map(id, _tensors(found))), len(self.standings))
        if place == len(self.standings):
            self.standings.append(found)
        return place

    def met(self, like: Tensor) -> int:
        found = self._room("met", like)
        if not any(found is met for met in self.mets):
            self.mets.append(found)
        return next(index for index, met in enumerate(self.mets) if met is found)

    def _room(self, name: str, like: Tensor) -> Tensor:
        key = name, like.shape[1:], like.dtype
        if key not in self._rooms:
            self._rooms[key] = _room(like, self._num_tokens)
        return self._rooms[key]


def _room(like: Tensor, num_tokens: int) -> Tensor:
    return like.new_zeros((num_tokens, *like.shape[1:]))


def _tensors(standing: Standing) -> tuple[Tensor, ...]:
    return standing.x, *standing.meeting, *standing.waiting


def _first(standing: Standing, num_tokens: int) -> Standing:
    x, meeting, waiting = standing
    return Standing(x[:num_tokens], tuple(t[:num_tokens] for t in meeting), tuple(t[:num_tokens] for t in waiting))


def _put(standing: Standing, to: Standing) -> None:
    for kept, made in zip(_tensors(to), _tensors(standing), strict=True):
        kept.copy_(made)


def make_step_pieces(
    decoder: Decoder, max_tokens: int, max_rows: int, recorder: StepRecorder | None
) -> StepPieces | None:
    """StepPieces of this decoder. None: what it computes, or on this device, is not recorded; recorded_steps.py has
    said why of all its steps."""
    if recorder is None or why_not_recorded(decoder) is not None:
        return None
    reason = why_no_pieces(decoder.spec)
    if reason is not None:
        _log.info("CUDA graphs: none of other steps (%s)", reason)
        return None
    _log.info("CUDA graphs: of all other steps of up to %d tokens, in pieces between attention", max_tokens)
    return StepPieces(decoder, max_tokens, max_rows, Recordings(recorder, "no pieces"))
