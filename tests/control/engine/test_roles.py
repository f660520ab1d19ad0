"""A worker takes up another role: it drains, a new engine goes on over the same memory, and the tree is still there."""

import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.control.front.client import RoleAnswer
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import ChangeRole, Facts, Hello, Submit
from deltaserve.sim.cluster import Shape
from deltaserve.sim.process import SimWorker
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Duo, slow_fabric

SECOND = PeerName("decode-1")
HEAD = list(range(1, 17))
LONG_S = 1000.0


def trio() -> Duo:
    return reported(Duo(Shape(num_decode=2)))


def reported(duo: Duo) -> Duo:
    """Every worker has."""
    duo.run(1.0)
    return duo


def change(duo: Duo, name: PeerName, role: Role, grace_s: float = LONG_S) -> None:
    assert duo.cluster.front.change_role(name, role, grace_s) is RoleAnswer.CHANGING


def has_become(duo: Duo, name: PeerName, role: Role) -> bool:
    """Known to the front, which sends it requests again."""
    worker = duo.cluster.front.core.workers.get(name)
    assert worker is not None
    return worker.role is role and worker.takes_rooms and duo.worker(name).instance.config.role is role


def settle_as(duo: Duo, name: PeerName, role: Role) -> None:
    duo.until(lambda: has_become(duo, name, role))
    reported(duo)


def decode_of(duo: Duo) -> PeerName:
    """Who got the last Submit."""
    return [dst for _, dst, e in duo.frames if isinstance(e.body, Submit)][-1]


def fill(duo: Duo) -> PeerName:
    """Both decode workers hold HEAD, or one of them does: its name."""
    duo.serve(HEAD, 1)
    duo.run(0.5)
    return decode_of(duo)


def test_there_and_back_again_leaves_no_endpoint_and_no_connection_behind() -> None:
    duo = reported(Duo(Shape(num_prefill=2, num_decode=2)))
    dialled = set(duo.worker(DECODE).dialled)
    for role in (Role.PREFILL, Role.DECODE):
        change(duo, SECOND, role)
        settle_as(duo, SECOND, role)
        duo.run(2.0)
    assert SECOND not in duo.worker(DECODE).ranks[0].transport._endpoints
    assert set(duo.worker(DECODE).dialled) == dialled, "to whom there is nothing to say"
    prefills = {PREFILL, PeerName("prefill-1")}
    assert duo.worker(SECOND).ranks[0].transport._endpoints.keys() == prefills, "not ready for the first request"


def test_links_of_an_engine_before_the_last_one_are_hung_up_too() -> None:
    """An engine may be over before it has told everybody the end of the one before it."""
    duo = reported(Duo(Shape(num_prefill=2, num_decode=2)))
    other = PeerName("prefill-1")
    for name, role in ((SECOND, Role.PREFILL), (other, Role.DECODE), (SECOND, Role.DECODE)):
        change(duo, name, role)
        settle_as(duo, name, role)
    duo.run(60.0)
    assert set(duo.worker(SECOND).dialled) == {PREFILL}


def test_a_decode_worker_becomes_prefill_and_its_tree_is_hit_there() -> None:
    duo = trio()
    name = fill(duo)
    pages, boot = duo.cached_pages(name), duo.boot(name)
    change(duo, name, Role.PREFILL)
    settle_as(duo, name, Role.PREFILL)
    assert duo.cached_pages(name) == pages > 0
    assert duo.boot(name) > boot
    assert duo.cluster.front.core.placer.residency.num_resident(name) == pages
    change(duo, PREFILL, Role.DECODE)  # so that nobody else computes prompts
    settle_as(duo, PREFILL, Role.DECODE)
    other = DECODE if name == SECOND else SECOND
    duo.worker(PREFILL).instance.parts.cache.clear()
    duo.worker(other).instance.parts.cache.clear()
    asked = duo.serve([*HEAD, 40, 41], 4)
    assert asked.usage.prefill_cached_len == len(HEAD)
    assert asked.usage.transferred_bytes > 0


def test_there_and_back_again() -> None:
    duo = trio()
    name = fill(duo)
    for role in (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE):
        change(duo, name, role)
        settle_as(duo, name, role)
        duo.serve([*HEAD, 50], 3)
    assert [engine.config.role for engine in duo.worker(name).former] == [Role.DECODE, Role.PREFILL] * 2


def test_what_runs_may_end_and_nothing_new_is_taken() -> None:
    duo = trio()
    running = duo.ask(HEAD, 60)
    duo.until(lambda: len(running.answer.tokens) > 3)
    name = decode_of(duo)
    change(duo, name, Role.PREFILL)
    meanwhile = duo.ask([*HEAD, 60], 3)
    assert decode_of(duo) != name
    duo.settle(running, meanwhile)
    assert running.usage.num_retractions == 0
    settle_as(duo, name, Role.PREFILL)


@pytest.mark.parametrize("grace_s", [0.0, 0.02])
def test_what_still_runs_after_the_grace_goes_on_elsewhere(grace_s: float) -> None:
    duo = trio()
    running = duo.ask(HEAD, 100)
    duo.until(lambda: len(running.answer.tokens) > 3)
    name = decode_of(duo)
    change(duo, name, Role.PREFILL, grace_s)
    settle_as(duo, name, Role.PREFILL)
    duo.settle(running)
    assert decode_of(duo) != name


