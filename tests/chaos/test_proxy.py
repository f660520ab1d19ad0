"""The proxy does what it says: a test whose faults do nothing would pass for ever."""

import asyncio
import gc
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from random import Random

import pytest

from tests.chaos.proxy import FAIR, Proxy, Weather
from tests.patience import PATIENCE_S

Scene = Callable[[Proxy, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SHORT_S = 0.2


def play(scene: Scene, weather: Weather = FAIR) -> None:
    """A client behind the proxy of an echoing server."""

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        proxy = Proxy(server.sockets[0].getsockname()[1], Random(1))
        reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.open())
        proxy.weather = weather
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene(proxy, reader, writer)
        finally:
            writer.transport.abort()
            await proxy.close()
            server.close()

    asyncio.run(main())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    except ConnectionResetError:
        pass
    finally:
        writer.transport.abort()


def test_fair_weather_changes_nothing() -> None:
    async def scene(proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = Random(2).randbytes(1 << 20)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent

    play(scene)


@pytest.mark.parametrize("held", [Weather(holds_up=True), Weather(holds_down=True)], ids=["up", "down"])
def test_what_is_held_comes_late_and_whole(held: Weather) -> None:
    async def scene(proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), SHORT_S)
        proxy.weather = FAIR
        writer.write(b" second")
        assert await reader.readexactly(12) == b"first second"

    play(scene, held)


@pytest.mark.parametrize("slow", [Weather(delay_s=SHORT_S), Weather(bytes_per_s=100 / SHORT_S)], ids=["late", "slow"])
def test_late_and_slow_bytes_are_the_same_bytes(slow: Weather) -> None:
    async def scene(proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began = time.monotonic()
        writer.write(b"x" * 100)
        assert await reader.readexactly(100) == b"x" * 100
        assert time.monotonic() - began > SHORT_S

    play(scene, slow)


def test_flipped_bits() -> None:
    async def scene(proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(1000))
        changed = await reader.readexactly(1000)
        assert 1 <= sum(byte.bit_count() for byte in changed) <= 2, "one bit each way"

    play(scene, Weather(corrupt_share=1.0))


def test_cut_connections_are_reset_and_new_ones_work_unless_refused() -> None:
    async def scene(proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        await reader.readexactly(1)
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        again, other = await asyncio.open_connection("127.0.0.1", proxy.port)
        other.write(b"y")
        assert await again.readexactly(1) == b"y"
        proxy.weather = Weather(refuses=True)
        assert proxy.cut_one() == 1
        with pytest.raises(ConnectionResetError):  # here or there, as the kernel has it
            refused, third = await asyncio.open_connection("127.0.0.1", proxy.port)
            try:
                await refused.read(1)
            finally:
                third.transport.abort()
        other.transport.abort()

    play(scene)


@pytest.mark.parametrize("num_turns", range(8))
def test_closing_leaves_no_connection_behind(num_turns: int) -> None:
    """However far asyncio has come with what connected just before: pytest fails on what is collected unclosed."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as target, ExitStack() as clients:
            proxy = Proxy(target.getsockname()[1], Random(1))
            port = await proxy.open()
            for _ in range(20):
                clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await proxy.close()

    asyncio.run(main())
    gc.collect()
