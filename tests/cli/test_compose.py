"""What this machine offers: memory, as the settings' resolution is told, and ports."""

import subprocess

import psutil
import pytest

from deltaserve.base.config import Settings
from deltaserve.base.errors import ConfigError
from deltaserve.cli import compose
from deltaserve.cli.compose import free_port, free_ports, machine_facts
from tests.ports import taken

MIB = 1 << 20
LOWEST_OF_KERNEL = 32_768
"""Linux: net.ipv4.ip_local_port_range, unless somebody has changed it."""


def with_gpus(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr(compose, "_visible_device", lambda: "cuda")
    done = subprocess.CompletedProcess[str]([], 0, stdout=told)
    monkeypatch.setattr(subprocess, "run", lambda *argv, **options: done)


def test_a_cpu_has_the_memory_and_swap_of_the_machine() -> None:
    facts = machine_facts(Settings.model_validate({"model": {"device": "cpu"}}), 2)
    assert (facts.device, facts.num_workers) == ("cpu", 2)
    assert facts.total_bytes == psutil.virtual_memory().total + psutil.swap_memory().total


def test_a_gpu_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, "140000, 143771\n70000, 81559\n")
    facts = machine_facts(Settings(), 2)
    assert (facts.device, facts.free_bytes, facts.total_bytes) == ("cuda", 140_000 * MIB, 143_771 * MIB)


@pytest.mark.parametrize("told", ["", "[N/A], [N/A]\n", "1\n"])
def test_a_gpu_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    with_gpus(monkeypatch, told)
    with pytest.raises(ConfigError, match="nvidia-smi does not tell"):
        machine_facts(Settings(), 2)


def test_free_ports_are_different_and_none_that_the_kernel_gives_away() -> None:
    """Nor are they neighbours: each has one to itself above it."""
    ports = free_ports(50)
    assert len({*ports, *(port + 1 for port in ports)}) == 100
    assert max(ports) + 1 < LOWEST_OF_KERNEL


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_somebody_has_is_not_free(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(compose, "_PORTS", range(port, port + 2, 2))
    with taken(port + offset), pytest.raises(ConfigError, match="no 1 free ports"):
        free_port()
    assert free_port() == port
