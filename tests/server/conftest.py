"""A model folder without weights, its codec, and an application over the oracle engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from deltaserve.server.app import create_app
from deltaserve.server.front import Front
from deltaserve.server.listening import Listening, serve
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.text_folder import write_text_folder
from tests.patience import PATIENCE_S
from tests.server.oracle import OracleEngine

MODEL = "tiny"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Async tests run on the event loop that a front has."""
    return "asyncio", {"use_uvloop": find_spec("uvloop") is not None}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text side of a model."""
    return write_text_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> TextCodec:
    """The folder's codec."""
    return TextCodec.load(model_folder)


@dataclass(frozen=True, slots=True)
class Served:
    """An application, its engine, and a client that reaches it without a socket."""

    app: Starlette
    engine: OracleEngine
    client: httpx.AsyncClient

    @property
    def front(self) -> Front:
        """What the application's routes share."""
        front = self.app.state.front
        assert isinstance(front, Front)
        return front

    def check_idle(self) -> None:
        """Every room ended exactly once, every place was given back."""
        assert sorted(g.room for g in self.engine.opened) == sorted(self.engine.ended)
        assert self.front.admission.num_requests == 0
        assert self.front.admission.num_tokens == 0
        assert self.front.reading.bodies.num_bytes == 0
        assert self.front.reading.values.num_bytes == 0


@asynccontextmanager
async def served(codec: TextCodec, engine: OracleEngine, settings: ServerSettings) -> AsyncIterator[Served]:
    """Serve for one test; checks at the end that nothing is left inside."""
    app = create_app(engine, codec, settings)
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 12345))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as client:
        case = Served(app, engine, client)
        yield case
        case.check_idle()


def num_ignored(case: Served) -> float:
    """Fields of bodies and messages that were ignored."""
    (counter,) = case.front.metrics.ignored_fields.collect()
    return sum(sample.value for sample in counter.samples if sample.name.endswith("_total"))


def events(text: str) -> list[dict[str, object]]:
    """The JSON bodies of a complete stream; checks the framing and the one [DONE] at its end."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    *bodies, done = (part.removeprefix("data: ") for part in parts)
    assert done == "[DONE]"
    return [json.loads(body) for body in bodies]


@dataclass(frozen=True, slots=True)
class Live:
    """The same behind a real socket."""

    app: Starlette
    engine: OracleEngine
    where: Listening
    stop: asyncio.Event
    hurry: asyncio.Event
    run: "asyncio.Task[None]"

    @property
    def url(self) -> str:
        """Base of the API."""
        return self.where.url

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the API."""
        assert self.where.api is not None
        return self.where.api

    @property
    def front(self) -> Front:
        """What the application's routes share."""
        front = self.app.state.front
        assert isinstance(front, Front)
        return front

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection to the API."""
        return await asyncio.open_connection(*self.address)

    async def talk(self, data: bytes) -> bytes:
        """Send bytes on a new connection; everything that comes back until the server closes it."""
        reader, writer = await self.connect()
        writer.write(data)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def live(codec: TextCodec, engine: OracleEngine, settings: ServerSettings) -> AsyncIterator[Live]:
    """Serve on a free port for one test."""
    app = create_app(engine, codec, settings)
    stop, hurry, listening = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
    run = asyncio.create_task(serve(app, settings, stop=stop, hurry=hurry, on_listening=listening.set_result))
    await asyncio.wait({run, listening}, return_when=asyncio.FIRST_COMPLETED)
    if run.done():
        run.result()
    try:
        yield Live(app, engine, await listening, stop, hurry, run)
    finally:
        stop.set()
        await run
    assert sorted(g.room for g in engine.opened) == sorted(engine.ended)
    assert app.state.front.admission.num_requests == 0


async def until(condition: Callable[[], object]) -> None:
    """Wait for something another task brings about."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
