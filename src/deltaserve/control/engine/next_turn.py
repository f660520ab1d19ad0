"""Whether a conversation goes on behind an answer, as learnt from those before it, by how many turns they have had.

    an answer ends -> it is waited for -> a prompt begins with it: went on | nothing comes for long: did not

A prompt is known to continue an answer by the key of the answer's last full page, which stands for all tokens before
it. Conversations of several clients differ more by their length than by anything else that a server sees: of those that
have had many turns most have another, of single questions few.
"""

from collections import OrderedDict
from dataclasses import dataclass

from deltaserve.core.keys import key_at, num_keys

_LASTS_S = 600.0
"""A conversation whose next turn takes longer counts as one that did not go on."""
_MOST = 256
"""Answers that are waited for; of more the oldest count as gone."""
_DEPTHS = 8
"""Numbers of turns that are told apart; longer conversations count as ones of so many."""
_KEEPS = 0.98
"""Weight of what is known beside one more conversation."""


@dataclass(slots=True)
class _Waited:
    """An answer behind which a turn may come."""

    index: int
    """Index of the page whose key it is known by."""
    num_turns: int
    until: float
    went_on: bool = False


@dataclass(slots=True)
class _Rate:
    """How many conversations of one depth went on. Before any is known all are taken to."""

    went_on: float = 1.0
    ended: float = 0.0

    def add(self, went_on: bool) -> None:
        self.went_on = self.went_on * _KEEPS + went_on
        self.ended = self.ended * _KEEPS + (not went_on)

    @property
    def share(self) -> float:
        return self.went_on / (self.went_on + self.ended)


class NextTurns:
    """The answers of one decode worker, and what became of their conversations."""

    def __init__(self) -> None:
        self._waited: OrderedDict[bytes, _Waited] = OrderedDict()
        """Key of an answer's last full page |-> what is known of it, the oldest first."""
        self._rates = [_Rate() for _ in range(_DEPTHS)]

    def turns_before(self, keys: bytes | bytearray) -> int:
        """Turns of the conversation that a prompt with these page keys continues; its last answer has gone on."""
        waited = self._continued(keys)
        if waited is None:
            return 0
        if not waited.went_on:
            waited.went_on = True
            self._rate(waited.num_turns).add(went_on=True)
        return waited.num_turns

    def _continued(self, keys: bytes | bytearray) -> _Waited | None:
        """The longest answer that a prompt with these keys begins with, by whichever way looks at less."""
        num_pages = num_keys(keys)
        if num_pages <= len(self._waited):
            found = (self._waited.get(key_at(keys, index)) for index in range(num_pages - 1, -1, -1))
            return next((waited for waited in found if waited is not None), None)
        known = self._waited.items()
        fitting = (w for key, w in known if w.index < num_pages and key_at(keys, w.index) == key)
        return max(fitting, key=lambda waited: waited.index, default=None)

    def answered(self, keys: bytes, num_turns: int, now: float) -> None:
        """An answer has ended, the last of so many turns. `keys`: of the full pages of its prompt and itself."""
        if not keys:
            return
        index = num_keys(keys) - 1
        self._waited.pop(key_at(keys, index), None)
        self._waited[key_at(keys, index)] = _Waited(index, num_turns, now + _LASTS_S)
        if len(self._waited) > _MOST:
            self._end_oldest()

    def tick(self, now: float) -> None:
        while self._waited and now >= next(iter(self._waited.values())).until:
            self._end_oldest()

    def chance(self, num_turns: int) -> float:
        """Share of conversations of so many turns that had another one."""
        return self._rate(num_turns).share

    def _end_oldest(self) -> None:
        _, waited = self._waited.popitem(last=False)
        if not waited.went_on:
            self._rate(waited.num_turns).add(went_on=False)

    def _rate(self, num_turns: int) -> _Rate:
        return self._rates[min(num_turns, _DEPTHS) - 1]
