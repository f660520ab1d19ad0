"""A worker's role is what it says, when that is what it was configured as or may have become."""

from dataclasses import replace

import msgspec
import pytest

from deltaserve.control.front.client import RoleAnswer, RoleRefused, UnknownWorker
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.wire.messages import ChangeRole, Hello
from tests.control.front.cluster import COMPAT, Cluster, facts, generation, status

NAMES = ("prefill-0", "decode-0", "decode-1")


def trio() -> Cluster:
    cluster = Cluster(NAMES).all_ready()
    for name in NAMES:
        cluster.say(name, status())
    return cluster


def ask(cluster: Cluster, name: str, role: Role) -> RoleAnswer:
    answer, actions = cluster.front.change_role(PeerName(name), role, 30.0)
    cluster._take(actions)
    return answer


def become(cluster: Cluster, name: str, role: Role, configured: Role) -> None:
    """A new boot of the same process says so."""
    cluster.reboot(name)
    cluster.say(name, Hello(role=role.value, compat=COMPAT, facts=facts(), configured_role=configured.value))


def test_it_gets_no_rooms_while_it_changes_and_those_of_its_new_role_afterwards() -> None:
    cluster = trio()
    assert ask(cluster, "decode-0", Role.PREFILL) is RoleAnswer.CHANGING
    assert cluster.messages("decode-0", ChangeRole) == [ChangeRole(role=Role.PREFILL, grace_ms=30_000)]
    for number in range(4):
        cluster.submit(number)
    assert len(cluster.submits("decode-1")) == 4
    before = len(cluster.actions)
    become(cluster, "decode-0", Role.PREFILL, Role.DECODE)
    cluster.say("decode-0", status())
    told = [hello for hello in cluster.messages("decode-1", Hello, before) if isinstance(hello, Hello)]
    assert [[peer.name for peer in hello.peers] for hello in told] == [["prefill-0", "decode-0"]]
    prefills = {cluster.submit(n, generation(n, first_token=n)).prefill for n in range(10, 18)}
    assert {address.name for address in prefills if address is not None} == {"prefill-0", "decode-0"}


def test_it_is_asked_until_it_has_changed() -> None:
    cluster = trio()
    ask(cluster, "decode-0", Role.PREFILL)
    cluster.run_until(2.1, heartbeats_of=NAMES)
    num_asked = len(cluster.messages("decode-0", ChangeRole))
    assert num_asked >= 4
    become(cluster, "decode-0", Role.DECODE, Role.DECODE)  # its process ended before it came to that
    cluster.run_until(cluster.now + 1.1, heartbeats_of=NAMES)
    assert len(cluster.messages("decode-0", ChangeRole)) > num_asked
    become(cluster, "decode-0", Role.PREFILL, Role.DECODE)
    before = len(cluster.actions)
    cluster.run_until(cluster.now + 1.1, heartbeats_of=NAMES)
    assert cluster.messages("decode-0", ChangeRole, before) == []


