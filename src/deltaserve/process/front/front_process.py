"""`python -m deltaserve.process.front.front_process SPEC.json`: the front: HTTP, tokenizer, router."""

import asyncio
import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
from prometheus_client import disable_created_metrics

from deltaserve.control.front.events import FrontConfig, Member
from deltaserve.core.ids import Boot, PeerName
from deltaserve.process.children.boots import new_boot
from deltaserve.process.children.child_events import Stopping
from deltaserve.process.children.exits import Exit, Watchdog
from deltaserve.process.children.garbage import keep_loaded
from deltaserve.process.children.interrupts import stop_signals
from deltaserve.process.children.notices import PeerDown, PeerHalted, PeerUp
from deltaserve.process.children.own_thread import in_own_thread
from deltaserve.process.children.parent import Parent, live
from deltaserve.process.children.shortage import telling_shortage
from deltaserve.process.children.terminal import Say, say, say_in_json, start_log
from deltaserve.process.front.event_loop import loop_factory
from deltaserve.process.front.front_spec import FrontSpec, FrontWorker
from deltaserve.process.front.router_engine import RouterEngine
from deltaserve.process.front.secrets import read_api_keys, read_cluster_key
from deltaserve.process.front.worker_sources import watch_file, watch_name
from deltaserve.process.links.links import Links
from deltaserve.process.links.security import LinkSecurity
from deltaserve.server.app import create_app
from deltaserve.server.heap import return_large_blocks
from deltaserve.server.listening import Listening, serve
from deltaserve.server.settings import ServerSettings
from deltaserve.server.spans import SpanSink
from deltaserve.server.text.answers.answer_choice import Parsers
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.settings.worker_list import parse_workers

_log = logging.getLogger(__name__)

_READY_POLL_S = 0.05
_LIFE_S = 0.5
_STUCK_AFTER_S = 10


def run_front(path: Path, parent: Parent | None) -> Exit:
    """Serve until told to stop; the exit code. Raises ConfigError."""
    spec = msgspec.json.decode(path.read_bytes(), type=FrontSpec)
    start_log(spec.name, spec.log, None if parent is None else parent.progress)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it only tells that it starts and ends
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that nobody reads
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(spec, parent))


async def _serve(spec: FrontSpec, parent: Parent | None) -> Exit:
    if parent is not None:
        parent.progress("loading the tokenizer")
    settings = _settings(spec)
    boot = new_boot(0 if parent is None else parent.welcome.former_boot)
    secret = read_cluster_key(Path(spec.secret_path))
    with telling_shortage():
        text = _codec(spec)
        links = Links(LinkSecurity.from_cluster_key(secret))
    members = members_of(spec.workers, () if parent is None else parent.welcome.peers)
    engine = RouterEngine(_front_config(spec, boot, secret, members), links)
    spans = None if spec.traces_url is None else _span_sink(spec.traces_url, spec.name)
    app = create_app(engine, text, settings, spans=spans)
    stop, hurry = asyncio.Event(), asyncio.Event()
    speaker = say if spec.log.format == "text" else say_in_json(spec.name, sys.stderr)
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    if parent is not None:
        by_name = {member.name: member for member in members}
        loop.add_reader(parent.fileno(), _hear, parent, engine, by_name, stop)
    return_large_blocks()
    keep_loaded()
    watchdog = Watchdog(_STUCK_AFTER_S)
    helpers = [loop.create_task(_prove_life(watchdog)), loop.create_task(_stop_on_breach(engine, stop))]
    if spec.workers_file is not None:
        helpers.append(loop.create_task(watch_file(Path(spec.workers_file), engine.workers_named)))
    helpers += [loop.create_task(watch_name(each, engine.workers_named)) for each in parse_workers(spec.workers_dns)]

    def on_listening(where: Listening) -> None:
        announce = (
            _tell_user(engine, where.url, stop, speaker, settings.grace_s)
            if parent is None
            else _tell_parent(engine, where.url, boot, parent, waits_for_others=_waits_for_others(spec))
        )
        helpers.append(loop.create_task(announce))

    try:
        await serve(app, settings, stop=stop, hurry=hurry, on_listening=on_listening)
    finally:
        watchdog.ends("ending its helpers")
        await _end(helpers)
        watchdog.ends("closing its links")
        engine.close()
        watchdog.ends("sending its last spans")
        if spans is not None:
            await asyncio.wrap_future(in_own_thread("spans", spans.close))
        watchdog.ends("leaving")
    return Exit.INTEGRITY if engine.breached.is_set() else Exit.OK


