"""A FrontCore among workers that exist only as frames: the tests play the workers."""

from collections.abc import Callable, Iterable

import msgspec

from deltaserve.control.front.client import Generation, OutputDelta
from deltaserve.control.front.events import Deliver, Fail, FrontAction, FrontConfig, Member, WorkerLeaves, WorkerUp
from deltaserve.control.front.front_core import FrontCore
from deltaserve.control.peer.link import FrameIn, LinkBroken, PeerDied, SendFrame
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Boot, Namespace, PeerName, Role, Room
from deltaserve.core.keys import seed_check
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import (
    Cancel,
    Envelope,
    Facts,
    Finish,
    Finished,
    FinishReason,
    Hello,
    Message,
    Status,
    Submit,
    TokenRun,
    Tokens,
    Usage,
)

FRONT_BOOT = Boot(1)
SECRET, FINGERPRINT, PAGE_SIZE = b"secret", "model", 4
COMPAT = {"fingerprint": FINGERPRINT, "dtype": "float32"}


def facts(pool_pages: int = 1000, page_size: int = PAGE_SIZE) -> Facts:
    return Facts(
        page_size=page_size,
        pool_pages=(pool_pages,),
        max_context_len=2048,
        max_running=16,
        vocab_size=500,
        keys_seed_check=seed_check(SECRET, FINGERPRINT),
    )


def other_facts(fingerprint: str) -> Facts:
    """Facts of a worker with another model."""
    return msgspec.structs.replace(facts(), keys_seed_check=seed_check(SECRET, fingerprint))


def status(waiting_tokens: int = 0, *, draining: bool = False, ready: bool = True) -> Status:
    return Status(
        num_waiting=0,
        waiting_tokens=waiting_tokens,
        num_running=0,
        free_pages=(1000,),
        evictable_pages=(0,),
        quarantined_pages=(0,),
        num_pages=(1000,),
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        draining=draining,
        ready=ready,
    )


def generation(
    number: int,
    *,
    prompt_len: int = 40,
    max_tokens: int = 8,
    deadline_s: float = 60.0,
    prompt_logprobs: int | None = None,
    first_token: int = 0,
) -> Generation:
    return Generation(
        room=room(number),
        prompt=pack_u32(range(first_token, first_token + prompt_len)),
        namespace=Namespace("tenant"),
        sampling=SamplingParams(max_tokens=max_tokens, seed=number, prompt_logprobs=prompt_logprobs),
        deadline_s=deadline_s,
    )


def room(number: int) -> Room:
    return Room(number.to_bytes(16, "big"))


def member(name: str) -> Member:
    return Member(PeerName(name), role_of(name), f"tcp://127.0.0.1/{name}")


def member_somewhere(name: str) -> Member:
    """Where is to be said by WorkerUp."""
    return Member(PeerName(name), role_of(name), None)


def role_of(name: str) -> Role:
    return Role(name.split("-")[0])


