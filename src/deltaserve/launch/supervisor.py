"""Keeps the processes of a server running, and ends them together. One thread, no torch, no model.

A death is told to all other children at once; the child is started again with a growing delay, until it ended too
often or does not become ready: then the whole server ends with the reason. The supervisor's own death ends the children
(the kernel does it). On a stop signal children drain in the order front, decode, prefill; what is left after its grace
is killed.
"""

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from deltaserve.launch.kept_files import KeptFiles
from deltaserve.launch.preloading import Preloading
from deltaserve.launch.restarts import GiveUp, RestartPolicy, Restarts
from deltaserve.process.children.child import Child, ChildSpec, Kind
from deltaserve.process.children.child_events import (
    AllReady,
    ChildEvent,
    ChildStarts,
    Ended,
    GivenUp,
    Halted,
    IsReady,
    Says,
    Stopping,
)
from deltaserve.process.children.exits import Exit
from deltaserve.process.children.interrupts import stop_signals
from deltaserve.process.children.log_file import LogFile, Output, OwnOutput, telling
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.children.notices import (
    PeerDown,
    PeerHalted,
    PeerUp,
    Progress,
    Ready,
    Rebooted,
    Refused,
    ToChild,
    Welcome,
)

_TAIL_LINES = 20
"""Last lines of a child's output that are shown when it ends unexpectedly."""


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """Limits of a supervisor; times in seconds."""

    log_dir: Path | None
    """Folder of the children's output, `<name>.log`. Must exist; keep it private (0700). None: they share stdout."""
    grace_s: float = 30.0
    """Time that the front gets to drain, as the children know it; each kind of worker gets what is left of it, but at
    least `worker_grace_s`."""
    last_words_s: float = 5.0
    """Time that a child gets to end when its own grace is over."""
    worker_grace_s: float = 3.0
    hurried_s: float = 2.0
    """Time that every child gets to end after a second request to stop, or when another of its group has ended."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    max_log_bytes: int = 32 << 20
    """Most bytes of one child's log; as much again of what it wrote before is kept beside it."""
    look_s: float = 10.0
    """How often the sizes of logs are looked at, and whether a child is stopped."""


@dataclass(slots=True)
class _Supervised:
    """A child over all its starts."""

    spec: ChildSpec
    starts: Restarts
    child: Child | None = None
    url: str | None = None
    """Where it listened last; kept over restarts."""
    boot: int = 0
    is_ready: bool = False
    was_ready: bool = False
    is_halted: bool = False
    refusal: str | None = None
    restart_at: float | None = None
    kill_at: float | None = None
    why_kill: str = ""
    """Why it is to be killed at `kill_at`."""
    killed_because: str | None = None
    """Why the supervisor has killed this start; None: it has not."""


