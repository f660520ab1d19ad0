"""Where a worker of its own lets page transfers listen."""

import pytest

from deltaserve.base.errors import ConfigError
from deltaserve.cli.worker_command import data_devices

ADDRESSES = {
    "lo": ["127.0.0.1"],
    "eth0": ["192.168.7.4"],
    "ib0": ["10.0.0.1", "10.1.0.1"],
    "ib1": ["10.0.3.9"],
    "tun": [],
}


@pytest.mark.parametrize(
    ("network", "devices"),
    [
        ("10.0.0.0/24", "ib0"),
        ("10.0.0.0/16", "ib0,ib1"),
        ("10.1.0.0/16", "ib0"),
        ("192.168.7.4/32", "eth0"),
        ("127.0.0.0/8", "lo"),
    ],
)
def test_transfers_listen_on_the_trusted_network_alone(network: str, devices: str) -> None:
    assert data_devices(network, ADDRESSES) == devices


def test_a_network_this_machine_is_not_on_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--trusted-data-network 172\.16\.0\.0/16: .*10\.0\.0\.1"):
        data_devices("172.16.0.0/16", ADDRESSES)
