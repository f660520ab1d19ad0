"""When a supervisor's children are forked from a preload process, and when they are started as programs."""

import selectors
import socket
from collections.abc import Callable

from deltaserve.process.children.child import ChildSpec, Start, Started, start_program
from deltaserve.process.children.exits import how_it_ended
from deltaserve.process.children.log_file import Output
from deltaserve.process.children.preload import Preload


class Preloading:
    """The preload process of a supervisor. Without one, or after its end, every child is started as a program."""

    def __init__(
        self, spec: ChildSpec | None, selector: selectors.BaseSelector, limit_s: float, say: Callable[[str], None]
    ) -> None:
        """`limit_s`: it must have loaded so long after its start."""
        self._spec = spec
        self._selector = selector
        self._limit_s = limit_s
        self._say = say
        self._preload: Preload | None = None
        self.overdue_at: float | None = None

    def begin(self, log: Output, now: float) -> None:
        """Start it, where there is to be one."""
        if self._spec is None:
            log.close()
            return
        try:
            self._preload = Preload(self._spec, log)
        except OSError:
            return  # the first worker meets the same, and says so
        self._selector.register(self._preload.pidfd, selectors.EVENT_READ)
        self._selector.register(self._preload.channel_fd, selectors.EVENT_READ)
        self.overdue_at = now + self._limit_s

    def look(self, now: float) -> None:
        """Hear it, and see its end."""
        preload = self._preload
        if preload is None:
            return
        preload.hear()
        if preload.is_ready:
            self.overdue_at = None
        if preload.has_ended() or (self.overdue_at is not None and now >= self.overdue_at):
            self._say(f"ended with {how_it_ended(self.end())}: workers load by themselves from now on")

    def may_start(self, spec: ChildSpec) -> bool:
        """Whether the child need not wait until everything is loaded."""
        return self._preload is None or self._preload.is_ready or not spec.may_be_forked

    def start_of(self, spec: ChildSpec) -> Start:
        """How to start the child now."""
        return self._fork if self._preload is not None and spec.may_be_forked else start_program

    def end(self) -> int:
        """End it; what it was forked for goes on. Its exit code."""
        preload, self._preload, self.overdue_at = self._preload, None, None
        if preload is None:
            return 0
        self._selector.unregister(preload.pidfd)
        self._selector.unregister(preload.channel_fd)
        return preload.end()

    def _fork(self, spec: ChildSpec, output: int, channel: socket.socket) -> Started:
        assert self._preload is not None
        try:
            return self._preload.fork(spec, output, channel)
        except OSError as error:
            self.end()
            self._say(f"{error.strerror}: workers load by themselves from now on")
            return start_program(spec, output, channel)