@pytest.mark.parametrize("moment", range(0, 80, 4))
@pytest.mark.parametrize("grace_s", [0.0, LONG_S])
def test_at_any_moment_of_a_transfer_answers_stay_right(moment: int, grace_s: float) -> None:
    duo = reported(Duo(Shape(num_prefill=2, num_decode=2), fabric=slow_fabric(0.02)))
    duo.serve(HEAD, 1)
    asked = [duo.ask([*HEAD, 40 + i, 41], 4) for i in range(4)]
    duo.run(moment * 0.001)
    change(duo, DECODE, Role.PREFILL, grace_s)
    change(duo, PREFILL, Role.DECODE, grace_s)
    duo.settle(*asked)
    duo.until(lambda: has_become(duo, DECODE, Role.PREFILL) and has_become(duo, PREFILL, Role.DECODE))
    duo.serve([*HEAD, 70], 3)


def test_a_lost_request_to_change_is_repeated() -> None:
    duo = trio()
    duo.link = lambda src, dst, envelope: () if isinstance(envelope.body, ChangeRole) else None
    change(duo, SECOND, Role.PREFILL)
    duo.run(2.0)
    assert duo.worker(SECOND).instance.config.role is Role.DECODE
    duo.link = lambda src, dst, envelope: None
    settle_as(duo, SECOND, Role.PREFILL)


def test_only_a_front_may_ask_and_only_for_the_two_roles() -> None:
    duo = trio()
    duo.inject(DECODE, PREFILL, ChangeRole(role=Role.PREFILL, grace_ms=0))
    for role in (Role.UNIFIED, Role.FRONT, Role.DECODE):
        duo.inject(DECODE, FRONT, ChangeRole(role=role, grace_ms=0))
    duo.run(1.0)
    assert duo.worker(DECODE).former == []
    duo.serve(HEAD, 2)


def test_a_change_back_before_it_was_made_ends_in_the_old_role() -> None:
    duo = trio()
    running = duo.ask(HEAD, 40)
    duo.until(lambda: len(running.answer.tokens) > 3)
    name = decode_of(duo)
    change(duo, name, Role.PREFILL)
    change(duo, name, Role.DECODE)
    duo.settle(running)
    settle_as(duo, name, Role.DECODE)
    assert len(duo.worker(name).former) == 1


# ---------------------------------------------------------------- what is refused


def test_the_last_of_a_role_keeps_it() -> None:
    duo = trio()
    assert duo.cluster.front.change_role(PREFILL, Role.DECODE, 0.0) is None
    change(duo, SECOND, Role.PREFILL)
    assert duo.cluster.front.change_role(DECODE, Role.PREFILL, 0.0) is None
    settle_as(duo, SECOND, Role.PREFILL)
    assert duo.cluster.front.change_role(SECOND, Role.PREFILL, 0.0) is RoleAnswer.HELD


def test_unified_workers_have_no_other_role() -> None:
    cluster = reported(Duo(Shape(num_prefill=2, num_decode=2, num_unified=2))).cluster
    for name, role in ((PeerName("unified-0"), Role.DECODE), (DECODE, Role.UNIFIED)):
        assert cluster.front.change_role(name, role, 0.0) is None


# ---------------------------------------------------------------- what outlives a change


def test_a_front_that_starts_later_learns_the_role_from_the_worker() -> None:
    duo = trio()
    change(duo, SECOND, Role.PREFILL)
    settle_as(duo, SECOND, Role.PREFILL)
    hello = [body for body in duo.sent(Hello, SECOND) if body.role == "prefill"][-1]
    assert hello.configured_role == "decode"


def test_pages_in_quarantine_stay_there() -> None:
    """Shared memory: bytes of a writer that is gone, as far as anybody can say, may land at any time."""
    duo = reported(Duo(Shape(num_prefill=2, num_decode=2), fabric=slow_fabric(0.5)))
    for worker in duo.world.workers.values():
        worker.ranks[0].transport.fence_result = FenceResult.IMPOSSIBLE
    asked = duo.ask(HEAD, 4)
    duo.until(lambda: any(in_state(w, PageState.GRANTED) for w in duo.world.workers.values()))
    (submit,) = duo.sent(Submit, FRONT)
    assert submit.prefill is not None
    worker = duo.worker(decode_of(duo))
    duo.world.kill(PeerName(submit.prefill.name))
    duo.until(lambda: bool(asked.answer.ends))
    assert tuple(asked.answer.tokens) == asked.expected
    stranded = in_state(worker, PageState.QUARANTINED)
    assert stranded > 0
    for role in (Role.PREFILL, Role.DECODE):
        change(duo, worker.name, role)
        settle_as(duo, worker.name, role)
        assert in_state(worker, PageState.QUARANTINED) == stranded
        assert duo.metrics(worker.name)["deltaserve_quarantine_age_seconds"] > 0
        again = duo.ask([*HEAD, 90], 3)
        duo.run(3.0)
        assert tuple(again.answer.tokens) == again.expected


def in_state(worker: SimWorker, state: PageState) -> int:
    return sum(pool.count(state) for pool in worker.instance.parts.pools)


def test_an_answer_to_a_former_engine_is_answered_by_nobody() -> None:
    """Two prefill workers, one of which had sent the other a Hello as a decode worker, refused each other without
    end."""
    duo = Duo(Shape(num_prefill=2))
    other = PeerName("prefill-1")
    answer = Hello(role="prefill", compat={"fingerprint": "stamp model"}, facts=Facts(), answers=b"12345678")
    duo.inject(PREFILL, other, answer)
    duo.run(1.0)
    between = [e.body for src, dst, e in duo.frames if {src, dst} == {PREFILL, other}]
    assert not any(isinstance(body, Hello) for body in between)
