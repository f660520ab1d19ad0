"""What the HTTP front may be told. Frozen; resolved once by the command line."""

import os
from dataclasses import dataclass, field
from enum import Enum

from deltaserve.core.ids import Namespace, Role
from deltaserve.settings.host_and_port import is_loopback


class Right(Enum):
    """What the holder of a key may do."""

    API = "api"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A secret, the tenant it stands for, and its rights."""

    secret: str = field(repr=False)
    namespace: Namespace
    rights: frozenset[Right] = frozenset({Right.API})


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with those that vouch for it, and its key, as PEM files."""

    certificate: str
    key: str | None
    """None: it is in the file of the certificate."""


@dataclass(frozen=True, slots=True)
class Half:
    """The one worker that a front speaks for, where a router of another project sends each request to a prefill and a
    decode worker at once."""

    role: Role
    host: str
    """Where other workers reach it; prefill's is what requests name."""
    port: int
    network: str
    """Network on which the prefill workers are that requests name."""
    tp_size: int
    max_running: int


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on what one peer may cost before its request is understood."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_bodies_bytes: int = 256 * 1024 * 1024
    """Most bytes of all bodies that are being read at a time, until they are jobs."""
    max_values_bytes: int = 128 * 1024 * 1024
    """Most bytes of the values that bodies are read to, as estimated. One body may be more than that; then it is
    alone."""
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_s: float = 30.0
    least_bytes_per_s: int = 4096
    """Mean rate at which a client takes the rest of a complete answer. Parts of a stream have `StreamTimes`."""
    linger_s: float = 5.0
    """How long the rest of a refused body is read and dropped, so that the answer is not lost to a reset."""
    linger_silent_s: float = 1.0
    """Time for the same while nothing of the body comes: a client may have announced more than it sends."""
    max_connections: int = 8192
    max_connections_per_address: int | None = None
    """Most connections from one address; None: no limit, for behind a proxy or an address translation all clients are
    one address. Never limits loopback."""


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Time limits of one stream, in seconds."""

    head_s: float = 5.0
    """The head waits this long for the first event, so that a failure before it has a status of its own."""
    silence_s: float = 15.0
    """After this long without an event something is sent: proxies give up connections that are silent."""
    stall_s: float = 30.0
    """A reader that takes nothing for this long is cut."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything the front needs beside the engine and the tokenizer."""

    model_name: str
    """What answers call the model."""
    other_names: tuple[str, ...] = ()
    """Names that requests may call it by, too."""
    model_path: str | None = None
    """Path of the model as the command line names it."""
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    """Path of the Unix socket on which the API listens in place of host and port."""
    tls: TlsFiles | None = None
    """None: plain HTTP."""
    admin_host: str | None = None
    admin_port: int | None = None
    """Port of the admin routes, where they are to have a listener of their own whatever else holds; see
    `admin_address`."""
    api_keys: tuple[ApiKey, ...] = ()
    metrics_names: tuple[str, ...] = ()
    """Other servers under whose names metrics are told as well: keys of foreign_metrics.NAMES."""
    shows_metrics: bool = False
    """Whether `/metrics` is on the API's port, too, and needs no key there."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in Host headers that are answered on loopback without keys, beside those of this machine."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API and read its answers; `*`: any."""
    http: HttpLimits = field(default_factory=HttpLimits)
    half: Half | None = None
    """None: requests are answered whole."""
    default_max_tokens: int | None = None
    """Output tokens of a chat that names no limit; None: what the context leaves, which is the most in any case.
    /v1/completions has OpenAI's 16."""
    num_fronts: int = 1
    """Processes that listen on the API's port; the kernel gives each connection to one of them."""
    num_workers: int = 0
    """Workers that this process has links with: the links' descriptors are not given to connections."""
    max_queue: int = 1024
    """Samples that wait for their first token; when full, the next request gets 429 before its body is parsed."""
    max_queue_tokens: int = 16 * 1024 * 1024
    """Prompt tokens of the requests that wait."""
    max_samples: int = 1024
    """Most samples of one request: prompts times `n`."""
    stream_interval: int = 1
    """Tokens between two events of a stream; the first token is never held."""
    stream_times: StreamTimes = field(default_factory=StreamTimes)
    default_deadline_s: float = 600.0
    max_deadline_s: float = 3600.0
    grace_s: float = 30.0
    """How long running requests may go on after a drain began."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """All of them, the one that answers carry first."""
        return self.model_name, *self.other_names

    @property
    def model_paths(self) -> tuple[str, ...]:
        """The model's path in full, and as the command line names it: requests may call the model by either."""
        return () if self.model_path is None else (os.path.abspath(self.model_path), self.model_path)

    @property
    def num_tenants(self) -> int:
        return max(1, len({key.namespace for key in self.api_keys}))

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """(host, port) of the admin routes, by default (127.0.0.1, the port above that of the API).

        None: they are on the API's port, unless asked otherwise when it is loopback without keys.
        """
        if is_loopback(self.host) and not self.api_keys and self.admin_host is None and self.admin_port is None:
            return None
        above = self.port + 1 if self.port else 0
        return self.admin_host or "127.0.0.1", above if self.admin_port is None else self.admin_port
