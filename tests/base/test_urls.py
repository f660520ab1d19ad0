"""A server's address in all the ways users write it."""

import pytest

from deltaserve.base.urls import DEFAULT_URL, server_root


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_root_of_a_server(end: str) -> None:
    assert server_root(f"{DEFAULT_URL}{end}") == DEFAULT_URL
    assert server_root(f"http://host/proxy{end}") == "http://host/proxy"
