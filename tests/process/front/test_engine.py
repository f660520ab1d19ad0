"""The front over real sockets, against workers that follow a script."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import Context

import msgspec
import pytest

from deltaserve.control.front.client import Engine, Generation, NameTaken, OutputDelta
from deltaserve.control.front.events import FrontConfig
from deltaserve.control.front.front_core import FrontCore
from deltaserve.core.errors import FailReason, IntegrityError, RequestFailed
from deltaserve.core.ids import Boot, PeerName, Role
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Cancel, Facts, Finish, FinishReason, Flush, Hello, Submit
from deltaserve.process.front.router_engine import RouterEngine
from deltaserve.process.links.links import Links
from tests.control.front.cluster import COMPAT, SECRET, facts, generation, room
from tests.event_loops import both_loops, run_in
from tests.patience import PATIENCE_S
from tests.process.front.worker import FRONT, ScriptedWorker, until


class House:
    """A front and its workers, in one event loop."""

    def __init__(self, workers: Sequence[ScriptedWorker], peer_lost_s: float = 5.0) -> None:
        self.workers = {worker.name: worker for worker in workers}
        config = FrontConfig(
            name=FRONT,
            boot=Boot(1),
            workers=tuple(worker.member for worker in workers),
            cluster_secret=SECRET,
            kv_bytes_per_token=1e5,
            peer_lost_s=peer_lost_s,
        )
        self.engine = RouterEngine(config, Links())

    def __getitem__(self, name: str) -> ScriptedWorker:
        return self.workers[name]

    def collect(self, sample: Generation) -> "asyncio.Task[list[OutputDelta]]":
        """All deltas of a generation."""

        async def deltas() -> list[OutputDelta]:
            return [delta async for delta in self.engine.generate(sample)]

        return asyncio.create_task(deltas())

    async def ready(self) -> None:
        """Every worker is, not just a pair."""

        def states() -> set[str]:
            return {worker.state for worker in self.engine.stats().workers}

        await until(lambda: self.engine.ready() is None and states() == {"ready"})

    async def restart(self, name: str) -> None:
        """The same worker again, same port, another life."""
        old = self.workers[name]
        self.workers[name] = ScriptedWorker(name, old.boot + 1000, old.port)


@asynccontextmanager
async def house(*names: str, peer_lost_s: float = 5.0) -> AsyncIterator[House]:
    made = House([ScriptedWorker(name, 100 + i) for i, name in enumerate(names)], peer_lost_s)
    try:
        await made.ready()
        yield made
        assert made.engine.stats().internal_errors == 0
    finally:
        made.engine.close()
        for worker in made.workers.values():
            await worker.vanish()


async def outcome(task: "asyncio.Task[list[OutputDelta]]") -> list[OutputDelta] | FailReason:
    try:
        return await asyncio.wait_for(task, PATIENCE_S)
    except RequestFailed as error:
        return error.reason


@both_loops
def test_a_stream_from_submit_to_finish(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            engine: Engine = h.engine
            assert engine.limits() is not None
            task = h.collect(generation(1))
            submit = (await h["decode-0"].hears(Submit))[0]
            assert submit.prefill == h["prefill-0"].member.address
            h["decode-0"].tokens(submit.room, 0, [7])
            h["decode-0"].tokens(submit.room, 1, [8, 9])
            h["decode-0"].finished(submit.room, 3)
            deltas = await outcome(task)
            assert isinstance(deltas, list)
            assert [token for delta in deltas for token in delta.tokens] == [7, 8, 9]
            assert [delta.finish for delta in deltas][-1] is FinishReason.LENGTH
            assert deltas[-1].usage is not None and deltas[-1].usage.first_token_s > 0
            assert h["decode-0"].heard.count(submit) == 1

    run_in(loop, scenario())


class _Opaque(asyncio.TimerHandle):
    """uvloop's handle of a time that has passed does not tell the time."""

    __slots__ = ()

    def when(self) -> float:
        raise AttributeError("when")


