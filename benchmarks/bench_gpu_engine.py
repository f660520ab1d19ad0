"""A unified worker's control plane and executor in this process, driven as its loop drives them, and a front that
neither tokenizes nor speaks HTTP: what is left of a server's time without the rest of the server.

Frames are encoded as for the wire, and dropped. With a device that computes beside the host, two CUDA events stand
around every launch: their distance is a step's time on the stream, beside it stands what the host spends in `launch`.
"""

import select
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.bench_gpu_loads import Ask
from deltaserve.control.engine.driver import ComputeStep, Driver, Heard, Rest
from deltaserve.control.engine.step_pace import EagerPace, StepPace
from deltaserve.control.peer.link import FrameIn, SendFrame
from deltaserve.control.sched.executor import Executor, LaunchedStep, Launcher
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.core.errors import DeltaserveError
from deltaserve.core.ids import Boot, Namespace, PeerName, Role
from deltaserve.core.keys import extend_keys, seed_check, seed_key
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.codec import encode
from deltaserve.core.wire.messages import Envelope, Facts, Finished, Heartbeat, Hello, Message, Submit, Tokens
from deltaserve.launch.compose import worker_spec
from deltaserve.launch.serve import prepare
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.build import build_worker
from deltaserve.process.worker.launch_thread import LaunchThread
from deltaserve.process.worker.step_thread import StepThread
from deltaserve.process.worker.transfer_thread import Reports
from deltaserve.process.worker.worker_spec import read_secret
from deltaserve.settings.config import (
    DisaggregationSettings,
    MemorySettings,
    ModelSettings,
    SchedulingSettings,
    Settings,
)
from deltaserve.settings.resolve import Device

_BOOT, _FRONT_BOOT = Boot(2), 1
_FRONT = "front"
_HEARTBEAT_S = 1.0
_MOST_WAIT_S = 0.2
_STOP_WAIT_S = 10.0
_REMAINING_MS = 600_000
TEMPERATURE = 0.6
_USUAL = SchedulingSettings()


class EngineFailed(DeltaserveError):
    """A request of the benchmark was not answered as asked."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step. Seconds."""

    num_items: int
    is_decode: bool
    stream_s: float | None
    """Time on the device, from the launch or the end of the step before; None: it computes in the host's time."""
    host_s: float
    """Time in `launch`, or in `execute`."""
    ended_at: float


@dataclass(slots=True)
class StepTimes:
    """Steps of a load, as they ended."""

    steps: list[StepTime] = field(default_factory=list)

    def add(self, step: StepTime) -> None:
        self.steps.append(step)

    def medians_ms(self) -> dict[str, float]:
        """Medians in milliseconds: of the steps that only decode, and had as many rows as most of them."""
        decoding = [step for step in self.steps if step.is_decode]
        if len(decoding) < 3:
            return {}
        rows = statistics.mode(step.num_items for step in decoding)
        full = [step for step in decoding if step.num_items == rows]
        stream = [step.stream_s for step in full if step.stream_s is not None]
        pairs = zip(self.steps, self.steps[1:], strict=False)
        apart = [b.ended_at - a.ended_at for a, b in pairs if b.is_decode and a.num_items == b.num_items == rows]
        found = {"rows": float(rows), "host in launch": 1e3 * statistics.median(step.host_s for step in full)}
        if stream:
            found["on the stream"] = 1e3 * statistics.median(stream)
        if apart:
            found["from step to step"] = 1e3 * statistics.median(apart)
        return found


def kind_of(plan: StepPlan) -> tuple[int, bool]:
    """Items, and whether all of them decode."""
    return len(plan.items), not plan.num_extended


class _TimedStep:
    """A launched step between two events."""

    def __init__(self, step: LaunchedStep, plan: StepPlan, begin: torch.cuda.Event, host_s: float, to: StepTimes):
        self._step, self._plan, self._begin, self._host_s, self._to = step, plan, begin, host_s, to
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end.record()

    def wait(self) -> StepResult:
        result = self._step.wait()
        self._end.synchronize()
        stream_s = self._begin.elapsed_time(self._end) / 1e3
        self._to.add(StepTime(*kind_of(self._plan), stream_s, self._host_s, time.perf_counter()))
        return result


class _TimedLauncher:
    """A Launcher whose steps are timed."""

    def __init__(self, launcher: Launcher, to: StepTimes) -> None:
        self._launcher, self._to = launcher, to

    def launch(self, plan: StepPlan) -> LaunchedStep:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        began = time.perf_counter()
        step = self._launcher.launch(plan)
        return _TimedStep(step, plan, begin, time.perf_counter() - began, self._to)


