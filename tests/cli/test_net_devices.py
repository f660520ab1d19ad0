"""Which network devices a machine has, and that a name of none is refused before anything is opened."""

from pathlib import Path

import pytest

from deltaserve.base.errors import ConfigError
from deltaserve.cli.main import main
from deltaserve.cli.net_devices import check_devices, net_devices

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


def test_a_worker_of_a_wrong_device_does_not_start(
    tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 48)
    flags = ["--cluster-key-file", str(key), "--trusted-data-network", "127.0.0.0/8", "--transfer-devices", "nosuch0"]
    assert main(["decode", str(tiny_models / "llama"), *flags]) == 2
    assert "--transfer-devices nosuch0: this machine has no nosuch0" in capsys.readouterr().err