class _OpaqueTimers(asyncio.SelectorEventLoop):
    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        timer.__class__ = _Opaque
        return timer


def test_a_loop_whose_timers_do_not_tell_their_time() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            tasks = [h.collect(generation(number)) for number in range(3)]
            for submit in await h["decode-0"].hears(Submit, 3):
                h["decode-0"].tokens(submit.room, 0, [7])
                h["decode-0"].finished(submit.room, 1)
            for task in tasks:
                deltas = await outcome(task)
                assert isinstance(deltas, list)
                assert [token for delta in deltas for token in delta.tokens] == [7]

    with asyncio.Runner(loop_factory=_OpaqueTimers) as runner:
        runner.run(scenario())


@both_loops
def test_many_streams_at_once_each_get_their_own_tokens(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0", "decode-1") as h:
            tasks = [h.collect(generation(number)) for number in range(40)]

            async def serve(name: str) -> None:
                served = 0
                while served < 20:
                    for submit in (await h[name].hears(Submit, served + 1))[served:]:
                        number = int.from_bytes(submit.room, "big")
                        for i in range(5):
                            h[name].tokens(submit.room, i, [10 * number + i])
                        h[name].finished(submit.room, 5)
                        served += 1

            await asyncio.gather(serve("decode-0"), serve("decode-1"))
            for number, task in enumerate(tasks):
                deltas = await outcome(task)
                assert isinstance(deltas, list)
                tokens = [token for delta in deltas for token in delta.tokens]
                assert tokens == [10 * number + i for i in range(5)]

    run_in(loop, scenario())


@both_loops
def test_closing_the_iterator_cancels_the_room(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            async with aclosing(h.engine.generate(generation(1))) as stream:
                first = asyncio.ensure_future(anext(stream))
                await h["decode-0"].hears(Submit)
                h["decode-0"].tokens(room(1), 0, [7])
                assert (await first).tokens == (7,)
            cancel = (await h["decode-0"].hears(Cancel))[0]
            assert (cancel.room, cancel.reason) == (room(1), FailReason.CANCELLED)
            assert h.engine.stats().rooms == 0

    run_in(loop, scenario())


@both_loops
def test_a_client_task_that_is_cancelled_cancels_the_room(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            task = h.collect(generation(1))
            await h["decode-0"].hears(Submit)
            task.cancel()
            await h["decode-0"].hears(Cancel)
            assert h.engine.stats().rooms == 0

    run_in(loop, scenario())


def test_a_generation_that_is_never_started_is_never_submitted() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            await h.engine.generate(generation(1)).aclose()
            assert h.engine.stats().counts == {}

    asyncio.run(scenario())


def test_finish_reaches_decode_and_its_usage_comes_back() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h, aclosing(h.engine.generate(generation(1))) as stream:
            first = asyncio.ensure_future(anext(stream))
            await h["decode-0"].hears(Submit)
            h["decode-0"].tokens(room(1), 0, [7, 8, 9])
            await first
            h.engine.finish(room(1), 2)
            assert (await h["decode-0"].hears(Finish))[0].output_len == 2
            h["decode-0"].finished(room(1), 2)
            last = await anext(stream)
            assert last.usage is not None and last.usage.output_len == 2

    asyncio.run(scenario())


@both_loops
def test_a_slow_client_gets_everything_in_fewer_deltas(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h, aclosing(h.engine.generate(generation(1))) as stream:
            first = asyncio.ensure_future(anext(stream))
            await h["decode-0"].hears(Submit)
            for i in range(200):
                h["decode-0"].tokens(room(1), i, [i])
            h["decode-0"].finished(room(1), 200)
            deltas = [await first]
            await until(lambda: h.engine.stats().rooms == 0)
            deltas += [delta async for delta in stream]
            assert [t for d in deltas for t in d.tokens] == list(range(200))
            assert len(deltas) <= 3

    run_in(loop, scenario())


@both_loops
@pytest.mark.parametrize("is_told", [True, False])
def test_the_streams_of_a_dead_decode_worker_go_on_after_its_restart(
    loop: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By a death notice at once; without one by its broken connection, after which no heartbeat came."""

    async def scenario() -> None:
        async with house("prefill-0", "decode-0", peer_lost_s=600.0) as h:
            task = h.collect(generation(1))
            await h["decode-0"].hears(Submit)
            h["decode-0"].tokens(room(1), 0, [7])
            await until(lambda: h.engine.stats().waiting_tokens == 0)
            await h["decode-0"].vanish()
            if is_told:
                h.engine.peer_died(PeerName("decode-0"))
            await until(lambda: "decode-0" in (h.engine.ready() or ""))
            held = h.collect(generation(2))
            await until(lambda: h.engine.stats().rooms_without_worker == 2)
            await h.restart("decode-0")
            if is_told:
                h.engine.worker_up(h["decode-0"].member)
            await h.ready()
            first, second = (await h["decode-0"].hears(Submit, 2))[:2]
            assert (first.room, first.epoch, first.prompt[-4:]) == (room(1), 2, pack_u32([7]))
            assert (second.room, second.epoch) == (room(2), 1)
            h["decode-0"].finished(room(2), 0)
            assert isinstance(await outcome(held), list)
            h["decode-0"].tokens(room(1), 1, [8], epoch=2)
            h["decode-0"].finished(room(1), 2, epoch=2)
            deltas = await outcome(task)
            assert isinstance(deltas, list)
            assert [token for delta in deltas for token in delta.tokens] == [7, 8]
            await until(lambda: is_told or "requests go to decode-0 again" in caplog.messages)

    with caplog.at_level("INFO", "deltaserve.process.front"):
        run_in(loop, scenario())
    lost = "no requests for now to decode-0: starting or unreachable"
    assert (lost in caplog.messages) is not is_told, "who tells of the death tells the user as well"


def test_after_a_restart_nobody_noticed_the_streams_of_the_former_life_go_on() -> None:
    """Quicker than the missing heartbeats, and without a death notice: the new boot says it all."""

    async def scenario() -> None:
        async with house("prefill-0", "decode-0", peer_lost_s=600.0) as h:
            task = h.collect(generation(1))
            await h["decode-0"].hears(Submit)
            h["decode-0"].tokens(room(1), 0, [7])
            await until(lambda: h.engine.stats().waiting_tokens == 0)
            await h["decode-0"].vanish()
            await h.restart("decode-0")
            submit = (await h["decode-0"].hears(Submit))[0]
            assert (submit.room, submit.epoch, submit.prompt[-4:]) == (room(1), 2, pack_u32([7]))
            h["decode-0"].finished(room(1), 1, epoch=2)
            assert isinstance(await outcome(task), list)

    asyncio.run(scenario())


def test_a_room_without_a_token_moves_to_the_other_decode_worker() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0", "decode-1") as h:
            task = h.collect(generation(1))
            await h["decode-0"].hears(Submit)
            await h["decode-0"].vanish()
            h.engine.peer_died(PeerName("decode-0"))
            submit = (await h["decode-1"].hears(Submit))[0]
            h["decode-1"].tokens(submit.room, 0, [4], epoch=2)
            h["decode-1"].finished(submit.room, 1, epoch=2)
            deltas = await outcome(task)
            assert isinstance(deltas, list) and deltas[0].tokens == (4,)

    asyncio.run(scenario())


def test_one_that_does_not_fit_and_one_that_never_answered_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Also while others serve, so that nobody asks why."""
    other = Hello(role="decode", compat=COMPAT | {"dtype": "bfloat16"}, facts=facts())

    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            h.workers["decode-1"] = ScriptedWorker("decode-1", 200, hello=other)
            h.engine.add_worker("decode-1", Role.DECODE, h["decode-1"].member.url or "")
            h.engine.add_worker("decode-2", Role.DECODE, "tcp://127.0.0.1:1")
            await until(lambda: any("decode-1 is not used: does not fit" in text for text in caplog.messages))
            assert "bfloat16" in caplog.text
            assert h.engine.ready() is None
            for name in ("decode-1", "decode-2"):
                h.engine.remove_worker(name, 0.0)
            await until(lambda: {"decode-1 has left", "decode-2 has left"} <= set(caplog.messages))

    with caplog.at_level("INFO", "deltaserve.process.front"):
        asyncio.run(scenario())


def test_a_name_in_use_is_given_to_no_other_address() -> None:
    """Whatever listens there: who has the name keeps it, and goes on. It is free once that one is gone."""

    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            task = h.collect(generation(1))
            submit = (await h["decode-0"].hears(Submit))[0]
            with pytest.raises(NameTaken, match="decode-0 is in use, at tcp://"):
                h.engine.add_worker("decode-0", Role.DECODE, "tcp://127.0.0.1:1")
            assert h.engine.ready() is None
            h.engine.add_worker("decode-0", Role.DECODE, h["decode-0"].member.url or "")  # a repeat is harmless
            h["decode-0"].tokens(submit.room, 0, [4])
            h["decode-0"].finished(submit.room, 1)
            assert isinstance(await outcome(task), list)
            await h["decode-0"].vanish()
            h.engine.peer_died(PeerName("decode-0"))
            h.engine.add_worker("decode-0", Role.DECODE, "tcp://127.0.0.1:1")
            (worker,) = (worker for worker in h.engine.stats().workers if worker.name == "decode-0")
            assert worker.url == "tcp://127.0.0.1:1"

    asyncio.run(scenario())


def test_why_a_worker_cannot_be_reached_stands_beside_it() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            elsewhere = h["decode-0"].member.url
            assert elsewhere is not None
            h.engine.add_worker("decode-9", Role.DECODE, elsewhere)

            def complaints() -> dict[str, str | None]:
                return {worker.name: worker.link_complaint for worker in h.engine.stats().workers}

            await until(lambda: complaints()["decode-9"] is not None)
            assert complaints()["prefill-0"] is complaints()["decode-0"] is None
            assert "it calls itself 'decode-0'" in (complaints()["decode-9"] or "")

    asyncio.run(scenario())


def test_an_incompatible_pair_is_reported_with_both_values() -> None:
    async def scenario() -> None:
        prefill = ScriptedWorker("prefill-0", 100)
        other = Hello(role="decode", compat=COMPAT | {"dtype": "bfloat16"}, facts=facts())
        decode = ScriptedWorker("decode-0", 101, hello=other)
        h = House([prefill, decode])
        try:
            await until(lambda: "dtype: " in (h.engine.ready() or ""))
            reason = h.engine.ready() or ""
            assert "float32" in reason and "bfloat16" in reason
            assert h.engine.limits() is None
            assert await outcome(h.collect(generation(1))) is FailReason.NO_PEER
        finally:
            h.engine.close()
            await prefill.vanish()
            await decode.vanish()

    asyncio.run(scenario())


@both_loops
def test_the_deadline_is_kept_when_the_workers_say_nothing(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            task = h.collect(generation(1, deadline_s=0.3))
            await h["decode-0"].hears(Submit)
            assert await outcome(task) is FailReason.DEADLINE
            assert (await h["decode-0"].hears(Cancel))[0].reason is FailReason.DEADLINE

    run_in(loop, scenario())


@both_loops
def test_closing_the_engine_ends_every_stream_and_tells_the_workers(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            tasks = [h.collect(generation(number)) for number in range(3)]
            await h["decode-0"].hears(Submit, 3)
            h.engine.close()
            h.engine.close()
            assert [await outcome(task) for task in tasks] == [FailReason.DRAINING] * 3
            await h["decode-0"].hears(Cancel, 3)
            assert h.engine.is_drained()

    run_in(loop, scenario())


def test_a_draining_front_serves_out_what_it_has() -> None:
    async def scenario() -> None:
        async with house("unified-0") as h:
            task = h.collect(generation(1))
            submit = (await h["unified-0"].hears(Submit))[0]
            assert submit.prefill is None
            h.engine.drain()
            assert h.engine.ready() == "the server is shutting down"
            assert await outcome(h.collect(generation(2))) is FailReason.DRAINING
            assert not h.engine.is_drained()
            h["unified-0"].finished(room(1), 0)
            assert isinstance(await outcome(task), list)
            assert h.engine.is_drained()

    asyncio.run(scenario())


def test_a_prompt_no_frame_can_carry_fails_at_once() -> None:
    """17 MiB with its keys. Such workers tell of no limits; those of real ones refuse it long before."""
    boundless = Hello(role="unified", compat=COMPAT, facts=Facts(page_size=4, vocab_size=500))

    async def scenario() -> None:
        worker = ScriptedWorker("unified-0", 100, hello=boundless)
        h = House([worker])
        try:
            await h.ready()
            assert await outcome(h.collect(generation(1, prompt_len=2_200_000))) is FailReason.OVERLOADED
            assert h.engine.stats().rooms == 0
        finally:
            h.engine.close()
            await worker.vanish()

    asyncio.run(scenario())


def test_a_flush_reaches_every_worker_that_is_there() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            assert h.engine.flush_cache().keys() == {"prefill-0", "decode-0"}
            for name in ("prefill-0", "decode-0"):
                await h[name].hears(Flush)
            await h["prefill-0"].vanish()
            h.engine.peer_died(PeerName("prefill-0"))
            assert h.engine.flush_cache().keys() == {"decode-0"}

    asyncio.run(scenario())


def test_books_that_disagree_make_it_not_ready_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def breach(core: FrontCore) -> None:
        raise IntegrityError("one room too many")

    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            assert not h.engine.breached.is_set()
            monkeypatch.setattr(FrontCore, "check_integrity", breach)
            await asyncio.wait_for(h.engine.breached.wait(), PATIENCE_S)
            assert h.engine.ready() == "accounting is wrong: one room too many"
            assert h.engine.is_drained()

    asyncio.run(scenario())


@both_loops
def test_a_control_plane_without_ticks_is_not_alive(loop: str) -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            await asyncio.sleep(0.6)
            assert h.engine.alive() is None
            h.engine._ticked_at -= 11.0
            assert "no tick for 11 s" in (h.engine.alive() or "")
            await until(lambda: h.engine.alive() is None)

    run_in(loop, scenario())


def test_stats_are_json_and_name_every_worker() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            stats = json.loads(msgspec.json.encode(h.engine.stats()))
            assert [w["name"] for w in stats["workers"]] == ["prefill-0", "decode-0"]
            assert {w["state"] for w in stats["workers"]} == {"ready"}

    asyncio.run(scenario())


def test_a_worker_whose_process_is_stopped_is_told_of_with_its_pid() -> None:
    async def scenario() -> None:
        async with house("prefill-0", "decode-0") as h:
            h.engine.peer_halted(PeerName("decode-0"), 4711)
            assert h.engine.stats().stopped_processes == {"decode-0": 4711}
            assert h.engine.ready() is None, "it may go on before anybody misses it"
            await h["decode-0"].vanish()
            await until(lambda: h.engine.ready() is not None)
            assert "decode-0: its process 4711 is stopped" in (h.engine.ready() or "")
            h.engine.peer_halted(PeerName("decode-0"), None)
            assert "4711" not in (h.engine.ready() or "")

    asyncio.run(scenario())