@dataclass(slots=True)
class Answer:
    """An answer as it comes. Seconds after its request was made."""

    asked_at: float
    output_len: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    is_over: bool = False

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.output_len < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_len - 1)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a load."""

    answers: tuple[Answer, ...]
    seconds: float
    steps: StepTimes

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.output_len for answer in self.answers) / self.seconds

    @property
    def ttft_s(self) -> float:
        return statistics.median(answer.first_s for answer in self.answers if answer.first_s is not None)

    @property
    def tpot_s(self) -> float:
        return statistics.median(answer.tpot_s for answer in self.answers if answer.tpot_s is not None)


class OwnEngine:
    """The worker. Close it."""

    def __init__(
        self,
        model: Path,
        device: Device,
        context_len: int,
        scratch: Path,
        say: Callable[[str], None],
        scheduling: SchedulingSettings = _USUAL,
    ) -> None:
        secret = scratch / "secret"
        secret.touch(mode=0o600)
        secret.write_text("benchmark " * 5)
        settings = _settings(model, device, context_len, scheduling)
        prepared = prepare(settings)
        resolved = prepared.resolved[Role.UNIFIED]
        spec = worker_spec("unified-0", Role.UNIFIED, settings, prepared.checkpoint, resolved, secret)
        parts = build_worker(spec, _BOOT, say, None)
        fingerprint = prepared.checkpoint.fingerprint
        self._page_size = spec.page_size
        self._seed = seed_key(read_secret(spec), fingerprint, spec.page_size, Namespace(""))
        self._steps = StepTimes()
        self._answers: Mailbox[StepResult | Reports] = Mailbox()
        self._step = self._step_thread(parts.executor, parts.launcher)
        pace = StepPace() if parts.launcher is None else EagerPace()
        self._driver = Driver(parts.instance, _BOOT, pace, lambda boot: Boot(boot + 1))
        self._rooms: dict[bytes, Answer] = {}
        self._num_rooms = 0
        self._next_beat = 0.0
        facts = Facts(keys_seed_check=seed_check(read_secret(spec), fingerprint))
        self._heard: list[Heard] = [_frame(Hello(role=Role.FRONT.value, compat={}, facts=facts), None)]

    def close(self) -> None:
        self._step.stop(_STOP_WAIT_S)

    def serve(self, asks: Sequence[Ask]) -> Served:
        """All of them at once, to the last token. Raises EngineFailed."""
        self._steps.steps = []
        began = time.perf_counter()
        answers = [self._submit(ask) for ask in asks]
        while self._rooms:
            self._turn()
        wrong = sum(answer.output_len != ask.output_len for answer, ask in zip(answers, asks, strict=True))
        if wrong:
            raise EngineFailed(f"{wrong} of {len(asks)} answers are not as long as asked")
        return Served(tuple(answers), time.perf_counter() - began, StepTimes(list(self._steps.steps)))

    # ------------------------------------------------------------ the worker

    def _step_thread(self, executor: Executor, launcher: Launcher | None) -> StepThread:
        if launcher is not None:
            return LaunchThread(_TimedLauncher(launcher, self._steps), self._answers)

        def compute(plan: StepPlan) -> None:
            result = executor.execute(plan)
            self._steps.add(StepTime(*kind_of(plan), None, result.seconds, time.perf_counter()))
            self._answers.put(result)

        return StepThread(compute)

    def _turn(self) -> None:
        now = time.monotonic()
        due = self._driver.next_turn_at(now)
        wait_s = _MOST_WAIT_S if due is None else min(_MOST_WAIT_S, max(0.0, due - now))
        if not self._heard:
            select.select([self._answers.fileno()], [], [], wait_s)
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _HEARTBEAT_S
            self._heard.append(_frame(Heartbeat(), _BOOT))
        for answer in self._answers.take_all():
            if isinstance(answer, StepResult):
                self._heard.append(answer)
        heard, self._heard = self._heard, []
        for action in self._driver.turn(heard, now):
            match action:
                case ComputeStep(plan):
                    self._step.submit(plan)
                case Rest():
                    self._step.rest()
                case SendFrame(_, envelope):
                    encode(envelope)
                    self._take(envelope.body)
                case _:  # transfers: there is no other worker
                    pass

    # ------------------------------------------------------------ the front

    def _submit(self, ask: Ask) -> Answer:
        self._num_rooms += 1
        room, prompt = self._num_rooms.to_bytes(16, "little"), pack_u32(ask.prompt)
        submit = Submit(
            room=room,
            epoch=1,
            prompt=prompt,
            prompt_len=len(ask.prompt),
            keys=extend_keys(self._seed, prompt, self._page_size),
            namespace="",
            sampling=SamplingParams(max_tokens=ask.output_len, seed=self._num_rooms, temperature=TEMPERATURE),
            prefill=None,
            remaining_ms=_REMAINING_MS,
        )
        self._heard.append(_frame(submit, _BOOT))
        self._rooms[room] = Answer(time.perf_counter())
        return self._rooms[room]

    def _take(self, message: Message) -> None:
        match message:
            case Tokens(runs=runs, next=more):
                for run in runs:
                    self._take_tokens(run.room, run.start + len(run.tokens) // 4)
                if more is not None:
                    for place in more.places:
                        self._take_tokens(place.room, place.start + more.ahead + 1)
            case Finished() as over:
                answer = self._rooms.pop(over.room)
                if over.finish is None:
                    raise EngineFailed(f"a request failed: {over.reason}: {over.message}")
                answer.is_over = True

    def _take_tokens(self, room: bytes, output_len: int) -> None:
        answer = self._rooms[room]
        answer.last_s = time.perf_counter() - answer.asked_at
        if answer.first_s is None:
            answer.first_s = answer.last_s
        answer.output_len = output_len


def _frame(body: Message, to: Boot | None) -> FrameIn:
    return FrameIn(Envelope(src=PeerName(_FRONT), src_boot=_FRONT_BOOT, dst_boot=to, body=body))


def _settings(model: Path, device: Device, context_len: int, scheduling: SchedulingSettings) -> Settings:
    return Settings(
        model=ModelSettings(model_path=str(model), device=device, context_length=context_len),
        memory=MemorySettings(mem_fraction_static=0.8 if device == "cuda" else 0.1),
        disaggregation=DisaggregationSettings(disaggregation_mode="null"),
        scheduling=scheduling,
    )
