"""What becomes of a room once it is admitted: submitted to decode, told to its client, retried elsewhere, ended."""

from collections import Counter
from collections.abc import Callable

from deltaserve.control.front.balance import Choice
from deltaserve.control.front.client import OutputDelta
from deltaserve.control.front.events import Deliver, Fail, FrontAction, FrontConfig
from deltaserve.control.front.known_worker import Worker
from deltaserve.control.front.placing import Placer
from deltaserve.control.front.retry import Cause, Remedy, blame, cause_of, told, waits_for_workers
from deltaserve.control.front.room_orders import RoomOrders
from deltaserve.control.front.streams import LiveRoom, RoomEvent, Rooms, RoomState
from deltaserve.control.front.workers import Workers
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import PeerName, Role, Room
from deltaserve.core.tokens import TOKEN_BYTES, pack_u32, unpack_u32
from deltaserve.core.wire.messages import (
    Finished,
    FinishReason,
    NextTokens,
    PromptLogprobs,
    TokenRun,
    Usage,
)

_REST_S = 1.0
"""Pause before a room goes to a worker that others do not reach, or that was leaving: the front may learn of it
later."""
_AT_ONCE = frozenset({Cause.DECODE, Cause.SILENT, Cause.GAP})
"""Causes that say nothing of the workers that are left."""


