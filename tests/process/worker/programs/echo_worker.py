"""A worker whose control plane answers each Submit with the last prompt token, plus one, over real threads and links.

The name of its model folder says what goes wrong, if anything.
"""

import errno
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from deltaserve.control.engine.api import Action, DrainRequested, Event
from deltaserve.control.peer.link import FrameIn, PeerDied, SendFrame
from deltaserve.control.sched.executor import Executor
from deltaserve.control.sched.plan import (
    ItemResult,
    PlanItem,
    RowOpen,
    Sampled,
    StepPlan,
    StepResult,
    TokenValues,
    WorkList,
)
from deltaserve.control.transfer.commands import FencePeer, PeerFenced, TransferCommand, TransferReport
from deltaserve.control.transfer.plane_turns import DataPlane
from deltaserve.core.errors import ConfigError, IntegrityError
from deltaserve.core.ids import Boot, PeerName, Role, RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import Envelope, Finished, FinishReason, Message, Submit, TokenRun, Tokens, Usage
from deltaserve.process.children import exits
from deltaserve.process.links.block_link import BlockPublisher
from deltaserve.process.worker.rank_group import GroupExecutor, RankProcesses
from deltaserve.process.worker.worker_process import WorkerParts, run_worker
from deltaserve.process.worker.worker_spec import WorkerSpec

_ROW = RowId(0)


class EchoInstance:
    """A queue of Submits, computed one per step. A dead peer is fenced, then reported to the last front."""

    def __init__(self, name: str, boot: Boot, folder: str) -> None:
        self._name = name
        self._boot = boot
        self._folder = folder
        self._waiting: deque[Envelope] = deque()
        self._running: Envelope | None = None
        self._front = PeerName("front")
        self._num_steps = 0
        self._num_fenced = 0
        self._out: list[Action] = []

    def handle(self, event: Event, now: float) -> None:
        match event:
            case FrameIn(envelope):
                self._on_frame(envelope)
            case PeerDied(peer):
                self._out.append(FencePeer(peer))
            case PeerFenced(peer):
                self._num_fenced += 1
                self._tell(Finished(room=peer.encode(), epoch=1, usage=_usage(), message="fenced"))
            case DrainRequested() | _:
                pass

    def turn(self, now: float) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _on_frame(self, envelope: Envelope) -> None:
        self._front = PeerName(envelope.src)
        if self._folder == "loop-dies":
            raise RuntimeError("the loop meets something unforeseen")
        if self._folder == "loop-stops":
            time.sleep(3600)
        if self._folder == "transfer-dies":
            self._out.append(FencePeer(self._front))
        if isinstance(envelope.body, Submit):
            self._waiting.append(envelope)

    def _tell(self, body: Message) -> None:
        envelope = Envelope(src=self._name, src_boot=self._boot, dst_boot=None, body=body)
        self._out.append(SendFrame(self._front, envelope))

    def tick(self, now: float) -> None:
        pass

    def next_timer(self) -> float | None:
        return None

    def plan(self, now: float) -> StepPlan | None:
        if not self._waiting or self._running is not None:
            return None
        self._running = self._waiting.popleft()
        submit = self._running.body
        assert isinstance(submit, Submit)
        self._num_steps += 1
        return StepPlan(
            step=StepIndex(self._num_steps),
            opens=(RowOpen(_ROW, SamplingParams(max_tokens=1, seed=0), submit.prompt, len(submit.prompt) // 4),),
            items=(PlanItem(_ROW, 0, len(submit.prompt) // 4, TokenValues(submit.prompt), samples=True),),
            work=WorkList(256),
        )

    def commit(self, result: StepResult, now: float) -> None:
        assert self._running is not None
        submit, self._running = self._running.body, None
        assert isinstance(submit, Submit)
        (sampled,) = result.items[0].drawn
        run = TokenRun(room=submit.room, epoch=submit.epoch, start=0, tokens=pack_u32([sampled.token]))
        end = Finished(room=submit.room, epoch=submit.epoch, usage=_usage(), finish=FinishReason.LENGTH)
        self._tell(Tokens(runs=(run,)))
        self._tell(end)

    def leaves_cores(self) -> bool:
        return False

    def transfer_active(self) -> bool:
        return False

    def is_drained(self) -> bool:
        return not self._waiting and self._running is None

    @property
    def role(self) -> Role:
        return Role.DECODE

    def misfits(self) -> dict[PeerName, str]:
        return {PeerName("prefill-9"): "page_size: ours 16, theirs 64"} if self._folder == "peer-misfits" else {}

    def may_hand_over(self) -> bool:
        return False

    def successor(self, boot: Boot) -> "EchoInstance":
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        stuck = {'deltaserve_pages{pool="0",state="quarantined"}': 2.0, "deltaserve_quarantine_age_seconds": 61.0}
        return (stuck if self._folder == "quarantine-stays" else {}) | {
            "echo_fenced_total": float(self._num_fenced),
            'echo_rooms{state="waiting"}': float(len(self._waiting)),
        }

    def check_integrity(self) -> None:
        if self._folder == "books-disagree":
            raise IntegrityError("one page too many")


def _usage() -> Usage:
    return Usage(prompt_len=0, output_len=0)


class EchoExecutor:
    """Last token + 1."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def execute(self, plan: StepPlan) -> StepResult:
        if self._folder == "step-dies":
            raise RuntimeError("the device is lost")
        if self._folder == "step-hangs":
            print("the step hangs", file=sys.stderr, flush=True)
            time.sleep(3600)
        if self._folder == "step-is-slow":
            time.sleep(0.5)
        inputs = plan.items[0].inputs
        assert isinstance(inputs, TokenValues)
        return StepResult(plan.step, (ItemResult(_ROW, (Sampled(unpack_u32(inputs.tokens)[-1] + 1),)),), seconds=0.001)


class EchoPlane:
    """Fences whatever it is told to; there is nothing to move."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        if self._folder == "transfer-dies":
            raise RuntimeError("the transport is gone")
        return [PeerFenced(command.peer, FenceResult.CLOSED)] if isinstance(command, FencePeer) else []

    def poll(self, now: float) -> list[TransferReport]:
        return []

    def is_idle(self) -> bool:
        return True

    def expect(self, is_active: bool, now: float) -> None:
        pass

    def close(self) -> None:
        print("transport closed", file=sys.stderr)


def build(spec: WorkerSpec, boot: Boot, progress: Callable[[str], None], ranks: RankProcesses | None) -> WorkerParts:
    folder = spec.model_path
    if folder == "not-a-model":
        raise ConfigError("config.json: not found\nin the model folder")
    progress("clearing its throat")
    if folder == "end-hangs":
        exits._END_CHECKS = 1
        BlockPublisher.stop = lambda _: threading.Event().wait()  # type: ignore[assignment,method-assign]

    def open_plane() -> DataPlane:
        if folder == "transport-refuses":
            raise ConfigError("no such network device")
        if folder == "transport-lacks-files":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return EchoPlane(folder)

    own: Executor = EchoExecutor(folder)
    executor = own if ranks is None else GroupExecutor(own, ranks.steps, spec.step_stuck_after_s)
    return WorkerParts(EchoInstance(spec.name, boot, folder), executor, open_plane)


if __name__ == "__main__":
    run_worker(sys.argv, build, (sys.executable, str(Path(__file__).with_name("echo_rank.py"))))
