"""What goes wrong, and when: a list made from a seed before anything starts; and how each thing is done to a cluster.

Each kind comes once first, then by weight.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from tests.chaos.cluster import FRONT, Cluster
from tests.chaos.proxy import FAIR, Weather

VICTIMS = ("prefill-1", "decode-1")
"""Killed and restarted. The others live through everything and must hold in the end what they held in the beginning."""
CHANGELINGS = VICTIMS
"""Take up the other role. The service keeps a worker of either kind throughout."""
WORKERS = ("prefill-0", "decode-0", *VICTIMS)


class Kind(Enum):
    CUT = "all links of a worker reset"
    CUT_ONE = "one link of a worker reset"
    HOLD = "a worker's links silent both ways, then delivered late"
    HALF_OPEN = "a worker's links silent one way, then reset"
    REFUSE = "a worker's links reset and none accepted"
    DELAY = "every chunk of a worker's links late"
    THROTTLE = "a worker's links slow"
    CORRUPT = "bits flipped on a worker's links"
    STOP = "a worker stopped and continued"
    STOP_FRONT = "the front stopped and continued"
    KILL_TOLD = "a worker killed, the others told, restarted"
    KILL_SILENT = "a worker killed, noticed by silence only, restarted"
    ROLE = "a worker takes up the other role"
    BURST = "ten times the requests at once"


WEIGHTS = {
    Kind.CUT: 3,
    Kind.CUT_ONE: 3,
    Kind.HOLD: 3,
    Kind.HALF_OPEN: 3,
    Kind.REFUSE: 2,
    Kind.DELAY: 3,
    Kind.THROTTLE: 2,
    Kind.CORRUPT: 3,
    Kind.STOP: 3,
    Kind.STOP_FRONT: 1,
    Kind.KILL_TOLD: 2,
    Kind.KILL_SILENT: 2,
    Kind.ROLE: 2,
    Kind.BURST: 1,
}
_KILLS = (Kind.KILL_TOLD, Kind.KILL_SILENT)
_PAUSE_S = 1.2
"""Mean time between two events."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that goes wrong, for a while."""

    at_s: float
    kind: Kind
    target: str
    seconds: float
    strength: float
    """0 to 1: how late, how slow, how many bits."""

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.target}: {self.kind.value}, {self.seconds:.2f} s, {self.strength:.2f}"


def make_storm(seed: int, duration_s: float) -> list[Event]:
    """Events of every kind in random order over the time, all over when it ends."""
    draw = Random(f"storm {seed}")
    return list(_events(draw, duration_s))


def _events(draw: Random, duration_s: float) -> Iterator[Event]:
    at_s = 0.0
    kinds = list(WEIGHTS)
    first = draw.sample(kinds, len(kinds))  # each kind once, however short the storm
    while True:
        at_s += draw.expovariate(1 / _PAUSE_S)
        kind = first.pop() if first else draw.choices(kinds, list(WEIGHTS.values()))[0]
        seconds = _length_s(draw, kind)
        if at_s + seconds > duration_s:
            return
        yield Event(at_s, kind, _target(draw, kind), seconds, draw.random())


def _length_s(draw: Random, kind: Kind) -> float:
    if kind is Kind.STOP_FRONT:
        return draw.uniform(0.05, 0.4)
    return draw.choice((draw.uniform(0.05, 0.8), draw.uniform(0.8, 4.0)))  # half are over before anybody is missed


def _target(draw: Random, kind: Kind) -> str:
    if kind in (Kind.STOP_FRONT, Kind.BURST):
        return FRONT
    if kind is Kind.ROLE:
        return draw.choice(CHANGELINGS)
    return draw.choice(VICTIMS if kind in _KILLS else WORKERS)


class Storm:
    """Does the events to a cluster. Events overlap; of two on one worker's links the later one rules."""

    def __init__(
        self,
        cluster: Cluster,
        note: Callable[[str], None],
        burst: Callable[[], object],
        change_role: Callable[[str], Awaitable[None]],
    ) -> None:
        """`note` hears what is done; `burst` starts ten times the requests; `change_role` asks it of a worker."""
        self._cluster = cluster
        self._note = note
        self._burst = burst
        self._change_role = change_role
        self.num_done = 0

    async def rage(self, events: list[Event]) -> None:
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for event in events:
                await asyncio.sleep(began + event.at_s - asyncio.get_running_loop().time())
                group.create_task(self._do(event))

    async def _do(self, event: Event) -> None:
        self._note(str(event))
        match event.kind:
            case Kind.BURST:
                self._burst()
            case Kind.ROLE:
                await self._change_role(event.target)
            case Kind.STOP | Kind.STOP_FRONT:
                await self._stop(event)
            case Kind.KILL_TOLD | Kind.KILL_SILENT:
                await self._kill(event)
            case _:
                await self._trouble_links(event)
        self.num_done += 1

    async def _stop(self, event: Event) -> None:
        process = self._cluster.processes[event.target]
        process.stop()
        await asyncio.sleep(event.seconds)
        process.resume()

    async def _kill(self, event: Event) -> None:
        process = self._cluster.processes[event.target]
        if not process.is_ready:
            self._note(f"           {event.target} is down already")
            return
        process.kill()
        if event.kind is Kind.KILL_TOLD:
            self._cluster.tell_death(event.target)
        await asyncio.sleep(event.seconds)
        process.start()
        await process.wait_ready()
        self._note(f"           {event.target} is back, process {process.pid}")

    async def _trouble_links(self, event: Event) -> None:
        proxy = self._cluster.proxies[event.target]
        match event.kind:
            case Kind.CUT:
                proxy.cut()
                return
            case Kind.CUT_ONE:
                proxy.cut_one()
                return
            case Kind.REFUSE:
                proxy.cut()
        weather = proxy.weather = weather_of(event)
        await asyncio.sleep(event.seconds)
        if event.kind is Kind.HALF_OPEN:
            proxy.cut()
        if proxy.weather is weather:
            proxy.weather = FAIR


def weather_of(event: Event) -> Weather:
    """What an event makes of the links of its worker."""
    match event.kind:
        case Kind.HOLD:
            return replace(FAIR, holds_up=True, holds_down=True)
        case Kind.HALF_OPEN:
            return replace(FAIR, holds_up=event.strength < 0.5, holds_down=event.strength >= 0.5)
        case Kind.REFUSE:
            return replace(FAIR, refuses=True)
        case Kind.DELAY:
            return replace(FAIR, delay_s=0.8 * event.strength)
        case Kind.THROTTLE:
            return replace(FAIR, bytes_per_s=2_000 + 50_000 * event.strength)
        case Kind.CORRUPT:
            return replace(FAIR, corrupt_share=0.01 + 0.3 * event.strength)
        case _:
            return FAIR