class Lifecycle:
    """All rooms of one front, from their first Submit to their end. What is to be done goes to `emit`, in order."""

    def __init__(
        self,
        config: FrontConfig,
        workers: Workers,
        placer: Placer,
        rooms: Rooms,
        counts: Counter[str],
        emit: Callable[[FrontAction], None],
    ) -> None:
        self._workers = workers
        self._placer = placer
        self._rooms = rooms
        self._counts = counts
        self._emit = emit
        self._is_half = config.half is not None
        self._meet_s = config.meet_s
        self._orders = RoomOrders(workers, config.echo_s)

    # ------------------------------------------------------------ workers come and go

    def ended(self, worker: Worker, now: float) -> None:
        """A worker's life is over: nothing is left there of its rooms."""
        self._orders.forget(worker)
        self._on_gone(worker, Cause.DECODE, now)

    def unreachable(self, worker: Worker, cause: Cause, now: float) -> None:
        """A worker is not heard of: it may still have its rooms when it is back."""
        for live in self._rooms.on(worker.name):
            self._orders.later(worker, live.room)
        self._on_gone(worker, cause, now)

    def _on_gone(self, worker: Worker, cause: Cause, now: float) -> None:
        """What a lost decode worker had goes elsewhere. A lost prefill worker is decode's matter."""
        self._placer.residency.forget(worker.name)
        for live in self._rooms.on(worker.name):
            if not self.retry(live, cause, now):
                text = "the workers that computed it ended, one after the other, without a token between them"
                self._end(live, FailReason.PEER_LOST, f"{worker.name} is gone" if self._is_half else text)

    def back(self, worker: Worker, now: float) -> None:
        """The connection to it was interrupted: whatever was said in the meantime is asked for again."""
        for live in self._rooms.on(worker.name):
            self.resume(live, now)

    def see_off(self, now: float) -> None:
        """Workers that are to leave: whose grace is over gives up its rooms, whoever has none is forgotten."""
        for worker in self._workers.leaving():
            for live in self._rooms.named(worker.name):
                self._move_off(live, worker, now)
            if not self._rooms.named(worker.name):
                self._orders.forget(worker)
                self._placer.forget(worker.name)
                self._workers.forget(worker)

    def _move_off(self, live: LiveRoom, worker: Worker, now: float) -> None:
        """Have the room go on without the worker, if anybody else can take it: else it stays, and may yet end there."""
        assert live.placement is not None and worker.leaves_at is not None  # see `named` and `leaving`
        if not live.is_on(worker.name) and not live.is_computing:  # only where a lost answer would be computed again
            live.placement = self._placer.without_prefill(live.placement)
            return
        if now < worker.leaves_at or self._is_complete(live):
            return
        try:
            choice = self._placer.choose(live.sample, now)
        except RequestFailed:
            return
        self._orders.withdraw(live, FailReason.CANCELLED, now)
        self._counts[f"retried_{Cause.LEAVING.value}"] += 1
        self._unplace(live, now)
        self._place(live, choice, now)

    # ------------------------------------------------------------ one room

    def retry(self, live: LiveRoom, cause: Cause, now: float) -> bool:
        """Whether the room goes on: submitted again, waiting for a worker, or complete as it is."""
        placement = live.placement
        if self._is_complete(live):
            return True
        if self._is_half and not live.is_started:
            return False  # whoever chose the pair is told at once, and may choose another
        remedy = live.retries.next(cause, live.is_started)
        if remedy is Remedy.GIVE_UP or placement is None:
            return False
        if cause is Cause.NUMERICAL:
            live.sample = live.sample.alone()
        choice = None
        try:
            if remedy is not Remedy.LATER:
                choice = self._placer.choose_next(live.sample, placement, remedy, now)
        except RequestFailed:
            if not waits_for_workers(cause, live.is_started):
                return False  # the client is told of the failure itself
        self._counts[f"retried_{cause.value}"] += 1
        self._unplace(live, now)
        if choice is None:
            live.rests_until = now if cause in _AT_ONCE else now + _REST_S
        else:
            self._place(live, choice, now)
        return True

    def place_waiting(self, now: float) -> None:
        """Rooms between workers go where there are some again."""
        if not self._rooms.unplaced:
            return
        if self._workers.shortage() is not None:
            self._refuse_waiting(now)
            return
        for live in list(self._rooms.unplaced.values()):
            if now < live.rests_until:
                continue
            try:
                choice = self._placer.choose(live.sample, now)
            except RequestFailed:
                self._end_if_left_behind(live, now)
                continue  # whoever is there is too small for it, or of another revision
            self._place(live, choice, now)

    def _end_if_left_behind(self, live: LiveRoom, now: float) -> None:
        """What other revisions serve by now, and its own not any more, does not wait until its deadline."""
        revision = live.sample.revision
        if revision is not None and not self._workers.may_serve(revision, now):
            text = (
                f"it began on revision {revision} of the model, whose workers have left: another would go on otherwise"
            )
            self._end(live, FailReason.NO_PEER, text)

    def end_unmet(self, now: float) -> None:
        """What has not begun, and names a prefill worker that does not answer, fails."""
        gone: list[Worker] = []
        for live in list(self._rooms.unplaced.values()):
            named, since = live.sample.generation.prefill, live.unplaced_since
            if named is None or since is None or now < since + self._meet_s:
                continue
            worker = self._workers.get(PeerName(named.name))
            problem = f"{named.name}: unknown" if worker is None else self._workers.problem_of(worker)
            if problem is not None:
                self._end(live, FailReason.NO_PEER, problem)
                gone += [] if worker is None else [worker]
        for worker in gone:
            self._workers.leave(worker, 0.0, now)  # it is dialled anew for the next one that names it

    def _refuse_waiting(self, now: float) -> None:
        """Nobody is expected back any more: what has not begun fails, as it would if it came now. A stream that has
        begun waits until its deadline."""
        refusal = self._workers.refusal(now)
        if refusal is not None:
            for live in [live for live in self._rooms.unplaced.values() if not live.is_started]:
                self._end(live, FailReason.NO_PEER, refusal)

    def _place(self, live: LiveRoom, choice: Choice, now: float) -> None:
        live.place(self._placer.place(live.sample, choice, now), now)
        self._rooms.unplaced.pop(live.room, None)
        self._rooms.move(live, RoomEvent.RESUBMIT)
        self.submit(live, now)

    def _unplace(self, live: LiveRoom, now: float) -> None:
        """Give back the room's place; output that it was not delivered is generated anew elsewhere."""
        self._release(live)
        live.unplace(now)
        live.forget_held()
        self._rooms.unplaced[live.room] = live

    def resume(self, live: LiveRoom, now: float) -> None:
        """Ask decode to go on behind what came: it may have said more that was lost, or may never have heard of it."""
        if live.state is RoomState.FINISHING:  # the client has all it wants
            self._orders.withdraw(live, FailReason.CANCELLED, now)
        if not self._is_complete(live):
            self._counts["resumed"] += 1
            live.forget_held()
            assert live.placement is not None
            self._orders.submit(live, self._workers.fellow(live.placement.decode, live.placement.prefill), now)

    def finish(self, live: LiveRoom, output_len: int) -> None:
        """The client has all it wants."""
        if live.state is RoomState.FINISHING:
            return
        self._rooms.move(live, RoomEvent.FINISH)
        self._orders.finish(live, output_len)
        live.num_repeats = 0
        if live.placement is None:  # no worker has anything left to tell
            self._complete(live, FinishReason.STOP, live.own_usage())

    def _is_complete(self, live: LiveRoom) -> bool:
        """Whether the client has all there is: then the room ends, though decode's Finished did not come."""
        finish = FinishReason.STOP if live.state is RoomState.FINISHING else live.finish
        if finish is not None:
            self._complete(live, finish, live.own_usage())
        return finish is not None

    def submit(self, live: LiveRoom, now: float) -> None:
        """Send it where it has just been placed."""
        assert live.placement is not None  # whoever submits has placed it
        prefill, decode = live.placement.prefill, self._workers.get(live.placement.decode)
        if prefill is None and decode is not None and decode.role is Role.DECODE:
            self._counts["without_prefill"] += 1
        self._orders.submit(live, None if prefill is None else self._workers.address(prefill), now)

    def _live(self, worker: Worker, room: Room, now: float) -> LiveRoom | None:
        """The room, if this worker has it. A worker that talks about a room it has not is told so, now and then."""
        live = self._rooms.get(room)
        if live is not None and live.is_on(worker.name):
            return live
        self._orders.answer(worker, room, now)
        return None

    def cancel_strays(self, worker: Worker, now: float) -> None:
        """A worker that is back in the same life, and still has rooms that have ended or gone elsewhere."""
        for room in self._orders.forget(worker):
            live = self._rooms.get(room)
            if live is None or not live.is_on(worker.name):
                self._orders.cancel(worker, room, FailReason.CANCELLED, now)

    def _start_over(self, live: LiveRoom, text: str, now: float) -> None:
        """Prompt logprobs were lost, which nobody tells again: nothing was delivered behind them."""
        self._orders.withdraw(live, FailReason.CANCELLED, now)
        if not self.retry(live, Cause.GAP, now):
            self._end(live, FailReason.PEER_LOST, text)

    def give_up(self, live: LiveRoom, reason: FailReason, text: str, now: float) -> None:
        self._orders.withdraw(live, reason, now)
        self._end(live, reason, text)

    def _end(self, live: LiveRoom, reason: FailReason, text: str) -> None:
        """The room fails; but a client that has all it wants is not told of it."""
        if live.state is RoomState.FINISHING and reason is not FailReason.CANCELLED:
            self._complete(live, FinishReason.STOP, live.own_usage())
            return
        self._remove(live)
        self._counts[f"failed_{reason.value}"] += 1
        self._emit(Fail(live.room, RequestFailed(reason, text)))

    def _complete(self, live: LiveRoom, finish: FinishReason, usage: Usage) -> None:
        self._remove(live)
        self._counts["finished"] += 1
        self._emit(Deliver(live.room, OutputDelta(finish=finish, usage=usage)))

    def _remove(self, live: LiveRoom) -> None:
        self._release(live)
        self._rooms.remove(live)

    def _release(self, live: LiveRoom) -> None:
        """Free the room's place on its workers."""
        if live.placement is not None:
            self._release_prefill(live)
            self._placer.release_decode(live.placement, live.num_tokens)

    def _release_prefill(self, live: LiveRoom) -> None:
        """The prompt is computed, or needs not be any more."""
        if live.is_computing and live.placement is not None:
            self._placer.release_prefill(live.placement)
        live.is_computing = False

    # ------------------------------------------------------------ what decode tells

    def on_tokens(self, worker: Worker, run: TokenRun, now: float) -> None:
        live = self._live(worker, Room(run.room), now)
        if live is None or live.state is RoomState.FINISHING or run.epoch != live.epoch:
            return
        live.heard(now)
        num_tokens, rest = divmod(len(run.tokens), TOKEN_BYTES)
        if rest or run.start < 0 or (run.logprobs and len(run.logprobs) != num_tokens):
            self.give_up(live, FailReason.INTERNAL, "malformed tokens from decode", now)
            return
        if run.start > live.num_tokens:  # frames were lost with the connection that carried them
            self.resume(live, now)
            return
        tokens = unpack_u32(run.tokens)
        if live.contradicts(run.start, tokens):
            self.give_up(live, FailReason.INTERNAL, "decode took back tokens that were delivered", now)
            return
        num_known = live.num_tokens - run.start
        if len(tokens) > num_known:
            live.begins_on(worker.revision)
            self._take_tokens(live, run, num_known, now)

    def on_next_tokens(self, worker: Worker, message: NextTokens, now: float) -> None:
        """One more token of each of some rooms; as on_tokens, sooner for a room that is as decode has it."""
        rooms, ahead = self._rooms, message.ahead
        if len(message.tokens) != TOKEN_BYTES * len(message.places):
            for place in message.places:  # none of their tokens can be told from the others'
                self.on_tokens(worker, TokenRun(room=place.room, epoch=place.epoch, start=-1, tokens=b""), now)
            return
        for place, token in zip(message.places, unpack_u32(message.tokens), strict=True):
            live = rooms.get(Room(place.room))
            if live is None or not live.expects(worker.name, place.epoch, place.start + ahead):
                run = TokenRun(room=place.room, epoch=place.epoch, start=place.start + ahead, tokens=pack_u32([token]))
                self.on_tokens(worker, run, now)
                continue
            live.heard(now)
            live.output.append(token)
            live.retries.progressed()
            self._emit(Deliver(live.room, OutputDelta(tokens=(token,))))

    def _take_tokens(self, live: LiveRoom, run: TokenRun, num_known: int, now: float) -> None:
        """The run's tokens behind the known ones, at least one."""
        if live.state is RoomState.WAITING:
            live.first_token_s = now - live.submitted_at
        if live.is_computing and live.placement is not None:
            self._placer.succeeded(live.placement)
            if run.usage is not None and not run.usage.prefill_s:
                self._placer.computed_by_decode(live.sample, live.placement)
        self._release_prefill(live)
        self._rooms.move(live, RoomEvent.TOKENS)
        tokens = unpack_u32(run.tokens)[num_known:]
        live.output += tokens
        usage = None if run.usage is None else live.timed(run.usage)
        live.held.append(OutputDelta(tokens=tokens, logprobs=run.logprobs[num_known:], usage=usage))
        self._deliver_held(live)

    def _deliver_held(self, live: LiveRoom) -> None:
        """Tokens go out when the prompt's logprobs are complete: those take another way and may come later."""
        if live.held and live.has_prompt_logprobs:
            live.retries.progressed()
            for delta in live.held:
                self._emit(Deliver(live.room, delta))
            live.held.clear()

    def on_prompt_logprobs(self, worker: Worker, message: PromptLogprobs, now: float) -> None:
        live = self._live(worker, Room(message.room), now)
        if live is None or live.state is RoomState.FINISHING:
            return
        live.heard(now)
        if not 0 <= message.start <= live.num_prompt_logprobs:
            self._start_over(live, f"prompt logprobs {live.num_prompt_logprobs} .. {message.start - 1} never came", now)
        elif values := message.values[live.num_prompt_logprobs - message.start :]:
            live.begins_on(worker.revision)
            live.num_prompt_logprobs += len(values)
            self._emit(Deliver(live.room, OutputDelta(prompt_logprobs=values)))
            self._deliver_held(live)

    def on_finished(self, worker: Worker, message: Finished, now: float) -> None:
        live = self._rooms.get(Room(message.room))
        if live is None or not live.is_on(worker.name) or message.epoch != live.epoch:
            return  # over there and here, or not an answer to the last Submit
        live.heard(now)
        usage = live.timed(message.usage)
        if live.state is RoomState.FINISHING:
            self._complete(live, message.finish or FinishReason.STOP, usage)
        elif message.finish is None:
            self._on_failed(live, message, now)
        elif usage.output_len > live.num_tokens:
            self.resume(live, now)  # decode tells the rest again
        elif not live.has_prompt_logprobs:
            self._start_over(live, f"prompt logprobs from {live.num_prompt_logprobs} on never came", now)
        else:
            assert live.placement is not None  # see is_on
            self._placer.succeeded(live.placement)
            self._complete(live, message.finish, usage)

    def _on_failed(self, live: LiveRoom, message: Finished, now: float) -> None:
        reason = message.reason or FailReason.INTERNAL
        half = blame(reason)
        if half is not None and live.placement is not None:
            self._placer.failed(live.placement, half, now)
        cause = cause_of(reason, message.retryable)
        if cause is None or not self.retry(live, cause, now):
            self._end(live, told(reason), message.message or reason.value)
