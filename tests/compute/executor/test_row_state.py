"""A row's tokens, what it drew, and its penalty history."""

import numpy as np
import pytest
import torch

from deltaserve.compute.executor.row_state import Row
from deltaserve.control.sched.plan import RowOpen
from deltaserve.core.errors import StateError
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32

CPU = torch.device("cpu")


def make(tokens: list[int], prompt_len: int | None = None, context: int = 16) -> Row:
    sampling = SamplingParams(max_tokens=4, seed=0)
    count = len(tokens) if prompt_len is None else prompt_len
    return Row(RowOpen(RowId(0), sampling, pack_u32(tokens), count), context, vocab_size=20)


def given(*tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(tokens, np.int64)


def test_drawn_tokens_follow_the_known_ones() -> None:
    row = make([5, 6, 7])
    row.draw(StepIndex(4), 3, 9)
    assert row.tokens(0, 10).tolist() == [5, 6, 7, 9]
    assert row.drawn_in(StepIndex(4)) == 9


def test_a_step_that_drew_nothing_reads_zero() -> None:
    row = make([5])
    assert row.drawn_in(StepIndex(0)) == 0
    row.draw(StepIndex(1), 1, 8)
    assert row.drawn_in(StepIndex(2)) == 0


def test_known_tokens_given_again_change_nothing() -> None:
    row = make([5, 6, 7])
    row.give(1, given(6))
    row.give(2, given(7))
    assert row.tokens(0, 10).tolist() == [5, 6, 7]
    row.give(2, given(7, 8))
    assert row.tokens(0, 10).tolist() == [5, 6, 7, 8]


def test_other_tokens_replace_what_follows() -> None:
    row = make([5, 6, 7, 8])
    row.give(1, given(9))
    assert row.tokens(0, 10).tolist() == [5, 9]


def test_a_gap_is_refused() -> None:
    with pytest.raises(StateError, match="only 1 are known"):
        make([5]).give(2, given(7))
    with pytest.raises(StateError, match="context is 16"):
        make([1] * 17)


def test_history_counts_output_apart_from_the_prompt() -> None:
    row = make([5, 6, 7, 7], prompt_len=2)  # resumed after two output tokens
    history = row.history(CPU)
    assert history.output_counts.nonzero().flatten().tolist() == [7]
    assert history.output_counts[7] == 2
    row.draw(StepIndex(0), 4, 5)
    assert row.history(CPU) is history
    assert history.seen.nonzero().flatten().tolist() == [5, 6, 7]
    assert history.output_counts[5] == 1


def test_history_forgets_replaced_tokens() -> None:
    row = make([5, 6], prompt_len=1)
    row.history(CPU)
    row.give(1, given(8))
    assert row.history(CPU).seen.nonzero().flatten().tolist() == [5, 8]


def test_what_the_device_counts_is_not_known_behind_replaced_tokens() -> None:
    row = make([5, 6], prompt_len=1)
    row.num_counted = 2
    row.give(1, given(6))
    row.give(2, given(7))
    assert row.num_counted == 2
    row.give(1, given(8))
    assert row.num_counted == 0
