"""A server's address in all the ways users write it."""

import pytest

from deltaserve.settings.urls import DEFAULT_URL, admin_root, server_root


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_root_of_a_server(end: str) -> None:
    assert server_root(f"{DEFAULT_URL}{end}") == DEFAULT_URL
    assert server_root(f"http://host/proxy{end}") == "http://host/proxy"


@pytest.mark.parametrize(
    ("url", "admin"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30001"),
        ("http://127.0.0.1:30000/v1/", "http://127.0.0.1:30001"),
        ("http://proxy:80/model/v1", "http://proxy:81/model"),
        ("http://name", None),
        ("http://name:65535", None),
        ("http://name:port", None),
        ("name:30000", None),
    ],
)
def test_the_admin_port_is_one_above(url: str, admin: str | None) -> None:
    assert admin_root(url) == admin
