"""Where a worker of its own lets page transfers listen, what it is called, and with whom it shares its machine."""

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.launch.worker_command import advertised, data_devices, num_workers_here, rank_nodes
from deltaserve.process.worker.worker_spec import RankNodes
from deltaserve.settings.config import Settings

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


def settings(**network: str) -> Settings:
    disaggregation = {"disaggregation_bootstrap_port": 8999}
    return Settings.model_validate({"network": network, "disaggregation": disaggregation})


@pytest.mark.parametrize(
    ("network", "address"),
    [
        ({"host": "10.0.0.2"}, "10.0.0.2:8999"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.2"}, "10.0.0.2:8999"),
        ({"host": "0.0.0.0", "advertise": "decode-0.workers.svc:443"}, "decode-0.workers.svc:443"),
    ],
)
def test_a_worker_is_called_by_the_address_that_peers_dial(network: dict[str, str], address: str) -> None:
    assert advertised(settings(**network)) == address


def test_a_worker_that_only_this_machine_can_reach_shares_it_with_its_peer() -> None:
    assert num_workers_here(settings()) == 2
    assert num_workers_here(settings(host="10.0.0.2")) == 1


@pytest.mark.parametrize(
    ("host", "at", "own_host"),
    [
        ("10.1.0.1", "10.0.0.1:5000", "10.1.0.1"),  # as it was told
        ("0.0.0.0", "10.0.3.9:5000", "10.0.3.9"),  # node 0, which has the others come there
        ("0.0.0.0", "worker-0.workers:5000", "10.0.0.1"),
    ],
)
def test_ranks_on_several_machines_meet_on_the_trusted_network(host: str, at: str, own_host: str) -> None:
    asked = {"tp_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": at}
    security, network = {"trusted_data_network": "10.0.0.0/8"}, {"host": host}
    divided = Settings.model_validate({"parallelism": asked, "security": security, "network": network})
    name, _, port = at.partition(":")
    assert rank_nodes(divided, ADDRESSES) == RankNodes(size=2, node=1, host=name, port=int(port), own_host=own_host)
    assert num_workers_here(divided) == 1
    assert rank_nodes(settings(), ADDRESSES) is None
