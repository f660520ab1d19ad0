"""Weighings with anything in them, for properties of the rule and of what is told of it."""

from hypothesis import strategies as st

from deltaserve.control.engine.near import PromptPace, Weighing
from deltaserve.core.wire.messages import Cores, PrefillWay


def drawn_weighings(
    counts: st.SearchStrategy[int], most_rows: int, paces: st.SearchStrategy[PromptPace]
) -> st.SearchStrategy[Weighing]:
    """`counts`: of tokens, each drawn by itself, so that more may be filed than is missing."""
    ways = st.builds(
        PrefillWay, queue_len=counts, lacking_len=counts, handover_len=counts, pulled_len=counts, pull_len=counts
    )
    return st.builds(
        Weighing,
        missing_len=counts,
        backlog_len=counts,
        num_rows=st.integers(0, most_rows),
        way=ways,
        most_len=counts,
        cores=st.sampled_from(Cores),
        filed_len=counts,
        load_len=counts,
        pace=paces,
    )