class Cluster:
    """Time stands where `now` says. Every action of the front is kept in `actions`, and checked for lone ends."""

    def __init__(
        self,
        names: Iterable[str] = ("prefill-0", "decode-0"),
        describe: Callable[[str], Member] = member,
        **settings: object,
    ) -> None:
        config = FrontConfig(
            name=PeerName("front"),
            boot=FRONT_BOOT,
            workers=tuple(describe(name) for name in names),
            cluster_secret=SECRET,
            kv_bytes_per_token=1e5,
            **settings,  # type: ignore[arg-type]
        )
        self.now = 0.0
        self.boots = {PeerName(name): Boot(100 + i) for i, name in enumerate(names)}
        self.front = FrontCore(config)
        self.actions: list[FrontAction] = []
        self.deltas: dict[Room, list[OutputDelta]] = {}
        self.ends: dict[Room, OutputDelta | RequestFailed] = {}
        self._take(self.front.start(self.now))

    # ------------------------------------------------------------ the workers' part

    def all_ready(self) -> "Cluster":
        for name in self.boots:
            self.hello(name)
        return self

    def hello(self, name: str, compat: dict[str, str] | None = None, its_facts: Facts | None = None) -> None:
        role = role_of(name)
        self.say(name, Hello(role=role.value, compat=compat or COMPAT, facts=its_facts or facts()))

    def say(self, name: str, message: Message, dst_boot: Boot | None = FRONT_BOOT) -> None:
        boot = self.boots.get(PeerName(name), Boot(666))
        self.hear(Envelope(src=name, src_boot=boot, dst_boot=dst_boot, body=message))

    def hear(self, envelope: Envelope) -> None:
        self._take(self.front.handle(FrameIn(envelope), self.now))

    def reboot(self, name: str) -> None:
        """The process is another one, which took its time to start."""
        self.now += 1.0
        self.boots[PeerName(name)] = Boot(self.boots[PeerName(name)] + 1000)

    def die(self, name: str) -> None:
        self._take(self.front.handle(PeerDied(PeerName(name)), self.now))

    def broken(self, name: str) -> None:
        self._take(self.front.handle(LinkBroken(PeerName(name)), self.now))

    def up(self, worker: Member) -> None:
        self._take(self.front.handle(WorkerUp(worker), self.now))

    def leave(self, name: str, grace_s: float = 30.0) -> None:
        self._take(self.front.handle(WorkerLeaves(PeerName(name), grace_s), self.now))

    def tokens(self, name: str, number: int, start: int, values: Iterable[int]) -> None:
        run = TokenRun(room=room(number), epoch=self.epoch(number), start=start, tokens=pack_u32(values))
        self.say(name, Tokens(runs=(run,)))

    def finished(self, name: str, number: int, output_len: int = 0) -> None:
        usage = Usage(prompt_len=40, output_len=output_len)
        ended = Finished(room=room(number), epoch=self.epoch(number), usage=usage, finish=FinishReason.LENGTH)
        self.say(name, ended)

    def failed(self, name: str, number: int, reason: FailReason, *, retryable: bool = False) -> None:
        usage = Usage(prompt_len=40, output_len=0)
        ended = Finished(
            room=room(number),
            epoch=self.epoch(number),
            usage=usage,
            reason=reason,
            message="went wrong",
            retryable=retryable,
        )
        self.say(name, ended)

    def epoch(self, number: int) -> int:
        """Epoch of the room's last Submit, which a worker answers."""
        live = self.front.rooms.get(room(number))
        return 1 if live is None else live.epoch

    # ------------------------------------------------------------ the client's part

    def submit(self, number: int, sample: Generation | None = None) -> Submit:
        """Submit a sample; returns the one Submit that went out."""
        submits = self.ask(number, sample)
        assert len(submits) == 1
        return submits[0]

    def ask(self, number: int, sample: Generation | None = None) -> list[Submit]:
        """Submit a sample; returns the Submits that went out: none when it is held until a worker is back."""
        before = len(self.actions)
        self._take(self.front.submit(sample or generation(number), self.now))
        return [action.envelope.body for action in self.sent(before) if isinstance(action.envelope.body, Submit)]

    def cancel(self, number: int, reason: FailReason = FailReason.CANCELLED) -> None:
        self._take(self.front.cancel(room(number), reason, self.now))

    def finish(self, number: int, output_len: int) -> None:
        self._take(self.front.finish(room(number), output_len))

    def run_until(self, when: float, heartbeats_of: Iterable[str] = ()) -> None:
        """Serve all timers up to `when`; the named workers report every 0.25 s."""
        names = list(heartbeats_of)
        next_report = self.now
        while self.now < when:
            self.now = min(when, max(self.now, min(self.front.next_timer(), next_report)))
            if self.now >= next_report:
                next_report += 0.25
                for name in names:
                    self.say(name, status())
            if self.now >= self.front.next_timer():
                self.tick()

    def tick(self) -> None:
        self._take(self.front.tick(self.now))

    # ------------------------------------------------------------ what happened

    def sent(self, since: int = 0, to: str | None = None) -> list[SendFrame]:
        frames = [action for action in self.actions[since:] if isinstance(action, SendFrame)]
        return [frame for frame in frames if to is None or frame.peer == to]

    def messages(self, to: str, kind: type[Message], since: int = 0) -> list[Message]:
        return [f.envelope.body for f in self.sent(since, to) if isinstance(f.envelope.body, kind)]

    def submits(self, to: str, since: int = 0) -> list[Submit]:
        return [m for m in self.messages(to, Submit, since) if isinstance(m, Submit)]

    def cancels(self, to: str, since: int = 0) -> list[Cancel]:
        return [m for m in self.messages(to, Cancel, since) if isinstance(m, Cancel)]

    def finishes(self, to: str) -> list[Finish]:
        return [m for m in self.messages(to, Finish) if isinstance(m, Finish)]

    def output(self, number: int) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas.get(room(number), []) for token in delta.tokens)

    def end(self, number: int) -> OutputDelta | RequestFailed | None:
        return self.ends.get(room(number))

    def failure(self, number: int) -> FailReason | None:
        end = self.end(number)
        return end.reason if isinstance(end, RequestFailed) else None

    def _take(self, actions: list[FrontAction]) -> None:
        self.actions += actions
        for action in actions:
            if isinstance(action, Deliver | Fail):
                assert action.room not in self.ends, "nothing may come after the end"
            if isinstance(action, Deliver):
                self.deltas.setdefault(action.room, []).append(action.delta)
                if action.delta.finish is not None:
                    self.ends[action.room] = action.delta
            elif isinstance(action, Fail):
                self.ends[action.room] = action.error
        self.front.check_integrity()
