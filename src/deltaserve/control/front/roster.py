"""Which workers a front is told of, by whom: a list it was started with, a file, a DNS name, an operator.

A worker that any of these names is there; one that none names any more leaves. An operator's word counts more than a
list: a worker that was sent away stays away, although a list names it, until the operator or a new entry of the list
brings it back.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from deltaserve.control.front.events import Member
from deltaserve.core.ids import PeerName

CONFIGURED = "the command line"
OPERATOR = "an operator"


@dataclass(frozen=True, slots=True)
class Changes:
    """What a front is to be told."""

    joins: tuple[Member, ...] = ()
    """Workers that are new, or listen elsewhere."""
    leaves: tuple[PeerName, ...] = ()


class Roster:
    """Workers by who named them."""

    def __init__(self, members: Iterable[Member]) -> None:
        """`members`: what the front was started with."""
        self._named: dict[str, dict[PeerName, Member]] = {CONFIGURED: {member.name: member for member in members}}
        self._sent_away: set[PeerName] = set()

    def update(self, source: str, members: Iterable[Member]) -> Changes:
        """All that `source` names now."""
        before, after = self._named.get(source, {}), {member.name: member for member in members}
        self._named[source] = after
        self._sent_away = {name for name in self._sent_away if self._is_named(name)}
        joins = [m for name, m in after.items() if before.get(name) != m and name not in self._sent_away]
        return Changes(tuple(joins), tuple(name for name in before if not self._is_named(name)))

    def join(self, member: Member) -> Changes:
        """An operator brings a worker."""
        self._named.setdefault(OPERATOR, {})[member.name] = member
        self._sent_away.discard(member.name)
        return Changes(joins=(member,))

    def send_away(self, name: PeerName) -> Changes:
        """An operator has a worker leave, whoever named it."""
        self._named.get(OPERATOR, {}).pop(name, None)
        if self._is_named(name):
            self._sent_away.add(name)
        return Changes(leaves=(name,))

    def _is_named(self, name: PeerName) -> bool:
        return any(name in members for members in self._named.values())