class Supervisor:
    """Runs `children` until they are told to stop or one cannot be kept alive."""

    def __init__(
        self,
        children: Sequence[ChildSpec],
        options: SupervisorOptions,
        on_event: Callable[[ChildEvent], None],
        preload: ChildSpec | None = None,
    ) -> None:
        """`on_event` hears of everything a user may want to see, from within `run`. `preload`: a process to fork those
        children from that may be; it is restarted never."""
        if len({spec.name for spec in children}) != len(children):
            raise ValueError("two children of one name")
        self._options = options
        self._say = on_event
        self._watched = {spec.name: _Supervised(spec, Restarts(options.restarts)) for spec in children}
        self._files = KeptFiles({path for spec in children for path in spec.files})
        self._selector = selectors.DefaultSelector()
        self._preloading = Preloading(
            preload, self._selector, options.restarts.start_timeout_s, lambda text: on_event(Says("preload", text))
        )
        self._stops: Mailbox[signal.Signals] = Mailbox()
        self._exit = Exit.OK
        self._next_look = 0.0
        self._stop_deadline: float | None = None
        """Set when stopping: the end of the common grace."""
        self._stopping_kind: Kind | None = None

    # ------------------------------------------------------------ the loop

    def run(self) -> Exit:
        """Do what `keep` does until a stop signal. Call it in the main thread; returns the exit code."""
        old = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        self._stops.wake_on_signals()
        try:
            return self.keep()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in old.items():
                signal.signal(number, handler)

    def keep(self) -> Exit:
        """Start all children, keep them running, end them after `stop`. Returns the exit code.

        The children end with the thread that calls it, as the kernel sees to it.
        """
        self._selector.register(self._stops.fileno(), selectors.EVENT_READ)
        try:
            now = time.monotonic()
            self._preloading.begin(self._open_log("preload"), now)
            for watched in self._watched.values():
                watched.restart_at = now
            while any(watched.child or watched.restart_at is not None for watched in self._watched.values()):
                self._turn()
        finally:
            self._kill_all()
            self._preloading.end()
            self._selector.close()
        return self._exit

    def stop(self) -> None:
        """Drain and end, as on SIGTERM. A second call ends at once. Callable from any thread."""
        self._stops.put(signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops.put(signal.Signals(number))

    def _turn(self) -> None:
        self._selector.select(self._wait_s(time.monotonic()))
        for _ in self._stops.take_all():
            self._on_stop(time.monotonic())
        self._preloading.look(time.monotonic())
        for watched in self._watched.values():
            if watched.child is not None:
                self._hear(watched, watched.child)
                self._see_death(watched, watched.child, time.monotonic())
        now = time.monotonic()
        for watched in self._watched.values():
            if watched.restart_at is not None and now >= watched.restart_at and self._may_start(watched):
                self._start_group(self._group_of(watched))
            if watched.child is not None and watched.kill_at is not None and now >= watched.kill_at:
                watched.kill_at = None
                self._kill(watched, watched.child, watched.why_kill)
            if watched.starts.take_overdue(now) and self._stop_deadline is None:
                self._on_overdue(watched, now)
        self._stop_next(now)
        self._look_after_children(now)

    def _look_after_children(self, now: float) -> None:
        if now < self._next_look:
            return
        self._next_look = now + self._options.look_s
        for watched in self._watched.values():
            if watched.child is not None:
                watched.child.log.rotate(self._options.max_log_bytes)
                self._see_halt(watched, watched.child)

    def _see_halt(self, watched: _Supervised, child: Child) -> None:
        """A stopped process is told of and left alone: whoever stopped it, with a debugger perhaps, wants it so."""
        is_halted = child.is_stopped()
        if is_halted is watched.is_halted:
            return
        watched.is_halted = is_halted
        self._say(Halted(watched.spec.name, child.pid) if is_halted else Says(watched.spec.name, "goes on"))
        self._tell_others(watched.spec.name, PeerHalted(watched.spec.name, child.pid if is_halted else None))

    def _wait_s(self, now: float) -> float:
        times = [self._next_look]
        due = [w for w in self._watched.values() if w.restart_at is not None and self._may_start(w)]
        times += [w.restart_at for w in due if w.restart_at is not None]
        times += [w.starts.overdue_at for w in self._watched.values() if w.starts.overdue_at is not None]
        times += [w.kill_at for w in self._watched.values() if w.kill_at is not None and w.child is not None]
        times += [at for at in (self._preloading.overdue_at,) if at is not None]
        return max(0.0, min(times) - now)

    # ------------------------------------------------------------ children

    def _start_group(self, group: Sequence[_Supervised]) -> None:
        for watched in group:
            self._start(watched)
            if watched.child is None:  # those that are left wait for its next start
                for other in group:
                    if other.child is None:
                        other.restart_at = watched.restart_at
                return

    def _start(self, watched: _Supervised) -> None:
        spec = watched.spec
        watched.restart_at, watched.refusal, watched.is_ready, watched.is_halted = None, None, False, False
        watched.killed_because = None
        welcome = Welcome(watched.url, tuple(self._ups(but=spec.name)), watched.boot)
        try:
            self._files.restore()
            log = self._open_log(spec.name)
            child = Child(spec, log, welcome, self._preloading.start_of(spec))
        except OSError as error:
            self._on_failed_start(watched, f"cannot start {spec.argv[0]}: {error.strerror}", time.monotonic())
            return
        watched.child = child
        watched.starts.began(time.monotonic())
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        self._selector.register(child.channel_fd, selectors.EVENT_READ)
        self._say(ChildStarts(spec.name, child.pid))
        if log.problem is not None:
            self._say(Says(spec.name, log.problem))

    def _on_failed_start(self, watched: _Supervised, text: str, now: float) -> None:
        """A first start that the machine refuses ends the server; a later one is repeated: others serve meanwhile."""
        if not watched.was_ready:
            self._give_up(Exit.FAILED, f"{watched.spec.name}: {text}")
            return
        self._say(Says(watched.spec.name, text))
        self._end_group(watched, now)
        watched.starts.began(now)
        self._start_later(watched, now)

    def _start_later(self, watched: _Supervised, now: float) -> None:
        """Start again after a pause, unless that was done too often."""
        try:
            watched.restart_at = now + watched.starts.ended(now)
        except GiveUp as reason:
            self._give_up(Exit.FAILED, f"{watched.spec.name} keeps ending ({reason})")

    def _open_log(self, name: str) -> Output:
        """Raises OSError where not even memory takes the place of a file."""
        folder = self._options.log_dir
        return OwnOutput() if folder is None else LogFile(folder / f"{name}.log")

    def _group_of(self, watched: _Supervised) -> list[_Supervised]:
        """Children that start and end together with this one, itself included."""
        group = watched.spec.group
        return [watched] if group is None else [w for w in self._watched.values() if w.spec.group == group]

    def _may_start(self, watched: _Supervised) -> bool:
        """Whether nobody of its group is left of the start before, and what it is forked from is loaded."""
        is_alone = all(other.child is None for other in self._group_of(watched))
        return is_alone and self._preloading.may_start(watched.spec)

    def _end_group(self, watched: _Supervised, now: float) -> None:
        """The others see by themselves that it has ended, unless they load or are stuck."""
        for other in self._group_of(watched):
            if other.child is not None and other.kill_at is None:
                other.kill_at, other.why_kill = now + self._options.hurried_s, "another of its group has ended"

    def _kill(self, watched: _Supervised, child: Child, reason: str) -> None:
        watched.killed_because = reason
        child.signal(signal.SIGKILL)

    def _ups(self, but: str) -> list[PeerUp]:
        ready = (w for w in self._watched.values() if w.is_ready and w.spec.name != but)
        return [PeerUp(w.spec.name, w.url, w.boot) for w in ready if w.url is not None]

    def _tell_others(self, name: str, notice: ToChild) -> None:
        for watched in self._watched.values():
            if watched.child is not None and watched.spec.name != name:
                watched.child.tell(notice)

    def _hear(self, watched: _Supervised, child: Child) -> None:
        if child.is_mute:
            return
        for notice in child.hear():
            match notice:
                case Progress(text):
                    self._say(Says(watched.spec.name, text))
                case Refused(message):
                    watched.refusal = message
                case Ready(url, boot):
                    self._on_ready(watched, url, boot)
                case Rebooted(boot):
                    watched.boot = boot
        if child.is_mute:
            self._selector.unregister(child.channel_fd)

    def _on_ready(self, watched: _Supervised, url: str, boot: int) -> None:
        watched.url, watched.boot, watched.is_ready, watched.was_ready = url, boot, True, True
        watched.starts.became_ready()
        self._say(IsReady(watched.spec.name, url))
        self._tell_others(watched.spec.name, PeerUp(watched.spec.name, url, boot))
        if all(w.is_ready for w in self._watched.values()):
            self._say(AllReady())

    def _on_overdue(self, watched: _Supervised, now: float) -> None:
        """A first start that hangs ends the server; a later one is repeated, since the others serve meanwhile."""
        workers = (w for w in self._watched.values() if w.spec.kind is not Kind.FRONT)
        if watched.spec.kind is Kind.FRONT and not all(worker.is_ready for worker in workers):
            watched.starts.began(now)  # it waits for them: each has a time of its own
            return
        text = f"not ready {self._options.restarts.start_timeout_s:g} s after its start"
        if not watched.was_ready:
            self._give_up(Exit.FAILED, f"{watched.spec.name}: {text}")
        elif watched.child is not None:
            self._say(Says(watched.spec.name, text))
            self._kill(watched, watched.child, "it was not ready in time")

    def _see_death(self, watched: _Supervised, child: Child, now: float) -> None:
        if not child.has_ended():
            return
        self._hear(watched, child)
        self._selector.unregister(child.pidfd)
        if not child.is_mute:
            self._selector.unregister(child.channel_fd)
        tail = child.log.tail(_TAIL_LINES)
        code = child.reap()
        watched.child, watched.is_ready, watched.kill_at = None, False, None
        self._tell_others(watched.spec.name, PeerDown(watched.spec.name))
        if self._stop_deadline is not None:
            self._say(Ended(watched.spec.name, code, killed_because=watched.killed_because))
            return
        self._say(Ended(watched.spec.name, code, telling(tail, code), watched.killed_because))
        if code == Exit.CONFIG and not watched.was_ready:
            reason = watched.refusal or (tail or ("wrong configuration",))[-1]
            self._give_up(Exit.CONFIG, f"{watched.spec.name}: {reason}")
            return
        self._end_group(watched, now)
        self._start_later(watched, now)

    # ------------------------------------------------------------ stopping

    def _give_up(self, code: Exit, reason: str) -> None:
        self._exit = code
        self._say(GivenUp(reason))
        self._begin_stop(time.monotonic())

    def _on_stop(self, now: float) -> None:
        if self._stop_deadline is None:
            self._say(Stopping(self._options.grace_s))
            self._begin_stop(now)
            return
        for watched in self._watched.values():  # the second request: no more waiting
            if watched.child is not None:
                watched.child.signal(signal.SIGTERM)
                self._kill_by(watched, now + self._options.hurried_s)

    def _begin_stop(self, now: float) -> None:
        if self._stop_deadline is not None:
            return
        self._stop_deadline = now + self._options.grace_s + self._options.last_words_s
        for watched in self._watched.values():
            watched.restart_at = None
        self._stop_next(now)

    def _stop_next(self, now: float) -> None:
        """When no child of the former kind is left, ask those of the next kind to drain."""
        living = [w for w in self._watched.values() if w.child is not None]
        if self._stop_deadline is None or not living:
            return
        kind = min(w.spec.kind for w in living)
        if kind == self._stopping_kind:
            return
        self._stopping_kind = kind
        for watched in living:
            if watched.spec.kind == kind and watched.child is not None:
                self._kill_by(watched, max(self._stop_deadline, now + self._options.worker_grace_s))
                watched.child.signal(signal.SIGTERM)

    def _kill_by(self, watched: _Supervised, at: float) -> None:
        """Its grace is over then, unless it is to end sooner."""
        if watched.kill_at is None or at < watched.kill_at:
            watched.kill_at, watched.why_kill = at, "its grace was over"

    def _kill_all(self) -> None:
        """Nothing outlives `run`, whatever ended it."""
        for watched in self._watched.values():
            if watched.child is not None:
                watched.child.signal(signal.SIGKILL)
                watched.child.reap()
                watched.child = None
