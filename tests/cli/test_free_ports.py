"""Ports that are taken are found before anything is started."""

import socket
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.launch.serve import require_free_ports
from deltaserve.settings.config import NetworkSettings, SecuritySettings, Settings
from tests.ports import free_port, taken


def settings(port: int, keys: Path | None = None, admin_port: int | None = None) -> Settings:
    security = SecuritySettings(api_key_file=None if keys is None else str(keys))
    return Settings(network=NetworkSettings(port=port, admin_port=admin_port), security=security)


def test_a_port_in_use_is_named_with_its_flag() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen"):
            require_free_ports(settings(port))


def test_that_of_the_admin_routes_counts_where_they_have_one(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        require_free_ports(settings(port))
        with pytest.raises(ConfigError, match=rf"admin port \(one above --port\) {port + 1}: cannot listen"):
            require_free_ports(settings(port, tmp_path))


def test_an_admin_port_that_was_asked_for_is_looked_at_alone(tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    with taken(port + 1):
        require_free_ports(settings(port, tmp_path, admin_port))
    with taken(admin_port), pytest.raises(ConfigError, match=f"--admin-port {admin_port}: cannot listen"):
        require_free_ports(settings(port, tmp_path, admin_port))
