"""The registry: shaking hands, refusing, losing and finding workers again."""

from dataclasses import replace

import msgspec
import pytest

from deltaserve.control.front.client import RoleRefused
from deltaserve.control.front.events import Member
from deltaserve.control.peer.link import Dial, HangUp
from deltaserve.core.errors import ConfigError, FailReason, RequestFailed
from deltaserve.core.ids import Boot, PeerName, Role
from deltaserve.core.keys import seed_check
from deltaserve.core.wire.messages import Envelope, Events, Facts, Heartbeat, Hello, Status
from tests.control.front.cluster import (
    COMPAT,
    FRONT_BOOT,
    Cluster,
    facts,
    generation,
    member,
    member_somewhere,
    other_facts,
    room,
    status,
)

PAIR = ("prefill-0", "decode-0")


def hellos(cluster: Cluster, to: str, since: int = 0) -> list[Hello]:
    return [m for m in cluster.messages(to, Hello, since) if isinstance(m, Hello)]


def dialled(cluster: Cluster, since: int = 0) -> list[str]:
    return [action.address.name for action in cluster.actions[since:] if isinstance(action, Dial)]


def test_every_worker_is_dialled_and_greeted_and_decode_learns_of_prefill() -> None:
    cluster = Cluster(("prefill-0", "prefill-1", "decode-0"))
    assert dialled(cluster) == ["prefill-0", "prefill-1", "decode-0"]
    assert all(hellos(cluster, name)[0].peers == () for name in cluster.boots)  # nobody has said its revision
    assert {hellos(cluster, name)[0].role for name in cluster.boots} == {"front"}
    cluster.all_ready()
    assert [p.name for p in hellos(cluster, "decode-0")[-1].peers] == ["prefill-0", "prefill-1"]
    assert not any(hello.peers for name in ("prefill-0", "prefill-1") for hello in hellos(cluster, name))


def test_a_pair_is_ready_when_both_halves_answered() -> None:
    cluster = Cluster()
    assert cluster.front.ready() == "prefill-0: starting or unreachable; decode-0: starting or unreachable"
    cluster.hello("prefill-0")
    assert cluster.front.ready() == "decode-0: starting or unreachable"
    assert cluster.front.limits(cluster.now) is None
    cluster.hello("decode-0")
    assert cluster.front.ready() is None


def test_a_unified_worker_is_enough() -> None:
    cluster = Cluster(("unified-0",)).all_ready()
    assert cluster.front.ready() is None
    assert cluster.submit(1).prefill is None


def test_a_silent_worker_is_greeted_again_and_again_but_ever_less_often() -> None:
    cluster = Cluster()
    cluster.run_until(20.0)
    assert 8 <= len(hellos(cluster, "prefill-0")) <= 16


def test_limits_are_those_of_the_smallest_worker() -> None:
    cluster = Cluster(("prefill-0", "decode-0", "decode-1"))
    cluster.hello("prefill-0", its_facts=facts(pool_pages=70))
    cluster.hello("decode-0", its_facts=facts(pool_pages=100))
    cluster.hello("decode-1", its_facts=facts(pool_pages=90))
    limits = cluster.front.limits(cluster.now)
    assert limits is not None
    assert (limits.max_context_len, limits.max_prompt_len, limits.max_total_len) == (2048, 280, 360)
    assert limits.vocab_size == 500


@pytest.mark.parametrize(
    ("compat", "its_facts", "words"),
    [
        (COMPAT | {"dtype": "bfloat16"}, facts(), "does not fit prefill-0: dtype: here bfloat16, on prefill-0 float32"),
        (COMPAT | {"fingerprint": "m2"}, other_facts("m2"), "fingerprint: here m2, on prefill-0 model"),
        ({"dtype": "float32"}, facts(), "fingerprint: absent"),
        (COMPAT | {"tokenizer": "other"}, facts(), "chat template or end tokens: on this front (absent), there other"),
        (COMPAT, facts(page_size=0), "page size 0"),
        (COMPAT, Facts(page_size=4, keys_seed_check=seed_check(b"other", "model")), "cluster secret: ours"),
    ],
)
def test_an_unequal_worker_serves_nothing_and_both_values_are_named(
    compat: dict[str, str], its_facts: Facts, words: str
) -> None:
    cluster = Cluster()
    cluster.hello("prefill-0")
    cluster.hello("decode-0", compat, its_facts)
    reason = cluster.front.ready()
    assert reason is not None and reason.startswith("decode-0: ") and words in reason
    with pytest.raises(RequestFailed) as caught:
        cluster.submit(1)
    assert caught.value.reason is FailReason.NO_PEER
    assert words in caught.value.message


