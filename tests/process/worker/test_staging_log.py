"""Peers without staging memory are named once they are attached; what went directly is told with the reason."""

import logging

import pytest

from deltaserve.core.wire.messages import RankEnd
from deltaserve.process.worker.build import StagingLog
from tests.control.transfer.staged import StagedScene
from tests.control.transfer.test_ranks import D, Scene


def test_a_peer_without_staging_memory_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    endpoint = StagedScene(1, 2).writer.endpoints[0]
    StagingLog().look_at_peer(endpoint, D, (RankEnd(metadata=b"m", regions=()),))
    assert f"{D} has no staging memory" in caplog.text
    caplog.clear()
    plain = Scene(1, 2).writer.endpoints[0]
    StagingLog().look_at_peer(plain, D, (RankEnd(metadata=b"m", regions=()),))
    assert not caplog.text


def test_what_went_directly_is_told_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    endpoint, log = StagedScene(1, 2).writer.endpoints[0], StagingLog()
    endpoint.counters["staged_writes"] = 5
    for fallbacks in range(5):
        endpoint.counters["staging_fallbacks"] = fallbacks
        log.look(endpoint)
    assert caplog.text.count("go through staging memory") == 1
    assert [n for n in range(5) if f"{n} staged transfers went directly" in caplog.text] == [1, 2, 4]