async def _end(helpers: Sequence[asyncio.Task[None]]) -> None:
    """Cancel them, and log what went wrong in one: it keeps nobody from ending what follows."""
    for task in helpers:
        task.cancel()
    for result in await asyncio.gather(*helpers, return_exceptions=True):
        if isinstance(result, Exception):
            _log.error("a helper of the front failed", exc_info=result)


def _span_sink(url: str, name: str) -> SpanSink:
    """OpenTelemetry is imported here, by those who asked for it."""
    sink: SpanSink = importlib.import_module("deltaserve.server.otlp").open_sink(url, name)
    return sink


def _codec(spec: FrontSpec) -> TextCodec:
    template = None if spec.chat_template is None else Path(spec.chat_template)
    parsers = Parsers(spec.tool_call_parser, spec.reasoning_parser)
    return TextCodec.load(Path(spec.model_path), spec.model_overrides, spec.sampling_defaults, template, parsers)


async def _prove_life(watchdog: Watchdog) -> None:
    """An event loop that stands still ends the process, its stack shown: nobody is answered any more."""
    while True:
        watchdog.alive()
        await asyncio.sleep(_LIFE_S)


async def _stop_on_breach(engine: RouterEngine, stop: asyncio.Event) -> None:
    await engine.breached.wait()
    stop.set()


def _waits_for_others(spec: FrontSpec) -> bool:
    """Whether there are workers that no supervisor of this machine starts."""
    return any(worker.url for worker in spec.workers) or spec.workers_file is not None or bool(spec.workers_dns)


async def _tell_parent(engine: RouterEngine, url: str, boot: Boot, parent: Parent, *, waits_for_others: bool) -> None:
    """Ready means that a request sent now is served. Until then, tell which workers are missing if nobody else does:
    the supervisor speaks for those that are its own children."""
    told: str | None = ""
    while (reason := engine.ready()) is not None:
        if waits_for_others and reason != told:
            told = reason
            parent.progress(f"not ready: {reason}")
        await asyncio.sleep(_READY_POLL_S)
    parent.ready(url, boot)


async def _tell_user(engine: RouterEngine, url: str, stop: asyncio.Event, say: Say, grace_s: float) -> None:
    """Tell which workers are waited for, and when that is over: for a front that no supervisor speaks for."""
    told: str | None = ""
    while not stop.is_set():
        reason = engine.ready()
        if reason != told:
            told = reason
            say(f"ready, serving at {url}/v1  (Ctrl-C ends it)" if reason is None else f"not ready: {reason}")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _READY_POLL_S)
    say(Stopping(grace_s))


def members_of(workers: Sequence[FrontWorker], ups: Sequence[PeerUp]) -> tuple[Member, ...]:
    """Each worker where the supervisor last said that it listens, else where the front is told to look for it."""
    urls = {up.name: up.url for up in ups}
    return tuple(Member(PeerName(w.name), w.role, urls.get(w.name, w.url), w.group) for w in workers)


def _hear(parent: Parent, engine: RouterEngine, members: Mapping[PeerName, Member], stop: asyncio.Event) -> None:
    for notice in parent.receive():
        match notice:
            case PeerDown(name):
                engine.peer_died(PeerName(name))
            case PeerHalted(name, pid):
                engine.peer_halted(PeerName(name), pid)
            case PeerUp(name, url) if name in members:
                engine.worker_up(replace(members[PeerName(name)], url=url))
    if parent.is_gone:
        asyncio.get_running_loop().remove_reader(parent.fileno())
        stop.set()


def _settings(spec: FrontSpec) -> ServerSettings:
    keys = read_api_keys(Path(spec.api_key_file)) if spec.api_key_file else ()
    return replace(spec.server, api_keys=keys, num_workers=len(spec.workers))


def _front_config(spec: FrontSpec, boot: Boot, secret: bytes, members: tuple[Member, ...]) -> FrontConfig:
    return FrontConfig(
        name=PeerName(spec.name),
        boot=boot,
        workers=members,
        cluster_secret=secret,
        tokenizer=spec.tokenizer,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        conditional_prefill=spec.conditional_prefill,
        half=None if spec.server.half is None else spec.server.half.role,
    )


def main(argv: list[str]) -> NoReturn:
    """Be the front that the file argv[1] describes; ends the process."""
    live("the front", lambda parent: run_front(Path(argv[1]), parent))


if __name__ == "__main__":
    main(sys.argv)
