"""What is left to do for an engine that this one took over from: whoever knew it hears that it is over.

They may keep what they remember of the former engine for ever else, and greet this one anew when they hear.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from deltaserve.control.peer.table import PeerTable
from deltaserve.core.ids import Boot, PeerName

_NUM_BEATS = 60
"""Heartbeats with which those who knew the former engine hear that it is over, unless they are heard of."""


class Farewell:
    """Who knew the engine before this one, and the links that it, or one before it, had dialled."""

    def __init__(self, boots: Mapping[PeerName, Boot] = MappingProxyType({}), hang_up: Sequence[PeerName] = ()) -> None:
        """`boots`: of those who knew it. `hang_up`: over these links they hear of its end."""
        self._boots = boots
        self._hang_up = list(hang_up)
        self._num_beats = 0

    def of_successor(self, table: PeerTable, dialled: Iterable[PeerName]) -> "Farewell":
        """The farewell that is left to the engine which takes over: `table` and `dialled` are of the one that ends."""
        boots = {peer.name: peer.boot for peer in table if peer.boot is not None}
        return Farewell(boots, [*self._hang_up, *dialled])

    def unheard(self, table: PeerTable) -> list[tuple[PeerName, Boot]]:
        """Who of them was not heard of since, and their boot."""
        return [(name, boot) for name, boot in self._boots.items() if table.get(name).boot is None]

    def goes_on(self) -> bool:
        """Whether it is said once more, with this heartbeat."""
        self._num_beats += 1
        return self._num_beats <= _NUM_BEATS

    def take_hang_ups(self) -> list[PeerName]:
        names, self._hang_up = self._hang_up, []
        return names