def test_rooms_of_a_worker_that_has_changed_go_elsewhere() -> None:
    cluster = trio()
    cluster.submit(1)
    name = "decode-0" if cluster.submits("decode-0") else "decode-1"
    other = "decode-1" if name == "decode-0" else "decode-0"
    cluster.tokens(name, 1, 0, [7, 8])
    ask(cluster, name, Role.PREFILL)
    become(cluster, name, Role.PREFILL, Role.DECODE)
    (submit,) = cluster.submits(other)
    assert (submit.prompt_len, len(submit.prompt) // 4) == (40, 42)


@pytest.mark.parametrize(
    ("name", "role", "words"),
    [
        ("prefill-0", Role.DECODE, "prefill-0 is the only prefill worker that takes requests: make another one"),
        ("decode-0", Role.UNIFIED, "decode-0 is a decode worker: only prefill and decode change into each other"),
    ],
)
def test_what_is_refused_is_said_and_changes_nothing(name: str, role: Role, words: str) -> None:
    cluster = trio()
    with pytest.raises(RoleRefused, match=words):
        ask(cluster, name, role)
    assert cluster.messages(name, ChangeRole) == []
    assert cluster.front.ready() is None


def test_a_worker_of_which_nothing_was_heard_is_nobodys_substitute() -> None:
    """It may be about to change, too: another front asked it."""
    cluster = Cluster(NAMES).all_ready()
    cluster.say("decode-0", status())
    with pytest.raises(RoleRefused, match="the only decode worker"):
        ask(cluster, "decode-0", Role.PREFILL)
    cluster.say("decode-1", status(draining=True))
    with pytest.raises(RoleRefused, match="the only decode worker"):
        ask(cluster, "decode-0", Role.PREFILL)
    with pytest.raises(RoleRefused, match="decode-1: draining; a worker changes its role while it takes requests"):
        ask(cluster, "decode-1", Role.PREFILL)


def test_who_has_the_role_keeps_it_and_who_is_not_there_is_named() -> None:
    cluster = trio()
    assert ask(cluster, "decode-0", Role.DECODE) is RoleAnswer.HELD
    with pytest.raises(UnknownWorker, match="no worker 'decode-7' here, but: prefill-0, decode-0, decode-1"):
        ask(cluster, "decode-7", Role.PREFILL)


def test_a_worker_that_was_started_anew_goes_back_to_the_role_it_had() -> None:
    """It comes back as what it is configured, and may be the last of the role that it had."""
    cluster = trio()
    ask(cluster, "decode-0", Role.PREFILL)
    become(cluster, "decode-0", Role.PREFILL, Role.DECODE)
    cluster.reboot("decode-0")
    before = len(cluster.actions)
    cluster.hello("decode-0")
    cluster.run_until(cluster.now + 1.1, heartbeats_of=NAMES)
    assert ChangeRole(role=Role.PREFILL, grace_ms=0) in cluster.messages("decode-0", ChangeRole, before)
    become(cluster, "decode-0", Role.PREFILL, Role.DECODE)
    become(cluster, "decode-0", Role.DECODE, Role.DECODE)  # another front asked it: that was meant
    before = len(cluster.actions)
    cluster.run_until(cluster.now + 1.1, heartbeats_of=NAMES)
    assert cluster.messages("decode-0", ChangeRole, before) == []


def test_a_front_that_starts_later_believes_the_worker() -> None:
    cluster = Cluster(NAMES)
    cluster.hello("prefill-0")
    cluster.hello("decode-1")
    become(cluster, "decode-0", Role.PREFILL, Role.DECODE)
    worker = cluster.front.workers.get(PeerName("decode-0"))
    assert worker is not None and (worker.role, worker.is_ready) == (Role.PREFILL, True)


@pytest.mark.parametrize(
    ("role", "configured", "words"),
    [
        ("prefill", "prefill", "role: configured decode, it says prefill"),
        ("decode", "prefill", "role: configured decode, it says prefill"),
        ("unified", "decode", "role: configured decode, it says unified"),
        ("nonsense", "decode", "role: configured decode, it says nonsense"),
    ],
)
def test_a_worker_of_another_configuration_is_refused(role: str, configured: str, words: str) -> None:
    cluster = Cluster()
    cluster.say("decode-0", Hello(role=role, compat=COMPAT, facts=facts(), configured_role=configured))
    assert words in (cluster.front.ready() or "")


def test_one_that_was_refused_at_first_is_taken_as_what_it_says() -> None:
    """By a front that has just started, and has met a worker that it does not fit (simulator seed 63000060487)."""
    cluster = Cluster(NAMES)
    other, own = (msgspec.structs.replace(facts(), kv_dtypes={"kv": dtype}) for dtype in ("bfloat16", "float32"))
    cluster.say("decode-1", Hello(role="decode", compat=COMPAT, facts=other))
    cluster.say("decode-0", Hello(role="prefill", compat=COMPAT, facts=own, configured_role="decode"))
    worker = cluster.front.workers.get(PeerName("decode-0"))
    assert worker is not None
    assert not worker.is_ready
    cluster.die("decode-1")
    assert worker.is_ready
    assert worker.role is Role.PREFILL
    assert worker.asked is None


def test_a_member_of_an_expert_group_keeps_its_role() -> None:
    cluster = trio()
    worker = cluster.front.workers.get(PeerName("decode-0"))
    assert worker is not None
    worker.member = replace(worker.member, group="experts-0")
    with pytest.raises(RoleRefused, match="decode-0 shares experts with other decode workers"):
        ask(cluster, "decode-0", Role.PREFILL)
