"""Which network devices a machine has, and that a name of none is refused before anything is opened."""

from pathlib import Path

import pytest

from deltaserve.cli.main import main
from deltaserve.core.errors import ConfigError
from deltaserve.launch.net_devices import check_devices, net_devices
from deltaserve.launch.worker_command import data_address
from deltaserve.settings.config import Settings
from deltaserve.transports.registry import DataAddress, transport_kind

KNOWN = ["eth0", "lo", "mlx5_0:1", "mlx5_1:1", "mlx5_1:2"]


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    folders = [
        "net/lo",
        "net/eth0",
        "infiniband/mlx5_1/ports/2",
        "infiniband/mlx5_1/ports/1",
        "infiniband/mlx5_0/ports/1",
    ]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_interfaces_and_ports_of_rdma_devices_are_found(sysfs: Path) -> None:
    assert net_devices(sysfs) == KNOWN


def test_here_is_at_least_loopback() -> None:
    assert "lo" in net_devices()


@pytest.mark.parametrize("asked", ["eth0", "mlx5_0:1", "mlx5_0,mlx5_1:2", "mlx5_0:1,mlx5_1:1,eth0"])
def test_a_list_of_those_that_are_there_is_taken(asked: str) -> None:
    check_devices(asked, KNOWN)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("eth1", "no eth1; did you mean eth0?"),
        ("mlx5_0:1,mlx5_0:2", "no mlx5_0:2; did you mean"),
        ("bond", "no bond; there are eth0, lo, mlx5_0:1"),
    ],
)
def test_a_device_that_is_not_there_is_refused(asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--transfer-devices {asked}: .*{said}"):
        check_devices(asked, KNOWN)


def test_where_the_kernel_does_not_tell_any_name_is_taken() -> None:
    check_devices("eth0", [])


ADDRESSES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5", "192.168.1.5"], "eth1": ["10.0.1.5"], "tap0": []}


def listens(backend: str, network: str | None, devices: str | None, tls: str = "auto") -> DataAddress:
    settings = Settings.model_validate(
        {
            "disaggregation": {
                "disaggregation_transfer_backend": backend,
                "transfer_devices": devices,
                "transfer_tls": tls,
            },
            "security": {"trusted_data_network": network},
        }
    )
    return data_address(settings, transport_kind(backend), ADDRESSES, KNOWN)


def test_nixl_gets_the_devices() -> None:
    assert listens("nixl", None, None) == DataAddress("lo", "")
    assert listens("nixl", "10.0.0.0/16", None) == DataAddress("eth0,eth1", "")
    assert listens("nixl", "10.0.0.0/16", "eth0,mlx5_0:1") == DataAddress("eth0,mlx5_0:1", "")


def test_rdma_devices_alone_need_an_rdma_transport() -> None:
    assert listens("nixl", "10.0.0.0/16", "mlx5_0,mlx5_1", "rc,tcp,self") == DataAddress("mlx5_0,mlx5_1", "")
    with pytest.raises(ConfigError, match="mlx5_0,mlx5_1: none is an interface for tcp; add --transfer-tls rc"):
        listens("nixl", "10.0.0.0/16", "mlx5_0,mlx5_1")


def test_mooncake_gets_an_address_and_over_rdma_a_list_of_devices() -> None:
    assert listens("mooncake", None, None) == DataAddress("lo", "127.0.0.1")
    assert listens("mooncake", "10.0.0.0/24", None) == DataAddress("eth0", "10.0.0.5")
    assert listens("mooncake", "192.168.0.0/16", "eth0") == DataAddress("eth0", "192.168.1.5")
    four = "mlx5_0:1,mlx5_1:1,mlx5_1:2,mlx5_0"
    assert listens("mooncake", "10.0.1.0/24", four, "rdma") == DataAddress("mlx5_0,mlx5_1,mlx5_1,mlx5_0", "10.0.1.5")


@pytest.mark.parametrize(
    ("network", "devices", "said"),
    [
        ("10.0.0.0/16", "eth9", "--transfer-devices eth9: this machine has no eth9"),
        ("10.0.0.0/16", "eth0,lo", "mooncake listens on one interface"),
        ("10.0.0.0/16", "mlx5_0", "add --transfer-tls rdma"),
        ("10.0.1.0/24", "eth0", "--trusted-data-network 10.0.1.0/24: eth0 has no address on it"),
        ("172.16.0.0/12", None, "this machine is not on it"),
    ],
)
def test_an_address_that_mooncake_cannot_have_is_refused(network: str, devices: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        listens("mooncake", network, devices)


def test_a_worker_of_a_wrong_device_does_not_start(
    tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 48)
    flags = ["--cluster-key-file", str(key), "--trusted-data-network", "127.0.0.0/8", "--transfer-devices", "nosuch0"]
    assert main(["decode", str(tiny_models / "llama"), *flags]) == 2
    assert "--transfer-devices nosuch0: this machine has no nosuch0" in capsys.readouterr().err
