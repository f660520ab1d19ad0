"""What this machine offers: memory, as the settings' resolution is told, and ports."""

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deltaserve.compute.native.core_share import CoreShare
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.launch import compose
from deltaserve.launch.compose import Checkpoint, free_port, free_ports, machine_facts, resolve_settings, worker_spec
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import Settings
from deltaserve.settings.resolve import ResolvedConfig
from tests.ports import taken

MIB = 1 << 20
GPUS = "0, GPU-a, 140000, 143771\n1, GPU-b, 70000, 81559\n2, GPU-c, 20000, 24000\n"
LOWEST_OF_KERNEL = 32_768
"""Linux: net.ipv4.ip_local_port_range, unless somebody has changed it."""


def with_gpus(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr(compose, "_visible_device", lambda: "cuda")
    done = subprocess.CompletedProcess[str]([], 0, stdout=told)
    monkeypatch.setattr(subprocess, "run", lambda *argv, **options: done)


def test_a_cpu_has_the_memory_and_swap_of_the_machine() -> None:
    facts = machine_facts(Settings.model_validate({"model": {"device": "cpu"}}), 2)
    assert (facts.device, facts.num_ranks) == ("cpu", 2)
    assert facts.total_bytes == psutil.virtual_memory().total + psutil.swap_memory().total


def test_a_gpu_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_gpus(monkeypatch, GPUS)
    facts = machine_facts(Settings(), 1)
    assert (facts.device, facts.free_bytes, facts.total_bytes) == ("cuda", 140_000 * MIB, 143_771 * MIB)


@pytest.mark.parametrize(
    ("num_workers", "num_devices", "num_on_device", "free"),
    [(2, 2, 1, 70_000), (3, 3, 1, 20_000), (4, 3, 2, 20_000), (7, 3, 3, 20_000)],
)
def test_workers_have_a_gpu_each_while_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, num_devices: int, num_on_device: int, free: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_gpus(monkeypatch, GPUS)
    facts = machine_facts(Settings(), num_workers)
    assert (facts.num_devices, facts.num_on_device, facts.free_bytes) == (num_devices, num_on_device, free * MIB)


@pytest.mark.parametrize(
    ("visible", "free"), [("1", 70_000), ("2,0", 20_000), ("GPU-b", 70_000), (" GPU-c , 1", 20_000)]
)
def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str, free: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with_gpus(monkeypatch, GPUS)
    assert machine_facts(Settings(), 1).free_bytes == free * MIB


@pytest.mark.parametrize("visible", ["", "7", "MIG-x"])
def test_no_gpu_is_visible(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with_gpus(monkeypatch, GPUS)
    with pytest.raises(ConfigError, match="names no GPU"):
        machine_facts(Settings(), 1)


@pytest.mark.parametrize("told", ["[N/A]\n", "[N/A], [N/A]\n", "1\n"])
def test_a_gpu_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    with_gpus(monkeypatch, told)
    with pytest.raises(ConfigError, match="nvidia-smi does not tell"):
        machine_facts(Settings(), 2)


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        ({}, (8, 4)),
        ({"num_threads": 3}, (3, 3)),
        ({"prefill_num_threads": 6}, (6, 4)),
        ({"num_threads": 3, "decode_num_threads": 1}, (3, 1)),
    ],
)
def test_prefill_gets_more_threads_than_decode(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, int], threads: tuple[int, int]
) -> None:
    monkeypatch.setattr(compose, "usable_cores", lambda *_: 13)
    model = Path(__file__).parents[2] / "models/recall-micro"
    settings = Settings.model_validate({"model": {"model_path": str(model), "device": "cpu"}, "scheduling": flags})
    resolved = resolve_settings(settings, Checkpoint.open(str(model)))
    assert (resolved[Role.PREFILL].own_threads, resolved[Role.DECODE].own_threads) == threads


def pair_of(
    flags: Mapping[str, Mapping[str, object]], folder: Path
) -> tuple[Settings, Mapping[Role, ResolvedConfig], list[WorkerSpec]]:
    """Both workers of one machine, before they share its cores."""
    model = Path(__file__).parents[2] / "models/recall-micro"
    settings = Settings.model_validate({"model": {"model_path": str(model), "device": "cpu"}, **flags})
    checkpoint = Checkpoint.open(str(model))
    resolved = resolve_settings(settings, checkpoint)
    specs = [
        compose.worker_spec(name, role, settings, checkpoint, resolved[role], folder / "secret")
        for name, role in compose.worker_names(settings)
    ]
    return settings, resolved, specs


