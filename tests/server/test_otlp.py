"""Spans for a collector that does not answer."""

import threading

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from deltaserve.server import otlp
from deltaserve.server.spans import TimedSpan
from tests.patience import PATIENCE_S


class _Silent:
    """Sends a batch for as long as it is not let go."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.is_sending = threading.Event()

    def export(self, batch: list[ReadableSpan]) -> None:
        self.is_sending.set()
        self.is_over.wait()

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_silent_collector_keeps_no_front_from_ending(is_sending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = _Silent()
    monkeypatch.setattr(otlp, "OTLPSpanExporter", lambda *_, **__: silent)
    monkeypatch.setattr(otlp, "_SEND_S", 0.1)
    if is_sending:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    sink = otlp.open_sink("http://127.0.0.1:1/v1/traces", "front")
    sink.put(TimedSpan("generate m", 1.0, 2.0), None)
    assert not is_sending or silent.is_sending.wait(PATIENCE_S)
    closing = threading.Thread(target=sink.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    try:
        assert not closing.is_alive()
        assert silent.is_sending.wait(PATIENCE_S), "the last spans were not even tried"
    finally:
        silent.is_over.set()
