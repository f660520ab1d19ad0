"""benchmarks/bench_seed.py: its loads, the model it makes dearer, and how it reads a server's histograms."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench_seed import EARLIER_LEN, FULL, QUICK, SeedLoad, quantile, widen
from deltaserve.commands.load.recall import ASK
from tests.compute.executor.world import reference_logprobs
from tests.recall_models import STATE_MODEL

MODEL = STATE_MODEL.with_name("recall-micro")
MOST_CONTEXT = 767
"""Tokens of the longest prompt that models/recall-micro answers rightly."""


@pytest.mark.parametrize("load", [*FULL, *QUICK], ids=lambda load: f"{load.name}-{load.num_requests}")
def test_a_load_is_as_it_says(load: SeedLoad) -> None:
    turns = [conversation.turns[0] for conversation in load.generate()]
    assert len(turns) == load.num_requests
    assert max(len(turn.tokens) + turn.output_len for turn in turns) <= MOST_CONTEXT
    shortest, longest = load.document_len.least, load.document_len.most
    own = [EARLIER_LEN * load.num_earlier.least + 2, EARLIER_LEN * load.num_earlier.most + 2]
    assert all(shortest + own[0] <= len(turn.tokens) <= longest + own[1] for turn in turns)
    prefixes = {turn.tokens[:shortest] for turn in turns}
    assert len(prefixes) == load.num_documents
    assert len({turn.output_len for turn in turns}) > 1
    assert load.generate() == load.generate() != replace(load, seed=2).generate()


def test_added_heads_change_no_answer(tmp_path: Path) -> None:
    wide = widen(MODEL, 3, tmp_path)
    turn = QUICK[0].generate()[0].turns[0]
    tokens = [*turn.tokens, *turn.stand_in]
    (last_question,) = [i for i in range(len(turn.tokens) - 2, len(turn.tokens)) if tokens[i] == ASK]
    best = reference_logprobs(wide, tokens).argmax(-1).tolist()
    assert tuple(best[last_question + 1 : -1]) == turn.expected
    assert (wide / "model.safetensors").stat().st_size > (MODEL / "model.safetensors").stat().st_size


def test_quantiles_of_what_came_between_two_looks() -> None:
    before = {0.1: 5.0, 0.2: 5.0, 0.4: 9.0, float("inf"): 9.0}
    after = {0.1: 5.0, 0.2: 15.0, 0.4: 29.0, float("inf"): 30.0}  # 10 up to 0.2, 10 up to 0.4, 1 beyond
    assert quantile(before, after, 0.25) == pytest.approx(0.1525)
    assert quantile({}, {0.1: 2.0, float("inf"): 2.0}, 0.5) == pytest.approx(0.05)
    assert quantile(before, after, 0.99) is None
    assert quantile(after, after, 0.5) is None
