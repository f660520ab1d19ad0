"""Rooms in the front under arbitrary events: exactly one end each, and what was delivered is a true prefix (I7, I8).

The workers of this test are not honest: any may say anything about any room at any time, die, come back, or fall
silent. They lie about everything but token values: the token at a position is a function of the room.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import unpack_u32
from deltaserve.core.wire.messages import Events, PromptLogprobs, Submit
from tests.control.front.cluster import Cluster, generation, room, status

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "unified-0")
DECODERS = ("decode-0", "decode-1", "unified-0")
PROMPT_LEN = 6


def token_at(number: int, position: int) -> int:
    return 1000 * number + position


def logprob_at(number: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(-float(1000 * number + position))


@dataclass(frozen=True, slots=True)
class Op:
    """One event: its kind, and numbers that every kind reads in its own way."""

    kind: str
    worker: int
    number: int
    start: int
    count: int


def submit(cluster: Cluster, op: Op) -> None:
    wants_logprobs = 0 if op.number % 3 == 0 else None
    sample = generation(
        op.number, prompt_len=PROMPT_LEN, deadline_s=1.0 + op.start, prompt_logprobs=wants_logprobs, max_tokens=64
    )
    if room(op.number) in cluster.ends:
        return  # rooms are never used again
    try:
        assert len(cluster.ask(op.number, sample)) <= 1
    except RequestFailed as error:
        assert error.reason in (FailReason.NO_PEER, FailReason.ROOM_IN_USE, FailReason.OVERLOADED)


def tokens(cluster: Cluster, op: Op) -> None:
    values = [token_at(op.number, op.start + i) for i in range(op.count)]
    cluster.tokens(DECODERS[op.worker % 3], op.number, op.start, values)


def next_tokens(cluster: Cluster, op: Op) -> None:
    """What an honest worker would say: without it few rooms get far."""
    live = cluster.front.rooms.get(room(op.number))
    if live is not None and live.placement is not None:
        values = [token_at(op.number, live.num_tokens + i) for i in range(op.count)]
        cluster.tokens(live.placement.decode, op.number, live.num_tokens, values)


def prompt_logprobs(cluster: Cluster, op: Op) -> None:
    start, end = 1 + op.start, min(PROMPT_LEN, 1 + op.start + op.count)
    values = tuple(logprob_at(op.number, i) for i in range(start, end))
    message = PromptLogprobs(room=room(op.number), start=start, values=values)
    cluster.say(DECODERS[op.worker % 3], message)


def failed(cluster: Cluster, op: Op) -> None:
    reason = list(FailReason)[op.start % len(FailReason)]
    cluster.failed(DECODERS[op.worker % 3], op.number, reason, retryable=op.count % 2 == 0)


def finish(cluster: Cluster, op: Op) -> None:
    delivered = len(cluster.output(op.number))
    if delivered:
        cluster.finish(op.number, min(op.count + 1, delivered))


def wait(cluster: Cluster, op: Op) -> None:
    alive = [name for i, name in enumerate(NAMES) if i != op.worker]
    cluster.run_until(cluster.now + 0.4 * (1 + op.count), heartbeats_of=alive if op.start else [])


def reboot(cluster: Cluster, op: Op) -> None:
    cluster.reboot(NAMES[op.worker])
    cluster.hello(NAMES[op.worker])


def events(cluster: Cluster, op: Op) -> None:
    keys = bytes(16 * op.count)
    cluster.say(NAMES[op.worker], Events(first=op.start, stored=keys, evicted=b"", snapshot=op.number % 2 == 0))


KINDS: dict[str, Callable[[Cluster, Op], None]] = {
    "submit": submit,
    "tokens": tokens,
    "next_tokens": next_tokens,
    "prompt_logprobs": prompt_logprobs,
    "finished": lambda cluster, op: cluster.finished(DECODERS[op.worker % 3], op.number, op.start + op.count),
    "failed": failed,
    "cancel": lambda cluster, op: cluster.cancel(op.number),
    "finish": finish,
    "die": lambda cluster, op: cluster.die(NAMES[op.worker]),
    "hello": lambda cluster, op: cluster.hello(NAMES[op.worker]),
    "reboot": reboot,
    "status": lambda cluster, op: cluster.say(NAMES[op.worker], status(100 * op.start, draining=op.count == 3)),
    "events": events,
    "wait": wait,
}
OFTEN = ["submit", "next_tokens", "next_tokens", "hello"]

ops = st.builds(
    Op,
    kind=st.sampled_from([*KINDS, *OFTEN]),
    worker=st.integers(0, len(NAMES) - 1),
    number=st.integers(1, 5),
    start=st.integers(0, 8),
    count=st.integers(0, 3),
)


@given(st.lists(ops, max_size=60))
def test_every_room_ends_once_and_what_came_is_a_true_prefix(script: list[Op]) -> None:
    cluster = Cluster(NAMES).all_ready()
    for op in script:
        KINDS[op.kind](cluster, op)  # Cluster checks integrity and lone ends after each step
    cluster.run_until(cluster.now + 12.0)
    assert len(cluster.front.rooms) == 0
    submitted = {submit.room for name in DECODERS for submit in cluster.submits(name)}
    never_placed = set(cluster.ends) - submitted
    assert submitted <= set(cluster.ends)
    assert all(isinstance(cluster.ends[room], RequestFailed) for room in never_placed), "held, and no worker came back"
    for number in range(1, 6):
        output = cluster.output(number)
        assert output == tuple(token_at(number, i) for i in range(len(output)))
        values = [value for delta in cluster.deltas.get(room(number), []) for value in delta.prompt_logprobs]
        assert values == [logprob_at(number, 1 + i) for i in range(len(values))]
    for worker in cluster.front.workers:
        assert (worker.own_rooms, worker.own_tokens) == (0, 0)


@given(st.lists(ops, max_size=60))
def test_each_submit_of_a_room_is_numbered_and_carries_a_true_prefix(script: list[Op]) -> None:
    cluster = Cluster(NAMES).all_ready()
    for op in script:
        KINDS[op.kind](cluster, op)
    everything = [f.envelope.body for f in cluster.sent() if isinstance(f.envelope.body, Submit)]
    for number in range(1, 6):
        sent = [submit for submit in everything if submit.room == room(number)]
        assert [submit.epoch for submit in sent] == list(range(1, len(sent) + 1))
        assert len({(s.prompt[: 4 * s.prompt_len], s.keys, s.sampling.seed) for s in sent}) <= 1
        outputs = [unpack_u32(submit.prompt[4 * submit.prompt_len :]) for submit in sent]
        assert all(o == [token_at(number, i) for i in range(len(o))] for o in map(list, outputs))


@given(st.lists(ops, max_size=40))
def test_equal_events_give_equal_actions(script: list[Op]) -> None:
    first, second = Cluster(NAMES).all_ready(), Cluster(NAMES).all_ready()
    for op in script:
        KINDS[op.kind](first, op)
        KINDS[op.kind](second, op)
    assert list(map(repr, first.actions)) == list(map(repr, second.actions))


def test_the_script_reaches_every_kind_of_end() -> None:
    """The strategies above are not vacuous: one written script per kind of end."""
    cluster = Cluster(NAMES).all_ready()
    scripts = {1: ["submit", "next_tokens", "finished"], 2: ["submit", "failed"], 4: ["submit", "cancel"]}
    for number, kinds in scripts.items():
        for kind in kinds:
            where = cluster.front.rooms.get(room(number))
            worker = DECODERS.index(str(where.placement.decode)) if where and where.placement else 0
            KINDS[kind](cluster, Op(kind, worker, number, 0, 1))
    assert cluster.failure(1) is None and cluster.output(1) == (1000,)
    assert (cluster.failure(2), cluster.failure(4)) == (FailReason.TRANSFER_FAILED, FailReason.CANCELLED)
