"""Ports that are taken are found before anything is started."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaserve.base.config import NetworkSettings, SecuritySettings, Settings
from deltaserve.base.errors import ConfigError
from deltaserve.cli.serve import require_free_doors


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def settings(port: int, keys: Path | None = None) -> Settings:
    security = SecuritySettings(api_key_file=None if keys is None else str(keys))
    return Settings(network=NetworkSettings(port=port), security=security)


def test_the_api_s(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {taken}: cannot listen"):
        require_free_doors(settings(taken))


def test_the_admin_routes_where_they_have_one(taken: int, tmp_path: Path) -> None:
    require_free_doors(settings(taken - 1))
    with pytest.raises(ConfigError, match=rf"admin port \(one above --port\) {taken}: cannot listen"):
        require_free_doors(settings(taken - 1, tmp_path))


def test_no_port_above_the_last(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--port 65535: leaves no port above it"):
        require_free_doors(settings(65535, tmp_path))