BFLOAT16 = msgspec.structs.replace(facts(), kv_dtypes={"kv": "bfloat16", "draft-1": "float32"})
FLOAT32 = msgspec.structs.replace(facts(), kv_dtypes={"kv": "float32", "draft-2": "bfloat16"})


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (FLOAT32, BFLOAT16, "KV dtype of kv: here bfloat16, on prefill-0 float32; converted only in staging memory"),
        (msgspec.structs.replace(FLOAT32, has_staging=True), BFLOAT16, "--staging auto or on, on both sides"),
        (msgspec.structs.replace(FLOAT32, has_staging=True), msgspec.structs.replace(BFLOAT16, has_staging=True), None),
        (facts(page_size=16), facts(page_size=64), None),
        (
            msgspec.structs.replace(facts(page_size=16), needs_equal_pages=True),
            msgspec.structs.replace(facts(page_size=64), needs_equal_pages=True),
            "page size: here 64, on prefill-0 16; may differ only where every layer keeps all tokens",
        ),
    ],
)
def test_a_pair_between_which_no_pages_move_is_not_ready(one: Facts, other: Facts, words: str | None) -> None:
    """Each would refuse the other, and every request would fail."""
    cluster = Cluster()
    cluster.hello("prefill-0", its_facts=one)
    cluster.hello("decode-0", its_facts=other)
    reason = cluster.front.ready()
    assert reason is None if words is None else reason is not None and words in reason


def test_workers_of_one_role_may_differ_but_each_must_fit_all_of_the_other() -> None:
    cluster = Cluster(("decode-0", "decode-1", "prefill-0"))
    cluster.hello("decode-0", its_facts=msgspec.structs.replace(FLOAT32, has_staging=True))
    cluster.hello("decode-1", its_facts=msgspec.structs.replace(BFLOAT16, has_staging=True))
    assert "decode-1" not in (cluster.front.ready() or "")
    cluster.hello("prefill-0", its_facts=FLOAT32)
    assert cluster.front.ready() is not None and "prefill-0: does not fit decode-1: KV dtype" in str(
        cluster.front.ready()
    )


def test_a_worker_in_the_wrong_role_is_refused() -> None:
    cluster = Cluster()
    cluster.say("decode-0", Hello(role="prefill", compat=COMPAT, facts=facts()))
    assert "decode-0: role: configured decode, it says prefill" in (cluster.front.ready() or "")


def test_a_refused_worker_is_taken_when_the_one_it_did_not_fit_is_gone() -> None:
    cluster = Cluster()
    cluster.hello("prefill-0", its_facts=FLOAT32)
    cluster.hello("decode-0", its_facts=BFLOAT16)
    assert "KV dtype of kv: here bfloat16, on prefill-0 float32" in (cluster.front.ready() or "")
    cluster.reboot("prefill-0")
    cluster.hello("prefill-0", its_facts=BFLOAT16)
    assert cluster.front.ready() is None


def test_heartbeats_go_to_all_who_are_there() -> None:
    cluster = Cluster().all_ready()
    cluster.run_until(10.0, heartbeats_of=PAIR)
    for name in PAIR:
        assert 18 <= len(cluster.messages(name, Heartbeat)) <= 21
    assert cluster.front.ready() is None


