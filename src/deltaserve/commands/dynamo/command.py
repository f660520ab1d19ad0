"""`deltaserve dynamo`: a running server becomes a worker of NVIDIA Dynamo, behind its frontend and router."""

import argparse
import asyncio
import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from deltaserve.commands.client.bearer_key import authorization
from deltaserve.commands.dynamo.asked_server import AskedServer
from deltaserve.commands.dynamo.translation import ServerFacts
from deltaserve.commands.dynamo.worker_options import WorkerEnded, WorkerOptions, model_folder
from deltaserve.core.errors import ConfigError
from deltaserve.process.children.interrupts import hold_for_successor
from deltaserve.process.children.terminal import say
from deltaserve.settings.host_and_port import is_loopback
from deltaserve.settings.urls import DEFAULT_URL, server_root

_INSTALL = "pip install 'deltaserve[dynamo]'"
_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST")
"""Where Dynamo's runtime reads the address that it listens on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `deltaserve dynamo`."""
    parser.description = (
        "Registers a running server (`serve` or `router`: prefill and decode behind it are its own affair) as one "
        "worker of a model with NVIDIA Dynamo, whose frontend then sends it tokens. Ends with a stop signal; while the "
        "server is away, so is the worker."
    )
    add = parser.add_argument
    add("--base-url", default=DEFAULT_URL, metavar="URL", help=f"the server (default {DEFAULT_URL})")
    add("--api-key-file", type=Path, metavar="FILE", help="keys as for `serve`; the first is sent")
    add("--model-path", type=Path, metavar="FOLDER", help="the model, for its tokenizer (default: where the server is)")
    add("--chat-template", metavar="FILE", help="a template in place of the model's own; Dynamo's frontend applies it")
    add("--host", help="address on which Dynamo reaches this worker (default: DYN_TCP_RPC_HOST, or 127.0.0.1)")
    add("--namespace", help="Dynamo's (default: DYN_NAMESPACE, or dynamo)")
    add("--component", default="backend", help="Dynamo's name of workers of one kind (default backend)")
    add(
        "--discovery-backend",
        choices=("etcd", "file", "kubernetes"),
        help="where workers register (default: DYN_DISCOVERY_BACKEND, or etcd); file needs no service, only a folder, "
        "DYN_FILE_KV, that the frontend shares",
    )
    add("--request-plane", choices=("tcp", "nats"), help="how requests come (default: DYN_REQUEST_PLANE, or tcp)")
    add("--event-plane", choices=("zmq", "nats"), help="how events go (default: DYN_EVENT_PLANE, or Dynamo's choice)")
    add("--tool-call-parser", metavar="NAME", help="Dynamo's name of the form in which the model calls tools")
    add("--reasoning-parser", metavar="NAME", help="Dynamo's name of the form in which the model reasons")
    add("--kv-events", metavar="ENDPOINT", help="--kv-events-config's endpoint of decode: for --router-mode kv")
    add("--page-size", type=int, metavar="TOKENS", help="the server's own; needed with --kv-events")
    add("--grace", type=float, default=30.0, metavar="S", help="longest wait for answers at the end (default 30)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when it was asked to end, 1 where Dynamo gave it up. Raises ConfigError."""
    _check(arguments)
    server = AskedServer(server_root(arguments.base_url), authorization(arguments.api_key_file))
    for name in _HOSTS:
        os.environ[name] = arguments.host or os.environ.get(name, "127.0.0.1")
    try:
        gone = asyncio.run(_serve(server, arguments))
    except WorkerEnded as error:
        say(str(error))
        return 1
    if gone is None:
        return 0
    say(f"{gone}; this worker is off Dynamo's list until the server is back")
    hold_for_successor()
    # Dynamo's runtime keeps signals to itself once it ran: in a new process, waiting for the server can be stopped.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for what no server is needed to see."""
    if not is_installed():
        raise ConfigError(f"dynamo: NVIDIA's Dynamo is not installed: {_INSTALL}, in an environment of its own")
    if (arguments.kv_events is None) is not (arguments.page_size is None):
        raise ConfigError("--kv-events and --page-size: give both, or none")
    if arguments.grace < 0:
        raise ConfigError(f"--grace {arguments.grace:g}: 0 seconds or more")
    if arguments.host is not None and not is_loopback(arguments.host):
        say(f"--host {arguments.host}: who reaches its ports can ask this worker; Dynamo looks at no key")


def is_installed() -> bool:
    """A folder called dynamo that is on the path is not the library."""
    try:
        return bool(version("ai-dynamo")) and find_spec("dynamo") is not None
    except PackageNotFoundError:
        return False


async def _serve(server: AskedServer, arguments: argparse.Namespace) -> str | None:
    say(f"waits for the server at {server.url}")
    facts = await server.wait()
    options = options_of(arguments, facts)
    say(f"{facts.model} becomes a worker of Dynamo, {options.namespace}.{options.component}, by {server.url}")
    engine = importlib.import_module("deltaserve.commands.dynamo.engine")
    gone: str | None = await engine.serve(server, facts, options)
    return gone


def options_of(arguments: argparse.Namespace, facts: ServerFacts) -> WorkerOptions:
    """What is given, else what Dynamo's variables say, else the usual. Raises ConfigError."""
    environment = os.environ
    return WorkerOptions(
        model_path=model_folder(arguments.model_path, facts.model_path),
        namespace=arguments.namespace or environment.get("DYN_NAMESPACE", "dynamo"),
        component=arguments.component,
        discovery_backend=arguments.discovery_backend or environment.get("DYN_DISCOVERY_BACKEND", "etcd"),
        request_plane=arguments.request_plane or environment.get("DYN_REQUEST_PLANE", "tcp"),
        event_plane=arguments.event_plane or environment.get("DYN_EVENT_PLANE"),
        chat_template=arguments.chat_template,
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        kv_events=() if arguments.kv_events is None else (arguments.kv_events,),
        kv_block_size=arguments.page_size,
        grace_s=arguments.grace,
    )
