"""What waits is counted once, however many requests share it."""

import random

import pytest

from deltaserve.control.engine.backlog import Backlog
from deltaserve.control.sched.request import Request
from deltaserve.core.ids import RowId
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.core.wire.messages import CacheUse
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import Duo
from tests.control.sched.toys import make_request

PAGE = 4
PROMPT = list(range(100))
"""A prompt of 25 pages."""


def waiting(prompt: list[int], matched: int = 0) -> Request:
    request = make_request(prompt, max_tokens=8)
    request.matched_len = matched
    return request


def shares(request: Request) -> bool:
    return request.cache is CacheUse.NORMAL


def backlog(*requests: Request, granted: tuple[Request, ...] = ()) -> Backlog:
    return Backlog.of(requests, set(granted), PAGE, shares)


def test_requests_of_their_own_count_in_full() -> None:
    assert backlog() == Backlog(0, 0)
    assert backlog(waiting(PROMPT), waiting([7, *PROMPT])) == Backlog(2, 201)
    assert backlog(waiting([1, 2]), waiting([1, 2])) == Backlog(2, 4)  # no full page to share


def test_samples_of_one_prompt_count_once_and_their_last_tokens_each() -> None:
    assert backlog(*(waiting(PROMPT) for _ in range(127))) == Backlog(127, 100)
    assert backlog(*(waiting([*PROMPT, 1, 2]) for _ in range(127))) == Backlog(127, 100 + 127 * 2)


def test_what_one_of_them_has_is_there_for_all() -> None:
    ahead = waiting([*PROMPT, 1])
    ahead.row, ahead.num_computed = RowId(0), 60
    assert backlog(ahead, waiting([*PROMPT, 1])) == Backlog(1, 40 + 2)
    ahead.num_computed = 101
    granted = waiting([*PROMPT, 1])
    assert backlog(granted, waiting([*PROMPT, 1]), granted=(granted,)) == Backlog(2, 1)
    assert backlog(waiting(PROMPT, 40), waiting(PROMPT, 80)) == Backlog(2, 20)


def test_a_running_rows_next_token_is_no_backlog() -> None:
    running = waiting(PROMPT)
    running.row, running.num_computed = RowId(0), 99
    assert backlog(running) == Backlog(0, 0)


def test_a_common_beginning_counts_once() -> None:
    system = PROMPT[:60]
    asked = [waiting([*system, *range(1000 * i, 1000 * i + 40)]) for i in range(1, 11)]
    assert backlog(*asked) == Backlog(10, 60 + 10 * 40)
    there = waiting([*system, *range(50_000, 50_008)], 60)
    assert backlog(*asked, there) == Backlog(11, 10 * 40 + 8)


def test_who_shares_nothing_counts_in_full() -> None:
    bypass = make_request(PROMPT, max_tokens=8, cache=CacheUse.BYPASS)
    assert backlog(bypass, waiting(PROMPT)) == Backlog(2, 200)


@pytest.mark.parametrize("seed", range(20))
def test_never_less_than_the_union_and_never_more_than_the_sum(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    requests = [waiting(rng.choice(prompts)) for _ in range(30)]
    pages = {bytes(r.keys[:end]) for r in requests for end in range(16, len(r.keys) + 1, 16)}
    tails = sum(r.num_tokens - len(r.keys) // 16 * PAGE for r in requests)
    union = len(pages) * PAGE + tails
    assert union <= backlog(*requests).num_tokens <= sum(len(r.tokens) // TOKEN_BYTES for r in requests)


def test_workers_count_many_samples_of_one_prompt_as_one() -> None:
    duo = Duo(Shape(max_running=2))
    prompt = [token % 90 for token in PROMPT]
    asked = [duo.ask([*prompt, 91], 3) for _ in range(20)]
    most: dict[str, Backlog] = {}

    def all_over() -> bool:
        for name, worker in duo.world.workers.items():
            counted = worker.instance._backlog()
            most[name] = max(most.get(name, counted), counted, key=lambda b: b.num_requests)
            assert counted.num_tokens <= len(PROMPT) + counted.num_requests + 2
        return all(a.answer.ends for a in asked)

    duo.until(all_over, limit_s=60.0)
    assert all(counted.num_requests >= 10 for counted in most.values())
    duo.settle(*asked)
