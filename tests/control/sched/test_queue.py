"""Order of admission: urgent ones, then arrival, with overtaking bounded in number and in time."""

import random
from collections.abc import Callable

from deltaserve.control.sched.policy import Ranking
from deltaserve.control.sched.queue import MAX_OVERTAKES, MAX_TRIES, MAX_WAIT_S, FairQueue, TryOutcome
from deltaserve.control.sched.request import Request
from tests.control.sched.toys import make_request


def requests(count: int) -> list[Request]:
    return [make_request(range(i + 1), max_tokens=1, arrival=float(i)) for i in range(count)]


def answers(**verdicts: TryOutcome) -> Callable[[Request], TryOutcome]:
    """By length of the prompt: `t3=TAKEN`."""
    return lambda request: verdicts.get(f"t{request.num_tokens}", TryOutcome.HELD_BACK)


def test_requests_wait_in_order_of_arrival_urgent_ones_first() -> None:
    queue = FairQueue()
    first, second, young, old = requests(4)
    young.is_urgent = old.is_urgent = True
    young.arrival, old.arrival = 9.0, 0.5
    for request in (first, second, young, old):
        queue.push(request)
    assert list(queue) == [old, young, first, second]
    assert len(queue) == 4


def test_only_those_refused_for_want_of_room_are_overtaken() -> None:
    queue = FairQueue()
    for request in requests(3):
        queue.push(request)
    for _ in range(MAX_OVERTAKES):
        late = make_request(range(50), max_tokens=1)
        queue.push(late)
        taken = queue.take(answers(t1=TryOutcome.HELD_BACK, t2=TryOutcome.NO_ROOM, t50=TryOutcome.TAKEN), 0.0)
        assert taken == [late]
    late = make_request(range(50), max_tokens=1)
    queue.push(late)
    assert queue.take(answers(t2=TryOutcome.NO_ROOM, t50=TryOutcome.TAKEN), 0.0) == []
    assert queue.take(answers(t1=TryOutcome.HELD_BACK, t2=TryOutcome.HELD_BACK, t50=TryOutcome.TAKEN), 0.0) == [late]


def test_overtaking_ends_after_so_long_from_the_first_refusal() -> None:
    queue = FairQueue()
    blocked, other = requests(2)
    queue.push(blocked)
    verdicts = answers(t1=TryOutcome.NO_ROOM, t2=TryOutcome.TAKEN)
    for now, passes in ((10.0, True), (10.0 + MAX_WAIT_S * 0.99, True), (10.0 + MAX_WAIT_S, False)):
        queue.push(other)
        assert (queue.take(verdicts, now) == [other]) is passes
    queue.discard(blocked)
    queue.push(blocked)
    assert queue.take(verdicts, 20.0) == [other]  # a new wait


def test_one_that_is_overtaken_no_more_stalls_those_behind_it_until_it_is_taken() -> None:
    queue = FairQueue()
    blocked, other = requests(2)
    queue.push(blocked)
    queue.push(other)
    for now, stalls in ((10.0, False), (10.0 + MAX_WAIT_S, True)):
        queue.take(answers(t1=TryOutcome.NO_ROOM), now)
        assert queue.is_stalled_by(blocked) is stalls
        assert not queue.is_stalled_by(other)
    queue.take(answers(t1=TryOutcome.TAKEN), 12.0)
    assert not queue.is_stalled_by(blocked)


def test_a_long_queue_costs_a_bounded_number_of_tries() -> None:
    queue = FairQueue()
    for request in requests(5 * MAX_TRIES):
        queue.push(request)
    tried: list[Request] = []

    def refuse(request: Request) -> TryOutcome:
        tried.append(request)
        return TryOutcome.NO_ROOM

    assert queue.take(refuse, 0.0) == []
    assert len(tried) == MAX_TRIES


def test_those_tried_before_are_not_tried_for_a_new_one() -> None:
    queue = FairQueue()
    for request in requests(5):
        queue.push(request)
    tried: list[Request] = []

    def refuse(request: Request) -> TryOutcome:
        tried.append(request)
        return TryOutcome.NO_ROOM if request.num_tokens == 2 else TryOutcome.HELD_BACK

    queue.take(refuse, 0.0)
    assert len(tried) == 5
    late, urgent = make_request(range(50), max_tokens=1), make_request(range(60), max_tokens=1)
    queue.push(late)
    queue.take_new(refuse, 0.0)
    queue.take_new(refuse, 0.0)
    assert tried[5:] == [late]
    urgent.is_urgent = True
    queue.push(urgent)
    queue.take_new(refuse, 0.0)
    assert tried[6:] == list(queue), "it goes before the others: all are tried in their order"


def test_new_ones_pass_one_that_found_no_room_as_often_as_if_all_were_tried() -> None:
    """The same requests are taken in the same order, whichever way they are tried."""
    for seed in range(200):
        draw = random.Random(seed)
        whole, part = FairQueue(), FairQueue()
        verdicts: dict[Request, TryOutcome] = {}
        now = 0.0
        for turn in range(60):
            now += draw.choice((0.0, 0.1))
            for _ in range(draw.randrange(3)):
                request = make_request(range(3), max_tokens=1, arrival=now)
                verdicts[request] = draw.choices(list(TryOutcome), (2, draw.choice((0, 1)), 3))[0]
                whole.push(request)
                part.push(request)
            expected = whole.take(verdicts.__getitem__, now)
            taken = (part.take_new if turn else part.take)(verdicts.__getitem__, now)
            assert taken == expected, (seed, turn)


def test_discarding_what_is_not_queued_changes_nothing() -> None:
    queue = FairQueue()
    (request,) = requests(1)
    queue.discard(request)
    assert (len(queue), queue.num_discarded) == (0, 0)


def test_ranked_requests_go_best_first_and_starved_ones_before_all() -> None:
    queue = FairQueue(Ranking(lambda request: -request.num_tokens))
    for request in requests(3):
        queue.push(request)
    tried: list[int] = []

    def note(request: Request) -> TryOutcome:
        tried.append(request.num_tokens)
        return TryOutcome.NO_ROOM if request.num_tokens == 3 else TryOutcome.HELD_BACK

    queue.take(note, 0.0)
    assert tried == [1, 2, 3]
    for _ in range(MAX_OVERTAKES):
        queue.push(make_request(range(50), max_tokens=1))
        queue.take(answers(t3=TryOutcome.NO_ROOM, t50=TryOutcome.TAKEN), 0.0)
    tried.clear()
    queue.take(note, 0.0)
    assert tried == [3]
