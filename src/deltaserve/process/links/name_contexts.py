"""Contexts of dialled host names.

ZeroMQ looks a name up on the thread that carries all links of a context, at each try, and until the name server has
answered nothing moves there. So each name has a context of its own, and one whose server is silent holds up nobody
else; where there are very many names, some share one.
"""

import ipaddress
import socket
from collections import Counter
from concurrent.futures import Future
from threading import Thread
from urllib.parse import urlsplit

import zmq

from deltaserve.process.children.own_thread import in_own_thread
from deltaserve.process.links.ends import Context

_MOST = 32
"""A context takes two threads and some ten descriptors."""


def host_name(url: str) -> str | None:
    """The name in a url that has one in place of an address."""
    try:
        host = urlsplit(url).hostname
        ipaddress.ip_address(host or "")
    except ValueError:
        return host
    return None


def look_up(host: str) -> Future[str | None]:
    """Why a name cannot be resolved, None if it can be, once that is known. A name server may take long."""
    return in_own_thread(f"look up {host[:40]}", lambda: _fault_of(host))


def _fault_of(host: str) -> str | None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "it is none"
    return None


class NameContexts:
    """As many contexts as there are names, up to a bound."""

    def __init__(self) -> None:
        self._in_use: Counter[Context] = Counter()
        """Context |-> dialers; the longest unused comes first."""

    def take(self) -> Context:
        """The context of one more name."""
        if len(self._in_use) < _MOST and all(self._in_use.values()):
            self._in_use[zmq.Context()] = 0
        context = min(self._in_use, key=lambda each: self._in_use[each])
        self._in_use[context] += 1
        return context

    def give_back(self, context: Context) -> None:
        """The dialer of a name has been closed."""
        count = self._in_use.pop(context)
        self._in_use[context] = count - 1

    def close(self, linger_ms: int) -> None:
        """Frames have that long to leave. A thread that waits for a name server is not waited for."""
        ends = [Thread(target=context.destroy, args=(linger_ms,), daemon=True) for context in self._in_use]
        for end in ends:
            end.start()
        for end in ends:
            end.join(linger_ms / 1000)
        self._in_use.clear()
