"""Ranks of a worker that are children of this process: started, watched by descriptor, ended together."""

import logging
import selectors
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltaserve.process.children.child import Child, ChildSpec, Kind
from deltaserve.process.children.child_events import Halted
from deltaserve.process.children.exits import Exit, ProcessOver, how_it_ended, start_thread
from deltaserve.process.children.log_file import OwnOutput
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.children.notices import Progress, Ready, Refused, Welcome

_log = logging.getLogger(__name__)

_STDERR = 2
_LOOK_S = 2.0
"""How often it is looked whether a rank is stopped."""


class RankEvents(Protocol):
    """Who hears of the ranks: called from a thread of theirs."""

    def says(self, rank: int, text: str) -> None:
        """What takes time while it starts, or a warning."""
        ...

    def all_ready(self) -> None:
        """Each of them has loaded its part and opened its transport."""
        ...

    def refused(self, rank: int, message: str) -> None:
        """Its configuration is wrong; it has ended."""
        ...

    def ended(self, rank: int, how: str) -> None:
        """Its process is gone, and nobody had asked for that."""
        ...


@dataclass(slots=True)
class _Watched:
    """A rank's process. `refusal`: what it said is wrong with its configuration."""

    rank: int
    child: Child
    is_ready: bool = False
    is_halted: bool = False
    refusal: str | None = None


class RanksHere:
    """Made in the main thread, which outlives them: the kernel ends them with it."""

    def __init__(self, argv: tuple[str, ...], file: Path, ranks: Iterable[int], events: RankEvents) -> None:
        """Starts them: `argv`, FILE (see rank_spec) and the number of the rank. Raises ProcessOver."""
        self._events = events
        self._asked_to_end: Mailbox[signal.Signals] = Mailbox()
        self._is_ending = False
        self._living = {rank: _Watched(rank, _start((*argv, str(file), str(rank)), rank)) for rank in ranks}
        self._watcher = start_thread("ranks", self._watch)

    def end(self) -> None:
        """End them all: what they hold is of no use without rank 0."""
        self._asked_to_end.put(signal.SIGKILL)
        self._watcher.join()

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for watched in self._living.values():
                selector.register(watched.child.pidfd, selectors.EVENT_READ, watched)
                selector.register(watched.child.channel_fd, selectors.EVENT_READ, watched)
            selector.register(self._asked_to_end.fileno(), selectors.EVENT_READ)
            while self._living:
                for key, _ in selector.select(_LOOK_S):
                    self._on_event(key, selector)
                for watched in self._living.values():
                    self._see_halt(watched)

    def _on_event(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        watched: _Watched | None = key.data
        if watched is None:
            self._kill_all()
        elif key.fd == watched.child.pidfd:
            selector.unregister(key.fd)
            if not watched.child.is_mute:
                selector.unregister(watched.child.channel_fd)
            self._on_end(watched)
        elif watched.rank in self._living:
            self._hear(watched)
            if watched.child.is_mute:
                selector.unregister(key.fd)

    def _see_halt(self, watched: _Watched) -> None:
        """A stopped rank holds up all others; it is told of and left alone, as a worker is."""
        is_halted = watched.child.is_stopped()
        if is_halted is not watched.is_halted:
            watched.is_halted = is_halted
            said = Halted(f"rank {watched.rank}", watched.child.pid) if is_halted else f"rank {watched.rank}: goes on"
            _log.warning("%s", said)

    def _kill_all(self) -> None:
        for number in self._asked_to_end.take_all():
            self._is_ending = True
            for watched in self._living.values():
                watched.child.signal(number)

    def _hear(self, watched: _Watched) -> None:
        was_ready = self._are_ready()
        for notice in watched.child.hear():
            match notice:
                case Progress(text):
                    self._events.says(watched.rank, text)
                case Refused(message):
                    watched.refusal = message
                case Ready():
                    watched.is_ready = True
                case _:
                    pass
        if self._are_ready() and not was_ready:
            self._events.all_ready()

    def _are_ready(self) -> bool:
        return all(watched.is_ready for watched in self._living.values())

    def _on_end(self, watched: _Watched) -> None:
        self._hear(watched)
        pid = watched.child.pid
        code = watched.child.reap()
        del self._living[watched.rank]
        if self._is_ending:
            return
        if watched.refusal is not None:
            self._events.refused(watched.rank, watched.refusal)
        else:
            self._events.ended(watched.rank, f"rank {watched.rank} (process {pid}) ended with {how_it_ended(code)}")


def _start(argv: tuple[str, ...], rank: int) -> Child:
    spec = ChildSpec(f"rank {rank}", argv, Kind.PREFILL)  # of no meaning: these are never drained
    try:
        child = Child(spec, OwnOutput(_STDERR), Welcome(None, ()))
    except OSError as error:
        raise ProcessOver(Exit.FAILED, f"rank {rank}: cannot start {argv[0]}: {error.strerror}") from None
    _log.info("rank %d: process %d", rank, child.pid)
    return child
