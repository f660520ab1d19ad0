"""Two revisions of a model behind one front: each serves by itself, and no room is of both."""

import pytest
from msgspec.structs import replace

from deltaserve.control.front.client import RoleRefused
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.messages import Hello, PromptLogprobs, Submit
from tests.control.front.cluster import (
    COMPAT,
    FINGERPRINT,
    PAGE_SIZE,
    SECRET,
    Cluster,
    generation,
    member,
    other_facts,
    room,
    status,
)

OLD = ("prefill-0", "decode-0")
NEW = ("prefill-1", "decode-1")
UPGRADED = COMPAT | {"fingerprint": "model-2"}


def says_new(cluster: Cluster, *names: str) -> None:
    """These workers are of the second revision."""
    for name in names:
        cluster.hello(name, UPGRADED, other_facts("model-2"))


def two_revisions(*more: str, new: tuple[str, ...] = NEW) -> Cluster:
    """`more`: further workers of the first one."""
    cluster = Cluster((*OLD, *more, *new))
    for name in (*OLD, *more):
        cluster.hello(name)
    says_new(cluster, *new)
    return cluster


def told(cluster: Cluster, decode: str) -> list[str]:
    """Prefill workers that it was told of last."""
    hellos = [m for m in cluster.messages(decode, Hello) if isinstance(m, Hello)]
    return [peer.name for peer in hellos[-1].peers]


def placed(cluster: Cluster, number: int) -> tuple[str, str]:
    placement = cluster.front.rooms.get(room(number)).placement  # type: ignore[union-attr]
    assert placement is not None and placement.prefill is not None
    return placement.prefill, placement.decode


@pytest.mark.parametrize("method", ["ttft", "round_robin"])
def test_every_pair_is_of_one_revision_and_both_serve(method: str) -> None:
    cluster = Cluster((*OLD, *NEW), load_balance_method=method)
    for name in OLD:
        cluster.hello(name)
    says_new(cluster, *NEW)
    pairs = set()
    for number in range(20):
        cluster.submit(number, generation(number, first_token=50 * number))
        pairs.add(placed(cluster, number))
    assert pairs == {OLD, NEW}


def test_a_revision_that_has_measured_nothing_gets_new_prompts_too() -> None:
    """The first one is far quicker than what is assumed of an unknown worker."""
    cluster = two_revisions()
    for name in OLD:
        cluster.say(name, replace(status(), prefill_tokens_per_s=1e6, decode_step_s=1e-3))
    pairs = set()
    for number in range(4):
        cluster.submit(number, generation(number, first_token=50 * number))
        pairs.add(placed(cluster, number))
    assert pairs == {OLD, NEW}


def test_decode_workers_are_told_of_the_prefill_workers_of_their_revision() -> None:
    cluster = two_revisions("prefill-2")
    assert told(cluster, "decode-0") == ["prefill-0", "prefill-2"]
    assert told(cluster, "decode-1") == ["prefill-1"]
    cluster.reboot("prefill-2")
    says_new(cluster, "prefill-2")  # exchanged in its place
    assert told(cluster, "decode-0") == ["prefill-0"]
    assert told(cluster, "decode-1") == ["prefill-2", "prefill-1"]


def test_a_prompt_has_the_keys_of_the_model_that_it_goes_to() -> None:
    cluster = two_revisions()
    sample = generation(1)
    for number in range(2):
        submit = cluster.submit(number, generation(number))
        _, decode = placed(cluster, number)
        model = FINGERPRINT if decode == "decode-0" else "model-2"
        seed = seed_key(SECRET, model, PAGE_SIZE, sample.namespace)
        assert submit.keys == extend_keys(seed, sample.prompt, PAGE_SIZE)


def test_a_revision_without_its_other_half_serves_nothing_and_says_why() -> None:
    cluster = two_revisions(new=("prefill-1",))
    for number in range(8):
        cluster.submit(number, generation(number, first_token=50 * number))
        assert placed(cluster, number) == OLD
    assert cluster.front.workers.lone() == {
        PeerName("prefill-1"): "does not fit decode-0: fingerprint: here model-2, on decode-0 model"
    }
    assert cluster.front.ready() is None
    cluster.leave("decode-0")
    assert "decode-0: leaving" in (cluster.front.ready() or "")


