"""The processes that take requests: one, or several on one port that each know all workers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec

from deltaserve.process.front.front_spec import FrontSpec
from deltaserve.settings.config import Settings
from deltaserve.settings.host_and_port import authority, is_loopback
from deltaserve.settings.urls import api_url


def front_specs(spec: FrontSpec, settings: Settings) -> list[FrontSpec]:
    """`spec` for each front. Several have names, admin ports and shares of the queue of their own.

    They tell each other nothing: each hears from every worker what its tree holds and how much it has to do, so that
    all choose by the same facts; what another placed since the last report is seen in the next one.
    """
    count = settings.network.fronts
    if count == 1:
        return [spec]
    share = -(-spec.server.max_queue // count)
    return [
        msgspec.structs.replace(
            spec,
            name=f"{spec.name}-{index}",
            server=replace(spec.server, num_fronts=count, max_queue=share, admin_host=host, admin_port=port),
        )
        for index, (host, port) in enumerate(admin_addresses(settings))
    ]


def admin_addresses(settings: Settings) -> list[tuple[str, int]]:
    """Where each front has its admin routes on a listener of their own; empty: they are the API's."""
    network = settings.network
    host = network.admin_host or "127.0.0.1"
    if network.admin_port is not None:
        first = network.admin_port
    elif network.fronts > 1 or _needs_own_listener(settings):
        first = network.port + 1
    else:
        return []
    return [(host, first + index) for index in range(network.fronts)]


def view_url(settings: Settings) -> str | None:
    """Page that shows what the server does; None: no browser gets there, behind a Unix socket."""
    network, own = settings.network, admin_addresses(settings)
    if not own:
        return None if network.uds is not None else f"{api_url(network)}/view"
    scheme = "http" if network.ssl_certfile is None else "https"
    return f"{scheme}://{authority(*own[0])}/view"


def _needs_own_listener(settings: Settings) -> bool:
    network = settings.network
    has_keys = settings.security.api_key_file is not None
    return has_keys or network.admin_host is not None or not is_loopback(network.host)


class FrontPort(NamedTuple):
    """An address that fronts listen on."""

    flag: str
    """What of the settings says so."""
    host: str
    port: int


def front_ports(settings: Settings) -> Iterator[FrontPort]:
    """The API's, then those of the admin routes where they are others."""
    network = settings.network
    if network.uds is None:
        yield FrontPort("--port", network.host, network.port)
    words = "--admin-port" if network.admin_port is not None else "admin port (one above --port)"
    for index, (host, port) in enumerate(admin_addresses(settings)):
        yield FrontPort(words if index == 0 else f"{words}, of front {index}:", host, port)
