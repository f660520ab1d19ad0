"""Fifty streams are answered as if nothing had happened, whatever happens to a worker. No time is judged."""

import asyncio

from tests.chaos.streams import Fault, measure

NUM_STREAMS = 50
OUTPUT_LEN = 160
"""Tokens of an answer, of which the fault strikes in the first ones."""


def test_streams_outlive_a_reset_and_the_death_of_their_worker() -> None:
    for outcome in asyncio.run(measure(NUM_STREAMS, list(Fault), OUTPUT_LEN)):
        assert outcome.num_struck > 0, "a fault that struck nobody"
        assert (outcome.num_right, outcome.errors) == (NUM_STREAMS, ()), outcome