def test_a_worker_that_is_back_is_greeted_at_once_and_again_soon_however_long_it_was_away() -> None:
    """Over the link there is: frames that an old one still delivers would lead its answers astray."""
    cluster = Cluster().all_ready()
    cluster.die("prefill-0")
    cluster.run_until(60.0, heartbeats_of=["decode-0"])
    cluster.actions.clear()
    cluster.up(member("prefill-0"))
    assert not [a for a in cluster.actions if isinstance(a, HangUp)]
    assert len(hellos(cluster, "prefill-0")) == 1
    cluster.run_until(61.1, heartbeats_of=["decode-0"])
    assert len(hellos(cluster, "prefill-0")) >= 2


def test_a_dead_boot_is_ignored_and_a_new_one_is_welcome() -> None:
    cluster = Cluster().all_ready()
    cluster.die("prefill-0")
    cluster.hello("prefill-0")  # was still in some buffer
    assert "prefill-0: starting or unreachable" in (cluster.front.ready() or "")
    cluster.reboot("prefill-0")
    cluster.hello("prefill-0")
    assert cluster.front.ready() is None


def test_any_frame_of_a_new_boot_ends_the_old_one() -> None:
    cluster = Cluster().all_ready()
    cluster.reboot("decode-0")
    before = len(cluster.actions)
    cluster.say("decode-0", status())
    assert cluster.front.ready() is not None
    assert len(hellos(cluster, "decode-0", before)) == 1
    assert cluster.sent(before, "decode-0")[0].envelope.dst_boot is None


def test_a_frame_for_an_earlier_front_is_answered_with_a_hello_at_a_bounded_rate() -> None:
    cluster = Cluster().all_ready()
    cluster.now = 10.0
    before = len(cluster.actions)
    for _ in range(5):
        cluster.say("decode-0", status(draining=True), dst_boot=Boot(77))
    assert len(hellos(cluster, "decode-0", before)) == 1
    assert cluster.front.ready() is None


def test_strangers_are_ignored() -> None:
    cluster = Cluster().all_ready()
    before = len(cluster.actions)
    cluster.hear(Envelope(src="decode-9", src_boot=5, dst_boot=FRONT_BOOT, body=Heartbeat()))
    assert cluster.actions[before:] == []
    assert cluster.front.stats().stale_frames == 1


@pytest.mark.parametrize("words", [status(draining=True), status(ready=False)])
def test_a_worker_about_to_leave_gets_nothing_new(words: Status) -> None:
    cluster = Cluster(("prefill-0", "decode-0", "decode-1")).all_ready()
    cluster.say("decode-0", words)
    for number in range(3):
        cluster.submit(number)
    assert len(cluster.submits("decode-1")) == 3
    cluster.say("decode-1", words)
    reason = cluster.front.ready() or ""
    assert "decode-0: " in reason and "decode-1: " in reason and "prefill-0" not in reason


def test_a_gap_in_events_asks_for_a_snapshot_once_a_second() -> None:
    cluster = Cluster().all_ready()
    cluster.now = 5.0
    before = len(cluster.actions)
    for first in (9, 10, 11):
        cluster.say("decode-0", Events(first=first, stored=bytes(16), evicted=b""))
    assert len(hellos(cluster, "decode-0", before)) == 1
    cluster.now = 6.5
    cluster.say("decode-0", Events(first=12, stored=bytes(16), evicted=b""))
    assert len(hellos(cluster, "decode-0", before)) == 2
    cluster.hello("decode-0")
    cluster.say("decode-0", Events(first=13, stored=bytes(16), evicted=b"", snapshot=True))
    cluster.say("decode-0", Events(first=13, stored=bytes(16), evicted=b""))
    assert len(hellos(cluster, "decode-0", before)) == 2


def test_workers_may_come_later() -> None:
    cluster = Cluster(())
    assert cluster.front.ready() == "no prefill and no decode worker is known"
    for name in ("decode-0", "prefill-0"):
        cluster.boots[PeerName(name)] = Boot(5)
        cluster.up(member(name))
        cluster.hello(name)
    assert cluster.front.ready() is None
    assert [p.name for p in hellos(cluster, "decode-0")[-1].peers] == ["prefill-0"]
    cluster.submit(1)