def test_limits_are_those_of_whoever_can_serve() -> None:
    cluster = two_revisions(new=("prefill-1",))
    small = replace(other_facts("model-2"), max_context_len=64)
    cluster.hello("prefill-1", UPGRADED, small)
    limits = cluster.front.limits(cluster.now)
    assert limits is not None and limits.max_context_len == 2048


def _on(revision: tuple[str, str], cluster: Cluster, number: int = 1) -> Submit:
    """A room that was placed on that revision."""
    for draw in range(number, number + 40):
        submit = cluster.submit(draw, generation(draw, first_token=50 * draw))
        if placed(cluster, draw) == revision:
            _room_numbers[id(cluster)] = draw
            return submit
    raise AssertionError(f"nothing was placed on {revision}")


_room_numbers: dict[int, int] = {}


def begun(cluster: Cluster, revision: tuple[str, str]) -> int:
    """Number of a room that has its first two tokens from that revision."""
    _on(revision, cluster)
    number = _room_numbers.pop(id(cluster))
    cluster.tokens(revision[1], number, 0, [7, 8])
    return number


def test_a_stream_goes_on_within_its_revision_when_its_worker_dies() -> None:
    cluster = two_revisions("decode-2")
    number = begun(cluster, OLD)
    cluster.die("decode-0")
    assert placed(cluster, number) == ("prefill-0", "decode-2")
    (submit,) = [s for s in cluster.submits("decode-2") if s.room == room(number)]
    assert len(submit.prompt) == 4 * (submit.prompt_len + 2)


def test_what_goes_on_is_not_told_of_a_prefill_worker_that_was_exchanged_in_its_place() -> None:
    """Found by the simulator (seed 110000000633): the address was that of the placement, made before the exchange."""
    cluster = two_revisions()
    number = begun(cluster, OLD)
    cluster.reboot("prefill-0")
    says_new(cluster, "prefill-0")
    cluster.tokens("decode-0", number, 3, [10])  # a gap: decode is asked for the rest
    assert cluster.submits("decode-0")[-1].epoch == 2
    assert cluster.submits("decode-0")[-1].prefill is None
    cluster.tokens("decode-0", number, 2, range(9, 15))
    cluster.finished("decode-0", number, output_len=8)
    assert cluster.failure(number) is None


def test_what_has_not_begun_goes_to_another_revision() -> None:
    cluster = two_revisions()
    _on(OLD, cluster)
    number = _room_numbers.pop(id(cluster))
    cluster.die("decode-0")
    assert placed(cluster, number) == NEW


def test_a_stream_waits_for_a_worker_of_its_revision_that_is_expected_back() -> None:
    cluster = two_revisions()
    number = begun(cluster, OLD)
    cluster.die("decode-0")
    cluster.run_until(cluster.now + 20.0, heartbeats_of=("prefill-0", *NEW))
    assert cluster.end(number) is None
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert placed(cluster, number) == OLD


@pytest.mark.parametrize("how", ["exchanged in its place", "it left", "not heard of again"])
def test_a_stream_whose_revision_has_gone_ends_and_says_why(how: str) -> None:
    cluster = two_revisions()
    number = begun(cluster, OLD)
    revision = str(cluster.front.workers.get(PeerName("decode-0")).revision)  # type: ignore[union-attr]
    if how == "exchanged in its place":
        cluster.reboot("decode-0")
        says_new(cluster, "decode-0")
    elif how == "it left":
        cluster.die("decode-0")
        cluster.leave("decode-0", grace_s=0.0)
    cluster.run_until(cluster.now + 50.0, heartbeats_of=("prefill-0", *NEW))
    end = cluster.end(number)
    assert cluster.failure(number) is FailReason.NO_PEER
    assert f"it began on revision {revision}" in str(end)
    assert not [s for name in ("decode-1", "decode-0") for s in cluster.submits(name) if s.epoch > 1]


def test_a_stream_is_not_ended_while_no_other_revision_serves() -> None:
    """One pair alone: whoever comes next may be of the same revision, under another name."""
    cluster = two_revisions(new=())
    number = begun(cluster, OLD)
    cluster.die("decode-0")
    cluster.leave("decode-0", grace_s=0.0)
    cluster.run_until(cluster.now + 50.0, heartbeats_of=["prefill-0"])
    assert cluster.end(number) is None
    cluster.boots[PeerName("decode-5")] = cluster.boots[PeerName("decode-0")]
    cluster.up(member("decode-5"))
    cluster.hello("decode-5")
    assert placed(cluster, number) == ("prefill-0", "decode-5")


