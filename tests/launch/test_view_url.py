"""Where a browser finds the page of the server: where the admin routes are."""

from typing import Any

import pytest

from deltaserve.launch.fronts import view_url
from deltaserve.settings.config import Settings


@pytest.mark.parametrize(
    ("network", "security", "url"),
    [
        ({}, {}, "http://127.0.0.1:30000/view"),
        ({"host": "::1", "port": 4000}, {}, "http://[::1]:4000/view"),
        ({"ssl_certfile": "cert.pem"}, {}, "https://127.0.0.1:30000/view"),
        ({"host": "10.0.0.1"}, {"api_key_file": "keys"}, "http://127.0.0.1:30001/view"),
        ({"fronts": 2, "admin_port": 5000}, {}, "http://127.0.0.1:5000/view"),
        ({"uds": "/run/api.sock"}, {}, None),
        ({"uds": "/run/api.sock", "admin_port": 5000}, {}, "http://127.0.0.1:5000/view"),
    ],
)
def test_it_is_told_where_the_page_is(network: dict[str, Any], security: dict[str, Any], url: str | None) -> None:
    assert view_url(Settings.model_validate({"network": network, "security": security})) == url
