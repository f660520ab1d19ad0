"""An engine's process is started where descriptors are many, and told of where there are none."""

from contextlib import suppress

import pytest

from deltaserve.core.transport import TransportError
from deltaserve.transports.mooncake.options import MooncakeOptions
from deltaserve.transports.mooncake.process import EngineProcess
from tests.descriptors import no_more_files, only_high_files


def test_without_a_descriptor_there_is_no_engine() -> None:
    with no_more_files(), pytest.raises(TransportError, match="no process for an engine: Too many open files"):
        EngineProcess(MooncakeOptions(), ())


def test_an_engine_is_heard_by_a_process_that_has_very_many_descriptors() -> None:
    """Also where its library is not installed, which it says."""
    with only_high_files(1100):
        engine = EngineProcess(MooncakeOptions(), ())
        with suppress(TransportError):
            engine.wait_ready()
        engine.kill()
