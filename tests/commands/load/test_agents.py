"""Traffic of agents: prefixes that sessions share, forks that go on behind an answer, branches that are left."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from deltaserve.commands.load.agents import Agent, AgentTraffic, Habits, RandomAgent, RecallAgent
from deltaserve.commands.load.recall import DocumentShape
from deltaserve.commands.load.session_hints import with_hints
from deltaserve.commands.load.traffic import Conversation, Fork, Lengths, TokenRange
from deltaserve.core.hints import NO_HINTS, KvHints
from tests.commands.bench.answering_server import AnsweringServer, Manners
from tests.commands.load.test_load_client import measure

LENGTHS = Lengths(system_prompt_len=90, question_len=10, output_len=6)


def random_agent(rng: Random) -> Agent:
    return RandomAgent.make(rng, LENGTHS, TokenRange())


recall_agent = partial(RecallAgent, shape=DocumentShape(8), answer_len=5)


def test_sessions_of_an_agent_begin_alike_and_the_first_of_them_finds_nothing() -> None:
    sessions = AgentTraffic(3, 4, random_agent, Habits(abandoned_share=0)).generate(seed=2)
    prefixes = [session.turns[0].tokens[:90] for session in sessions]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    seen: set[tuple[int, ...]] = set()
    for session, prefix in zip(sessions, prefixes, strict=True):
        assert session.turns[0].known_len == (90 if prefix in seen else 0)
        assert [len(turn.tokens) for turn in session.turns] == [100] + [10] * 9
        seen.add(prefix)


def test_shares_are_those_asked_for() -> None:
    traffic = AgentTraffic(1, 400, random_agent, Habits(num_turns=10, fork_share=0.3, abandoned_share=0.5))
    sessions = traffic.generate(seed=1)
    assert 0.2 < sum(bool(session.forks) for session in sessions) / 400 < 0.4
    assert 0.35 < sum(len(session.turns) < 10 for session in sessions) / 400 < 0.55
    for session in sessions:
        for fork in session.forks:
            assert fork.after < len(session.turns) - 1
            assert 1 <= len(fork.turns) < 10 - fork.after
    assert traffic.generate(1) == sessions != traffic.generate(2)


def test_tools_take_the_time_that_they_are_said_to_take_on_average() -> None:
    (session,) = AgentTraffic(1, 1, random_agent, Habits(num_turns=400, pause_s=2.0, abandoned_share=0)).generate(4)
    pauses = [turn.pause_s for turn in session.turns]
    assert pauses[0] == 0
    assert 1.6 < sum(pauses) / 399 < 2.4


@pytest.mark.parametrize(
    "habits", [{"num_turns": 0}, {"pause_s": -1.0}, {"fork_share": 1.1}, {"abandoned_share": -0.1}]
)
def test_habits_that_nobody_has_are_refused(habits: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Habits(**habits)  # type: ignore[arg-type]


def test_forks_go_on_behind_the_answer_that_they_fork_from() -> None:
    """Each request's prompt is the history of its branch, answers of the server among it."""
    traffic = AgentTraffic(2, 3, recall_agent, Habits(num_turns=4, pause_s=0.001, fork_share=1.0, abandoned_share=0.3))
    sessions = traffic.generate(seed=5)
    server = AnsweringServer(Manners())
    measurement = measure(server, sessions)
    assert [record.error for record in measurement.records] == [None] * sum(each.num_requests for each in sessions)
    assert all(record.tokens_right == 5 for record in measurement.records)
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    for session in sessions:
        histories: list[tuple[int, ...]] = []
        history: tuple[int, ...] = ()
        for turn in session.turns:
            history += turn.tokens
            assert history in prompts
            history += turn.expected or ()
            histories.append(history)
        for fork in session.forks:
            history = histories[fork.after]
            for turn in fork.turns:
                history += turn.tokens
                assert history in prompts
                history += turn.expected or ()


def test_what_a_request_adds_is_what_nobody_said_before() -> None:
    traffic = AgentTraffic(1, 2, recall_agent, Habits(num_turns=3, fork_share=1.0, abandoned_share=0))
    measurement = measure(AnsweringServer(Manners()), traffic.generate(seed=3))
    new = {}
    for record in measurement.records:
        new[record.conversation, record.branch, record.turn] = record.prompt_len - record.known_len
    assert new.pop((0, 0, 0)) == 24 + 2  # the document, and the first question
    assert set(new.values()) == {2}


def test_hints_are_said_before_a_tool_and_at_the_end() -> None:
    """Who leaves early does not say that it is done; nothing else of a session changes."""
    habits = Habits(num_turns=4, pause_s=2.0, fork_share=0.5, abandoned_share=0.4)
    sessions = AgentTraffic(3, 20, random_agent, habits).generate(seed=6)
    waits, done = KvHints(retain_ms=6000), KvHints(done=True)
    num_done = num_left = 0
    for plain, session in zip(sessions, [with_hints(session, habits) for session in sessions], strict=True):
        assert without_hints(session) == plain
        for turns, before in [(session.turns, 0), *((fork.turns, fork.after + 1) for fork in session.forks)]:
            is_whole = before + len(turns) == 4
            num_done, num_left = num_done + is_whole, num_left + (not is_whole)
            assert [turn.hints for turn in turns[:-1]] == [waits] * (len(turns) - 1)
            assert turns[-1].hints == (done if is_whole else waits)
    assert num_done > 40
    assert num_left > 10


def without_hints(session: Conversation) -> Conversation:
    forks = tuple(
        Fork(fork.after, tuple(replace(turn, hints=NO_HINTS) for turn in fork.turns)) for fork in session.forks
    )
    return replace(session, turns=tuple(replace(turn, hints=NO_HINTS) for turn in session.turns), forks=forks)


def test_nobody_waits_for_a_tool_that_takes_no_time() -> None:
    habits = Habits(num_turns=3, fork_share=0, abandoned_share=0)
    (session,) = AgentTraffic(1, 1, random_agent, habits).generate(seed=1)
    assert [turn.hints for turn in with_hints(session, habits).turns] == [NO_HINTS, NO_HINTS, KvHints(done=True)]


def test_a_branch_that_fails_ends_alone() -> None:
    traffic = AgentTraffic(1, 1, recall_agent, Habits(num_turns=4, fork_share=1.0, abandoned_share=0))
    (session,) = traffic.generate(seed=3)
    measurement = measure(AnsweringServer(Manners(fail_from=session.forks[0].after + 1)), [session])
    failed = [record for record in measurement.records if record.error is not None]
    assert {record.branch for record in failed} == {0, 1}
    assert {record.turn for record in failed} == {session.forks[0].after + 1}
