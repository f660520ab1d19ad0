"""Which Host headers are answered where no key is asked for.

A page of another site can reach a server on loopback if its own name is made to point here after it was loaded (DNS
rebinding): for the browser it is the page's own server then. What the browser cannot hide is the name, in the Host
header. So a listener on loopback without keys answers to names of this machine, and to those it is told of.
"""

import ipaddress
import re
from urllib.parse import unquote

from starlette.types import Scope

from deltaserve.server.settings import Right, ServerSettings
from deltaserve.settings.host_and_port import is_loopback


def allowed_hosts(settings: ServerSettings, right: Right) -> frozenset[str] | None:
    """Names that the listener of this right answers to, beside this machine's own. None: to any, as no web page can
    reach a Unix socket."""
    address = settings.admin_address if right is Right.ADMIN else None
    host = settings.host if address is None else address[0]
    if settings.api_keys or not is_loopback(host) or (settings.uds is not None and address is None):
        return None
    return frozenset({host.lower(), *(name.lower() for name in settings.allowed_hosts)})


_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+?)\.?)(?::[0-9]*)?")


def host_name(header: str) -> str | None:
    """The name in a Host header, without a port: `localhost:30000`, `[::1]:30000`. None: there is none in it."""
    found = _HOST.fullmatch(header.strip().lower())
    return found and (found["address"] or found["name"])


_ABSOLUTE = re.compile(rb"(?i:https?)://(?P<host>[^/?#]*)(?P<path>/.*)?", re.DOTALL)


def in_origin_form(scope: Scope) -> Scope:
    """The scope of a request whose target is a whole URL, as clients of proxies write it, as if its target were the
    path alone and its Host header the URL's (RFC 9112, 3.2.2). Any other scope as it is."""
    found = _ABSOLUTE.fullmatch(scope["raw_path"])
    if found is None:
        return scope
    raw_path = found["path"] or b"/"
    headers = [(b"host", found["host"]), *(pair for pair in scope["headers"] if pair[0] != b"host")]
    return {**scope, "raw_path": raw_path, "path": unquote(raw_path.decode("ascii")), "headers": headers}


def is_own_name(name: str) -> bool:
    """Whether a name means this machine wherever it is looked up: `localhost`, a name below it, a loopback address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
