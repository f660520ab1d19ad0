"""A model folder without weights, its codec, and an application over the oracle engine."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from deltaserve.server.app import create_app
from deltaserve.server.front import Front
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID, build_tokenizer
from tests.server.oracle import VOCAB, OracleEngine

MODEL = "tiny"


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json."""
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer(["baku", "domi"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": EOS_ID}))
    return folder


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> TextCodec:
    """The folder's codec."""
    return TextCodec.load(model_folder)


@dataclass(frozen=True, slots=True)
class Served:
    """An application, its engine, and a client that reaches it without a socket."""

    app: FastAPI
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


@asynccontextmanager
async def served(codec: TextCodec, engine: OracleEngine, settings: ServerSettings) -> AsyncIterator[Served]:
    """Serve for one test; checks at the end that nothing is left inside."""
    app = create_app(engine, codec, settings)
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 12345))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        case = Served(app, engine, client)
        yield case
        case.check_idle()


def events(text: str) -> list[dict[str, object]]:
    """The JSON bodies of a complete stream; checks the framing and the one [DONE] at its end."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    *bodies, done = (part.removeprefix("data: ") for part in parts)
    assert done == "[DONE]"
    return [json.loads(body) for body in bodies]