def test_a_leaving_worker_keeps_a_stream_that_no_other_of_its_revision_can_take() -> None:
    cluster = two_revisions()
    number = begun(cluster, OLD)
    cluster.leave("decode-0", grace_s=0.0)
    cluster.run_until(cluster.now + 5.0, heartbeats_of=(*OLD, *NEW))
    assert placed(cluster, number) == OLD
    cluster.tokens("decode-0", number, 2, range(10, 16))
    cluster.finished("decode-0", number, output_len=8)
    cluster.tick()
    assert cluster.failure(number) is None and cluster.output(number) == (7, 8, *range(10, 16))
    assert cluster.front.workers.get(PeerName("decode-0")) is None


def test_a_prefill_worker_that_fails_is_replaced_by_one_of_the_same_revision() -> None:
    cluster = two_revisions("prefill-2")
    _on(OLD, cluster)
    number = _room_numbers.pop(id(cluster))
    cluster.failed("decode-0", number, FailReason.TRANSFER_FAILED, retryable=True)
    assert placed(cluster, number) == ("prefill-2", "decode-0")


def test_prompt_logprobs_bind_a_room_as_tokens_do() -> None:
    cluster = two_revisions()
    number = begun_by_prompt(cluster)
    cluster.die("decode-0")
    live = cluster.front.rooms.get(room(number))
    assert live is not None and live.placement is None


def begun_by_prompt(cluster: Cluster) -> int:
    """Number of a room on the old revision whose client has log-probabilities of its prompt, and no token."""
    for number in range(1, 40):
        cluster.submit(number, generation(number, first_token=50 * number, prompt_logprobs=0))
        if placed(cluster, number) == OLD:
            break
    values = tuple(TokenLogprobs(-1.0, ()) for _ in range(3))
    cluster.say("decode-0", PromptLogprobs(room=room(number), start=1, values=values))
    return number


def test_a_leaving_pair_tries_again_what_no_other_revision_may_go_on_with() -> None:
    """Found by the simulator (seed 18000000060161): a fence between them, while both were to leave, ended it."""
    cluster = two_revisions()
    number = begun_by_prompt(cluster)
    for name in OLD:
        cluster.leave(name)
    cluster.failed("decode-0", number, FailReason.PEER_FENCED, retryable=True)
    assert placed(cluster, number) == OLD
    assert len([submit for submit in cluster.submits("decode-0") if submit.room == room(number)]) == 2


def test_what_has_not_begun_is_not_tried_again_on_a_leaving_pair() -> None:
    cluster = two_revisions()
    _on(OLD, cluster)
    number = _room_numbers.pop(id(cluster))
    for name in OLD:
        cluster.leave(name)
    cluster.failed("decode-0", number, FailReason.PEER_FENCED, retryable=True)
    assert placed(cluster, number) == NEW


def test_the_last_of_a_revision_keeps_its_role() -> None:
    cluster = two_revisions()
    for name in (*OLD, *NEW):
        cluster.say(name, status())
    with pytest.raises(RoleRefused, match=r"prefill-0 is the only prefill worker of revision [0-9a-f]{12} that takes"):
        cluster.front.change_role(PeerName("prefill-0"), Role.DECODE, 1.0)


def test_each_worker_tells_its_revision() -> None:
    revisions = {worker.name: worker.revision for worker in two_revisions().front.stats().workers}
    assert revisions["prefill-0"] == revisions["decode-0"] != revisions["prefill-1"] == revisions["decode-1"]
    assert Cluster().front.stats().workers[0].revision is None


def test_the_front_doubts_only_when_all_revisions_fail() -> None:
    cluster = two_revisions()
    breakers = cluster.front.placer.breakers
    for _ in range(3):
        breakers.failed(PeerName("prefill-0"), cluster.now)
    assert cluster.front.doubt(cluster.now) is None
    for _ in range(3):
        breakers.failed(PeerName("decode-1"), cluster.now)
    assert cluster.front.doubt(cluster.now) == "prefill-0, decode-1: one request after the other fails there"