def test_a_restarted_worker_is_greeted_at_once_where_it_listens_now() -> None:
    cluster = Cluster().all_ready()
    cluster.die("prefill-0")
    cluster.run_until(10.0, heartbeats_of=["decode-0"])
    cluster.reboot("prefill-0")
    before = len(cluster.actions)
    moved = Member(PeerName("prefill-0"), Role.PREFILL, "tcp://127.0.0.1/moved")
    cluster.up(moved)
    assert Dial(moved.address) in cluster.actions[before:]
    assert len(hellos(cluster, "prefill-0", before)) == 1
    assert hellos(cluster, "decode-0", before)[0].peers == (moved.address,)
    cluster.hello("prefill-0")
    assert cluster.submit(1).prefill == moved.address
    before = len(cluster.actions)
    cluster.up(moved)
    assert cluster.actions[before:] == []


def test_nobody_is_dialled_or_greeted_whose_address_is_not_known() -> None:
    cluster = Cluster(PAIR, member_somewhere)
    assert cluster.actions == []
    assert cluster.front.ready() == "prefill-0: not started yet; decode-0: not started yet"
    cluster.run_until(20.0)
    cluster.die("prefill-0")  # it never came up
    assert not dialled(cluster) and not cluster.sent()
    with pytest.raises(RequestFailed) as caught:
        cluster.submit(1)
    assert caught.value.reason is FailReason.NO_PEER
    assert "prefill-0: not started yet" in caught.value.message


def test_a_worker_whose_address_is_not_known_is_a_stranger() -> None:
    """No link leads to it: whoever speaks in its name is somebody else."""
    cluster = Cluster(PAIR, member_somewhere)
    cluster.hello("prefill-0")
    cluster.say("prefill-0", status())
    assert cluster.actions == []
    assert cluster.front.ready() == "prefill-0: not started yet; decode-0: not started yet"
    assert cluster.front.stats().stale_frames == 2


@pytest.mark.parametrize("order", [PAIR, PAIR[::-1]])
def test_a_worker_is_dialled_and_greeted_when_its_address_is_told(order: tuple[str, str]) -> None:
    cluster = Cluster(PAIR, member_somewhere)
    cluster.run_until(20.0)
    for name in order:
        before = len(cluster.actions)
        cluster.up(member(name))
        assert dialled(cluster, before) == [name]
        assert len(hellos(cluster, name, before)) == 1
        assert name in (cluster.front.ready() or "")
        cluster.hello(name)
    assert cluster.front.ready() is None
    assert hellos(cluster, "decode-0")[-1].peers == (member("prefill-0").address,)
    assert cluster.submit(1).prefill == member("prefill-0").address


def test_a_decode_worker_is_told_of_known_addresses_only() -> None:
    cluster = Cluster(("prefill-0", "prefill-1", "decode-0"), member_somewhere)
    for name in ("prefill-1", "decode-0"):
        cluster.up(member(name))
        cluster.hello(name)
    assert [p.name for p in hellos(cluster, "decode-0")[-1].peers] == ["prefill-1"]


@pytest.mark.parametrize("order", [PAIR, PAIR[::-1]])
def test_a_decode_worker_is_told_of_a_prefill_worker_when_both_have_answered(order: tuple[str, str]) -> None:
    """Once: its answer is not answered."""
    cluster = Cluster(PAIR, member_somewhere)
    for name in PAIR:
        cluster.up(member(name))
    for name in (*order, *order):
        cluster.hello(name)
    assert [hello.peers for hello in hellos(cluster, "decode-0")] == [(), (member("prefill-0").address,)]


def test_a_worker_that_was_found_once_is_looked_for_where_it_was() -> None:
    cluster = Cluster(PAIR, member_somewhere)
    for name in PAIR:
        cluster.up(member(name))
        cluster.hello(name)
    before = len(cluster.actions)
    cluster.die("prefill-0")
    assert dialled(cluster, before) == ["prefill-0"]
    assert "prefill-0: starting or unreachable" in (cluster.front.ready() or "")


