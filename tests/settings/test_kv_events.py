"""`--kv-events-config`: what is read, what is refused, and which endpoints each worker has."""

import pytest

from deltaserve.settings.config import NetworkSettings, SecuritySettings, Settings
from deltaserve.settings.kv_events import read_kv_events
from deltaserve.settings.rules import breaches


def problems(text: str, *, insecure: bool = False) -> list[str]:
    network, security = NetworkSettings(kv_events_config=text), SecuritySettings(insecure_network=insecure)
    found = breaches(Settings(network=network, security=security), "serve")
    return [problem for problem in found if problem.startswith("--kv-events-config")]


def test_each_worker_has_endpoints_of_its_own() -> None:
    config = read_kv_events('{"endpoint": "tcp://[::1]:5557", "replay_endpoint": "ipc:///run/kv"}')
    second = config.of_worker(1, "decode-0")
    assert (second.endpoint, second.replay_endpoint) == ("tcp://[::1]:5558", "ipc:///run/kv-decode-0")


@pytest.mark.parametrize("text", ['{"publisher": "null"}', '{"enable_kv_cache_events": false}'])
def test_it_may_be_off(text: str) -> None:
    assert not read_kv_events(text).is_on
    assert not problems(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"endpoint": 7}',
        '{"endpoint": "tcp://127.0.0.1"}',
        '{"endpoint": "tcp://127.0.0.1:99999"}',
        '{"endpoint": "http://127.0.0.1:80"}',
        '{"endpoint": "ipc://relative"}',
        '{"publisher": "kafka"}',
        '{"buffer_steps": 0}',
        '{"hwm": -1}',
        '{"topics": "kv"}',
        '{"topic": "' + "x" * 300 + '"}',
    ],
)
def test_nonsense_is_refused_in_one_line(text: str) -> None:
    (problem,) = problems(text)
    assert "\n" not in problem


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "10.0.0.1", "llm.example", "[::]"])
def test_prompts_leave_this_machine_only_when_asked_to(host: str) -> None:
    text = f'{{"endpoint": "tcp://{host}:5557"}}'
    (problem,) = problems(text)
    assert "beyond this machine" in problem
    assert not problems(text, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_loopback_needs_no_word(host: str) -> None:
    assert not problems(f'{{"endpoint": "tcp://{host}:5557"}}')
