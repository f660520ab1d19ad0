"""What this machine offers, as the settings' resolution is told."""

import subprocess

import psutil
import pytest

from deltaserve.base.config import Settings
from deltaserve.base.errors import ConfigError
from deltaserve.cli import compose
from deltaserve.cli.compose import machine_facts

MIB = 1 << 20


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
