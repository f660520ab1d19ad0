"""What a supervisor has to say to its user. Frozen data; `str()` of each is one line or a few."""

import signal
from dataclasses import dataclass

from deltaserve.process.children.exits import how_it_ended

_BY_FORCE = " (somebody's kill -9, or the kernel's for want of memory: dmesg says)"


@dataclass(frozen=True, slots=True)
class ChildStarts:
    name: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name}: starting, process {self.pid}"


@dataclass(frozen=True, slots=True)
class Says:
    """A child tells what takes time while it starts, or what goes wrong."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, slots=True)
class IsReady:
    name: str
    url: str

    def __str__(self) -> str:
        return f"{self.name}: ready at {self.url}"


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every child serves: at the first start, and again after each restart."""

    def __str__(self) -> str:
        return "all processes are ready"


@dataclass(frozen=True, slots=True)
class Ended:
    """A child's process is over. `tail`: lines of its log that may say why, when nobody had asked it to end."""

    name: str
    code: int
    """Exit code as subprocess has it: negative for a signal."""
    tail: tuple[str, ...] = ()
    killed_because: str | None = None
    """Why the supervisor has killed it; None: it has not."""

    def __str__(self) -> str:
        hint = self._by_force() if self.code == -signal.SIGKILL else ""
        return "\n    ".join([f"{self.name}: ended with {how_it_ended(self.code)}{hint}", *self.tail])

    def _by_force(self) -> str:
        if self.killed_because is not None:
            return f" (the supervisor's: {self.killed_because})"
        return "" if self.tail else _BY_FORCE


@dataclass(frozen=True, slots=True)
class Halted:
    """A child's process is stopped: it neither works nor ends."""

    name: str
    pid: int

    def __str__(self) -> str:
        rest = f"`kill -CONT {self.pid}` lets it go on, `kill -KILL {self.pid}` has it replaced"
        return f"{self.name}: process {self.pid} is stopped, by a signal or a debugger; {rest}"


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The server ends: the reason in one line."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Stopping:
    """The user asked to end; children drain."""

    grace_s: float
    """How long the children may drain, in seconds."""

    def __str__(self) -> str:
        return f"stopping: requests in flight may end within {self.grace_s:g} s (again: at once)"


ChildEvent = ChildStarts | Says | IsReady | AllReady | Ended | Halted | GivenUp | Stopping
