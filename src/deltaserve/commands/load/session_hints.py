"""What clients of sessions could say of the turns to come, as `kv_hints`."""

from collections.abc import Sequence
from dataclasses import replace

from deltaserve.commands.load.agents import Habits
from deltaserve.commands.load.traffic import ChatTurn, Conversation, Fork
from deltaserve.core.hints import NO_HINTS, KvHints

RETAIN_MEANS = 3.0
"""Mean times of a tool that a client asks to be waited for: of those drawn, 95 % are shorter."""


def with_hints(session: Conversation, habits: Habits) -> Conversation:
    """The same requests. Before a tool runs, its mean time is told; the last turn of a session or fork says that none
    follows. Who leaves early does not know it: the last turn that is sent then says what any other does."""
    forks = tuple(
        Fork(fork.after, _told(fork.turns, habits, habits.num_turns - fork.after - 1)) for fork in session.forks
    )
    return replace(session, turns=_told(session.turns, habits, habits.num_turns), forks=forks)


def _told(turns: Sequence[ChatTurn], habits: Habits, num_meant: int) -> tuple[ChatTurn, ...]:
    """`num_meant`: turns that the branch has unless it is left."""
    waits = KvHints(retain_ms=round(1e3 * RETAIN_MEANS * habits.pause_s)) if habits.pause_s else NO_HINTS
    return tuple(
        replace(turn, hints=KvHints(done=True) if number == num_meant else waits)
        for number, turn in enumerate(turns, 1)
    )
