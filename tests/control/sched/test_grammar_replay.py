"""A matcher is brought behind exactly the output, whatever it stood behind before."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.sched.grammar_replay import GrammarReplay
from deltaserve.core.tokens import pack_u32

REFUSED = 13


@dataclass
class Tape:
    """Remembers what it consumed; refuses one token, and now and then to go back."""

    goes_back: bool
    tokens: list[int] = field(default_factory=list)
    num_consumed: int = 0

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        self.tokens += sampled_tokens
        self.num_consumed += len(sampled_tokens)
        return REFUSED not in sampled_tokens

    def rollback(self, num_tokens: int) -> bool:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]
        return self.goes_back


tokens = st.lists(st.integers(0, 300).filter(lambda token: token != REFUSED), max_size=6)


@given(outputs=st.lists(tokens, max_size=8), goes_back=st.booleans())
def test_it_stands_behind_the_output_and_nothing_else(outputs: list[list[int]], goes_back: bool) -> None:
    replay = GrammarReplay(lambda: Tape(goes_back))
    for output in outputs:
        matcher = replay.behind(pack_u32(output))
        assert matcher is not None
        assert matcher.tokens == output


@given(output=tokens, more=tokens)
def test_a_grown_output_costs_what_is_new_of_it(output: list[int], more: list[int]) -> None:
    replay = GrammarReplay(lambda: Tape(True))
    replay.behind(pack_u32(output))
    matcher = replay.behind(pack_u32(output + more))
    assert matcher is not None
    assert matcher.num_consumed == len(output) + len(more)


@given(before=tokens, behind=tokens)
def test_an_output_that_is_none_of_the_grammars_is_told_and_the_next_one_starts_anew(
    before: list[int], behind: list[int]
) -> None:
    replay = GrammarReplay(lambda: Tape(True))
    assert replay.behind(pack_u32([*before, REFUSED])) is None
    matcher = replay.behind(pack_u32(behind))
    assert matcher is not None
    assert matcher.tokens == behind