@pytest.mark.parametrize(
    ("flags", "num_threads", "is_shared"),
    [
        ({}, (12, 12), True),
        ({"prefill_num_threads": 6}, (6, 12), True),
        ({"num_threads": 3, "decode_num_threads": 1}, (3, 1), False),
    ],
)
def test_who_may_borrow_cores_needs_to_know_when_all_others_compute(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: dict[str, int],
    num_threads: tuple[int, int],
    is_shared: bool,
) -> None:
    for name, value in (("usable_cores", 13), ("counts_waits", True), ("library_problem", None)):
        monkeypatch.setattr(compose, name, lambda *_, value=value: value)
    settings, resolved, specs = pair_of({"scheduling": flags}, tmp_path)
    assert tuple(spec.num_threads for spec in specs) == num_threads
    own = [resolved[role].own_threads for _, role in compose.worker_names(settings)]
    path = str(tmp_path / "cores")
    shares = [CoreShare(path, place, len(specs), 12, own[place]) if is_shared else None for place in (0, 1)]
    assert [spec.core_share for spec in compose.with_core_shares(specs, resolved, settings, tmp_path)] == shares


@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        ({}, None),
        ({"scheduling": {"decode_extend_tokens": 64}}, 64),
        ({"scheduling": {"itl_target_ms": 50.0}}, 256),
        ({"disaggregation": {"conditional_prefill": "off"}}, 256),
    ],
)
def test_steps_of_decode_that_computes_prompts_on_shared_cores_are_as_long_as_one_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: dict[str, dict[str, object]], beside: int | None
) -> None:
    for name, value in (("usable_cores", 2), ("counts_waits", True), ("library_problem", None)):
        monkeypatch.setattr(compose, name, lambda *_, value=value: value)
    settings, resolved, specs = pair_of(flags, tmp_path)
    _, decode = compose.with_core_shares(specs, resolved, settings, tmp_path)
    assert decode.options.shares_cores
    assert decode.options.sched.extend_len_beside_decode == beside


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


@pytest.mark.parametrize(
    ("flags", "num_ahead"),
    [({}, 1), ({"steps_ahead": 4}, 3), ({"steps_ahead": 4, "disable_overlap_schedule": True}, 0)],
)
def test_steps_under_way(flags: dict[str, int], num_ahead: int, tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "models/recall-micro"
    settings = Settings.model_validate({"model": {"model_path": str(model), "device": "cpu"}, "scheduling": flags})
    checkpoint = Checkpoint.open(str(model))
    resolved = resolve_settings(settings, checkpoint)[Role.DECODE]
    spec = worker_spec("decode-0", Role.DECODE, settings, checkpoint, resolved, tmp_path / "secret")
    assert spec.options.sched.num_ahead == num_ahead


def slots_of(model: Path, mib: int = 64, num_pages: tuple[int, ...] | None = None, **flags: object) -> tuple[int, ...]:
    """Pages of each pool in the file of a worker of one rank. `num_pages`: of its memory."""
    memory = {"cache_dir": "pages", "cache_dir_mib": mib}
    told = {"model": {"model_path": str(model), "device": "cpu"}, "memory": memory, **flags}
    settings, checkpoint = Settings.model_validate(told), Checkpoint.open(str(model))
    resolved = resolve_settings(settings, checkpoint)[Role.DECODE]
    return compose.cache_slots(settings, checkpoint.spec, replace(resolved, num_pages=num_pages or resolved.num_pages))


def test_a_file_under_the_cache_holds_whole_pages(tiny_models: Path) -> None:
    (num_slots,) = slots_of(tiny_models / "llama")
    assert slots_of(tiny_models / "llama", 128) in ((2 * num_slots,), (2 * num_slots + 1,))
    (of_two,) = slots_of(tiny_models / "llama", parallelism={"tp_size": 2})
    assert 0 < of_two <= num_slots


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next"])
def test_its_pools_share_it_as_they_share_memory(tiny_models: Path, family: str) -> None:
    num_slots, of_twice = slots_of(tiny_models / family), slots_of(tiny_models / family, 128)
    assert len(num_slots) == 2
    assert all(twice in (2 * count, 2 * count + 1) for count, twice in zip(num_slots, of_twice, strict=True))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_without_a_cache_sets_nothing_aside(role: Role, tmp_path: Path) -> None:
    _, _, specs = pair_of({"memory": {"cache_dir": "pages", "disable_decode_radix_cache": True}}, tmp_path)
    (spec,) = (spec for spec in specs if spec.role is role)
    has_file = role is Role.PREFILL
    assert (bool(spec.cache_slots), bool(spec.cache_dir), bool(spec.cache_bytes)) == (has_file,) * 3


def test_a_file_that_holds_no_page_of_a_pool_is_refused(tiny_models: Path) -> None:
    model, num_pages = tiny_models / "gemma3_text", (1_000_000, 10)
    with pytest.raises(ConfigError, match=r"--cache-dir-mib 1: too little, it takes \d+ MiB") as refused:
        slots_of(model, 1, num_pages)
    enough = int(str(refused.value).split()[-2])
    assert slots_of(model, enough, num_pages)[1] == 1
