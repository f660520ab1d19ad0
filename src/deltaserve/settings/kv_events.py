"""`--kv-events-config`: where workers tell routers of others what enters and leaves their caches."""

import re

import msgspec

_TCP = re.compile(r"tcp://(?P<host>\*|[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):(?P<port>[1-9]\d{0,4})\Z")
_IPC = re.compile(r"ipc://(?P<path>/[^\x00\n]{1,80})\Z")


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object that the option holds, or one worker's part of it. Its words are those of vLLM and SGLang."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    """`zmq`, or `null`: nothing is told."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """What the first worker binds; the next ones, the ports above it."""
    replay_endpoint: str | None = None
    """Where listeners ask again for what they missed; None: they cannot."""
    topic: str = ""
    buffer_steps: int = 10_000
    """Batches kept for those who ask again."""
    hwm: int = 100_000
    """Batches that wait for a slow listener; it misses further ones."""
    max_queue_size: int = 100_000
    """Accepted and without effect: a worker's loop never waits for what is published."""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_worker(self, index: int, name: str) -> "KvEventsConfig":
        """The part of the worker with this number among those of a machine."""
        replay = None if self.replay_endpoint is None else _shifted(self.replay_endpoint, index, name)
        return msgspec.structs.replace(self, endpoint=_shifted(self.endpoint, index, name), replay_endpoint=replay)

    @property
    def hosts(self) -> list[str]:
        """Addresses that are listened on."""
        found = (_TCP.match(endpoint) for endpoint in (self.endpoint, self.replay_endpoint or ""))
        return [match["host"].strip("[]") for match in found if match is not None]


def read_kv_events(text: str) -> KvEventsConfig:
    """The option's value. Raises ValueError with what is wrong in it."""
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if config.publisher not in ("zmq", "null"):
        raise ValueError(f"publisher {config.publisher[:40]!r}: zmq and null there are")
    for endpoint in filter(None, (config.endpoint, config.replay_endpoint)):
        match = _TCP.match(endpoint)
        if match is None and _IPC.match(endpoint) is None:
            raise ValueError(f"endpoint {endpoint[:80]!r}: must be tcp://HOST:PORT or ipc:///PATH")
        if match is not None and int(match["port"]) > 65535:
            raise ValueError(f"endpoint {endpoint[:80]!r}: there is no such port")
    if min(config.buffer_steps, config.hwm) < 1 or len(config.topic) > 200:
        raise ValueError("buffer_steps and hwm are at least 1, a topic has at most 200 characters")
    return config


def _shifted(endpoint: str, index: int, name: str) -> str:
    match = _TCP.match(endpoint)
    if match is None:
        return f"{endpoint}-{name}"
    return f"tcp://{match['host']}:{int(match['port']) + index}"
