"""`deltaserve doctor [MODEL]`: what this machine offers, where a server would listen, what stands in the way."""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltaserve.commands.doctor.command import look_at
from deltaserve.commands.doctor.machine import check_device, check_listeners, check_software
from deltaserve.commands.doctor.model import check_model
from deltaserve.commands.doctor.server import check_server
from deltaserve.core.errors import ConfigError
from deltaserve.core.findings import Level, Line, verdict
from deltaserve.launch.clusters.cluster_kinds import cluster_kinds
from deltaserve.process.front.secrets import read_api_keys
from deltaserve.server.settings import ApiKey
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.flag_help import describe
from deltaserve.settings.flags.merge import load
from deltaserve.settings.flags.options import option_of
from deltaserve.transports.registry import transport_kinds

_SIZES = (
    "--page-size",
    "--num-pages",
    "--mem-fraction-static",
    "--tp-size",
    "--kv-cache-dtype",
    "--max-running-requests",
    "--context-length",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `deltaserve doctor`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder of a checkpoint, or GGUF file, to look at")
    parser.add_argument("--host", default="127.0.0.1", help="address the API would listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="port the API would listen on (default 30000)")
    sizes = parser.add_argument_group("memory that is planned for MODEL, as with `serve`")
    for option in map(option_of, _SIZES):
        sizes.add_argument(option.flag, metavar=option.metavar, help=describe(option))
    parser.add_argument("--base-url", metavar="URL", help="a running server to look at; then no address is tried")
    parser.add_argument("--admin-url", metavar="URL", help="where it has its admin routes; with keys, one port above")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys as for `serve`; the first admin key is sent"
    )


def run(arguments: argparse.Namespace) -> int:
    """0, or 1 when a check fails. One line per finding, as it is found."""
    option_of("--port").check(arguments.port, "--port")
    for flag, value in (("--admin-url", arguments.admin_url), ("--api-key-file", arguments.api_key_file)):
        if value is not None and arguments.base_url is None:
            raise ConfigError(f"{flag} {value}: needs --base-url, the server to look at")
    settings = _as_serve(arguments)
    keys = read_api_keys(arguments.api_key_file) if arguments.api_key_file else ()
    return _tell(_all_lines(arguments, settings, keys))


def run_for(command: str, argv: Sequence[str]) -> int:
    """Do what `run` does, for `deltaserve COMMAND ARGV`."""
    return _tell(look_at(command, argv))


def _tell(lines: Iterator[Line]) -> int:
    levels = []
    for line in lines:
        print(line, flush=True)
        levels.append(line.level)
    print(verdict(levels))
    return 1 if Level.FAIL in levels else 0


def _as_serve(arguments: argparse.Namespace) -> Settings | None:
    """What `serve MODEL` would read: these flags, and the environment. None without a MODEL. Raises ConfigError."""
    given = {flag: getattr(arguments, option_of(flag).field) for flag in _SIZES}
    sizes = [word for flag, text in given.items() if text is not None for word in (flag, text)]
    if arguments.model is None:
        if sizes:
            raise ConfigError(f"{sizes[0]}: needs a MODEL, whose memory is planned")
        return None
    return load("serve", "", [arguments.model, *sizes], os.environ).settings


def _all_lines(arguments: argparse.Namespace, settings: Settings | None, keys: Sequence[ApiKey]) -> Iterator[Line]:
    yield from check_software()
    yield from check_device()
    if arguments.base_url is None:
        yield from check_listeners(arguments.host, arguments.port)
    for kind in transport_kinds():
        yield from kind.checks(None)
    for launcher in cluster_kinds():
        yield from launcher.checks()
    if settings is not None:
        yield from check_model(settings)
    if arguments.base_url is not None:
        yield from check_server(arguments.base_url, arguments.admin_url, keys)
