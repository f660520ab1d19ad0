"""What a router is called by its workers: two of them never alike."""

import socket

import pytest

from deltaserve.launch.router import front_name
from deltaserve.settings.config import Settings

HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", f"front-{HERE}:30007"),
        ("localhost", f"front-{HERE}:30007"),
        ("0.0.0.0", f"front-{HERE}:30007"),
        ("10.0.0.3", "front-10.0.0.3:30007"),
        ("front-a.cluster", "front-front-a.cluster:30007"),
    ],
)
def test_a_router_is_called_by_its_own_address_where_it_has_one(host: str, name: str) -> None:
    """Two machines may have the same name."""
    settings = Settings.model_validate({"network": {"host": host, "port": 30007}})
    assert front_name(settings) == name