def test_it_cannot_come_up_nowhere() -> None:
    with pytest.raises(ValueError, match="nobody has said yet where prefill-0 listens"):
        Cluster().up(member_somewhere("prefill-0"))


def test_a_worker_keeps_its_role() -> None:
    with pytest.raises(ValueError, match="decode-0 is a decode worker, not prefill"):
        Cluster().up(Member(PeerName("decode-0"), Role.PREFILL, "tcp://127.0.0.1/x"))


def test_a_hello_is_not_answered_with_a_hello() -> None:
    cluster = Cluster().all_ready()
    before = len(cluster.actions)
    cluster.hello("decode-0")
    assert cluster.actions[before:] == []


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: ttft, round_robin"):
        Cluster(load_balance_method="best")
    with pytest.raises(ConfigError, match="same name"):
        Cluster(("decode-0", "decode-0"))


def test_capacity_that_is_not_told_limits_nothing() -> None:
    cluster = Cluster()
    for name in PAIR:
        cluster.hello(name, its_facts=Facts(page_size=4, vocab_size=500))
    cluster.submit(1, generation(1, prompt_len=100_000))
    limits = cluster.front.limits(cluster.now)
    assert limits is not None and limits.max_prompt_len > 100_000


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_tokens_per_s": float("nan")},
        {"prefill_tokens_per_s": 1e-320},
        {"prefill_tokens_per_s": -1.0},
        {"decode_step_s": float("inf")},
        {"waiting_tokens": -5},
        {"num_running": 1 << 63},
        {"num_pages": (-1,)},
    ],
)
def test_a_report_that_makes_no_sense_is_not_used(changes: dict[str, object]) -> None:
    """Prices made of it would fail every request."""
    cluster = Cluster(PAIR).all_ready()
    for name in PAIR:
        cluster.say(name, status())
        cluster.say(name, msgspec.structs.replace(status(), **changes))
    assert cluster.submit(1).prefill is not None
    assert cluster.front.workers.get(PeerName("decode-0")).status == status()  # type: ignore[union-attr]


def in_group(name: str) -> Member:
    """Decode workers share experts."""
    return replace(member(name), group="experts" if name.startswith("decode") else None)


def test_a_group_that_nobody_but_its_members_knows() -> None:
    """They are on several machines: each says where they meet. One that was lost is of it still."""
    cluster = Cluster(("prefill-0", "decode-0", "decode-1"))
    in_group = msgspec.structs.replace(facts(), group="10.0.0.1:7000")
    for name, its_facts in (("prefill-0", facts()), ("decode-0", in_group), ("decode-1", in_group)):
        cluster.hello(name, its_facts=its_facts)
    assert cluster.front.ready() is None
    cluster.die("decode-1")
    assert cluster.front.ready() == "decode-1: starting or unreachable"
    cluster.reboot("decode-1")
    cluster.hello("decode-1", its_facts=in_group)
    assert cluster.front.ready() is None
    with pytest.raises(RoleRefused, match="decode-0 shares experts"):
        cluster.front.change_role(PeerName("decode-0"), Role.PREFILL, 1.0)


def test_no_room_goes_to_an_expert_group_of_which_one_is_missing() -> None:
    """Its others are about to end: a room that one death has failed must not fail once more with each of them."""
    names = ("prefill-0", "decode-0", "decode-1", "decode-2")
    cluster = Cluster(names, in_group)
    for name in names[:-1]:
        cluster.hello(name)
    assert cluster.front.ready() == "decode-2: starting or unreachable"
    cluster.hello("decode-2")
    assert cluster.front.ready() is None
    cluster.submit(1)
    (holder,) = [name for name in names if cluster.submits(name)]
    cluster.die(holder)
    assert sum(len(cluster.submits(name)) for name in names) == 1
    assert room(1) not in cluster.ends
    for name in names[1:]:
        cluster.die(name)
        cluster.reboot(name)
        cluster.hello(name)
    assert sum(len(cluster.submits(name)) for name in names) == 2
