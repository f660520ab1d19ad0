"""The sockets that a server listens on, and the certificate for them."""

import errno
import os
import socket
import ssl
import stat
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.server.settings import ServerSettings, TlsFiles
from deltaserve.settings.host_and_port import authority

BACKLOG = 1024
_SEND_BUFFER_BYTES = 32 * 1024
"""Bytes that a connection buffers. The kernel would grow it to megabytes, and hide for as long that nobody reads."""


def listen_for_api(settings: ServerSettings) -> socket.socket:
    """The socket of the API: on its Unix path, or its host and port. Raises ConfigError."""
    if settings.uds is None:
        return listen_on(settings.host, settings.port, reuse_port=settings.num_fronts > 1)
    return _listen_on_path(settings.uds)


def _listen_on_path(path: str) -> socket.socket:
    """A Unix socket. One that a server left behind is taken over, one that somebody listens on is not."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if stat.S_ISSOCK(_mode(path)) and sock.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
        sock.close()
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds {path}: cannot listen there ({error.strerror or error})") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return sock


def _mode(path: str) -> int:
    """Kind and rights of what is there; 0: nothing is."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def listen_on(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket on an address of this machine; port 0: any. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        both = host == "::" and socket.has_dualstack_ipv6()
        sock = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port, dualstack_ipv6=both
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {authority(host, port)} ({error.strerror or error})") from error
    # Connections inherit both. asyncio sets the first only on sockets that were made with an explicit protocol, and
    # without it a stream's first event waits 40 ms for the client's acknowledgement of the head.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return sock


def check_certificate(files: TlsFiles) -> None:
    """Raises ConfigError where these files are no certificate with its key."""
    for flag, path in (("--ssl-certfile", files.certificate), ("--ssl-keyfile", files.key)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag} {path}: no such file")
    try:
        # An encrypted key would be asked for on a terminal: the password makes it an error.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, OSError) as error:
        key = "" if files.key is None else f" with --ssl-keyfile {files.key}"
        problem = "not PEM files of a certificate and its key, without a password"
        raise ConfigError(f"--ssl-certfile {files.certificate}{key}: {problem} ({error})") from error
