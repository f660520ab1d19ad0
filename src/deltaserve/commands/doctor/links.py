"""Whether workers of other machines can be reached from here, and hold the same cluster key."""

import errno
import socket
from collections.abc import Iterator, Sequence

import zmq

from deltaserve.core.errors import ConfigError
from deltaserve.core.findings import Level, Line
from deltaserve.process.front.front_spec import FrontWorker
from deltaserve.process.links.ends import Change, Dialer
from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.security import LinkSecurity

_CONNECT_S = 3.0
_HANDSHAKE_S = 5.0
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


def check_links(workers: Sequence[FrontWorker], security: LinkSecurity) -> Iterator[Line]:
    """Dials each; nothing is said to it."""
    for worker in workers:
        if worker.url is not None:
            fault = link_fault(worker.url.removeprefix("tcp://"), security)
            text = f"{worker.name}: {fault or 'listens, and has this cluster key'}"
            yield Line(Level.OK if fault is None else Level.FAIL, "link", text)


def link_fault(address: str, security: LinkSecurity) -> str | None:
    """What is in the way of a link to HOST:PORT; None: a member of the cluster listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except ConnectionRefusedError:
        return "nobody listens there: it is not started yet, or it has another port"
    except TimeoutError:
        return f"no answer within {_CONNECT_S:.0f} s: a firewall drops what is sent there, or there is no such machine"
    except UnicodeError:
        return f"nobody knows the name {host}: it is none"
    except socket.gaierror as error:
        return f"nobody knows the name {host}: {error.strerror}"
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return f"{error.strerror}: there is no such machine, it is off, or no route leads there"
        return error.strerror or str(error)
    return _handshake_fault(f"tcp://{address}", security)


def _handshake_fault(url: str, security: LinkSecurity) -> str | None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dialer = Dialer(context, url, LinkLimits(), security)
        try:
            changes = dialer.take_changes() if dialer.monitor.poll(int(_HANDSHAKE_S * 1000)) else []
        finally:
            dialer.close(linger_ms=0)
    except ConfigError as error:
        return str(error)
    finally:
        context.destroy(linger=0)
    if Change.UP in changes:
        return None
    return "what listens there ends every handshake: another cluster key, or none, or no worker, or it hangs"
