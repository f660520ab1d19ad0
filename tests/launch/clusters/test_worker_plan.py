"""Which workers a cluster runs, what each asks of a node, how it is started there, and what its end means."""

import os
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.launch.clusters.worker_plan import (
    Consequence,
    KnownPlaces,
    PlannedWorker,
    check_nodes,
    consequence_of,
    of_worker,
    plan_workers,
    room_needed,
)
from deltaserve.process.children.exits import Exit
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.merge import load
from deltaserve.settings.flags.options import read_options
from deltaserve.settings.worker_list import parse_workers

KEY = ("--cluster-key-file", "cluster.key")


def settings_of(*flags: str) -> Settings:
    return load("serve", "", ["model", "--cluster", "ray", *KEY, *flags], {}).settings


def plan(*flags: str, num_gpus: float = 0) -> tuple[PlannedWorker, ...]:
    return plan_workers(settings_of(*flags), num_gpus)


def test_each_worker_has_a_name_and_a_port_of_its_own() -> None:
    workers = plan("--prefill", "2", "--decode", "3", "--disaggregation-bootstrap-port", "9000")
    assert [(worker.name, worker.port) for worker in workers] == [
        ("prefill-0", 9000),
        ("prefill-1", 9001),
        ("decode-0", 9002),
        ("decode-1", 9003),
        ("decode-2", 9004),
    ]


@pytest.mark.parametrize(
    ("flags", "num_gpus", "prefill", "decode"),
    [
        ((), 0, {"CPU": 1}, {"CPU": 1}),
        (("--num-threads", "6"), 0, {"CPU": 6}, {"CPU": 6}),
        (("--num-threads", "6", "--decode-num-threads", "2"), 0, {"CPU": 6}, {"CPU": 2}),
        (("--tp-size", "2", "--num-threads", "3"), 0, {"CPU": 6}, {"CPU": 6}),
        ((), 8, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}),
        (("--device", "cuda"), 8, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}),
        (("--device", "cpu"), 8, {"CPU": 1}, {"CPU": 1}),
        (("--prefill-tp-size", "4", "--decode-tp-size", "2"), 8, {"CPU": 4, "GPU": 4}, {"CPU": 2, "GPU": 2}),
    ],
)
def test_a_bundle_holds_all_ranks_of_a_worker(
    flags: tuple[str, ...], num_gpus: int, prefill: dict[str, float], decode: dict[str, float]
) -> None:
    """A bundle is on one node: so no worker is spread over several."""
    workers = plan(*flags, num_gpus=num_gpus)
    assert [worker.bundle for worker in workers] == [prefill, decode]


def test_gpus_that_no_node_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda: no node of the cluster has a GPU"):
        plan("--device", "cuda")


def test_what_is_waited_for_is_told() -> None:
    assert room_needed(plan("--tp-size", "2", num_gpus=4)) == "prefill-0 2 CPU and 2 GPU; decode-0 2 CPU and 2 GPU"


HANDED_ON = (
    (),
    ("--page-size", "16", "--num-pages", "512"),
    ("--prefill-page-size", "16", "--decode-page-size", "32", "--staging", "on"),
    ("--prefill-tp-size", "2", "--tp-size", "4"),
    ("--decode-num-threads", "3", "--num-threads", "2"),
    ("--disable-decode-radix-cache",),
    ("--cache-dir", "pages", "--cache-dir-mib", "64", "--disable-decode-radix-cache"),
    ("--disable-radix-cache", "--verify", "crc"),
    ("--speculative-algorithm", "NGRAM"),
    ("--json-model-override-args", '{"num_hidden_layers": 2}'),
    ("--transfer-devices", "mlx5_0:1", "--trusted-data-network", "10.0.0.0/24", "--transfer-tls", "rc,tcp,self"),
    ("--log-level", "debug", "--log-format", "json", "--log-to", "stdout"),
    ("--shutdown-grace-s", "4.5", "--drain-timeout-s", "1"),
)


@pytest.mark.parametrize("flags", HANDED_ON, ids=" ".join)
def test_a_workers_own_command_reads_what_serve_was_told(flags: tuple[str, ...]) -> None:
    settings = settings_of(*flags)
    for worker in plan_workers(settings, 0):
        command, *argv = worker.argv("127.0.0.9")
        read = load(command, "", argv, {}).settings
        wanted, got = of_worker(settings, worker.role).model_dump(), read.model_dump()
        placed = {
            "host": "127.0.0.9",
            "advertise": "127.0.0.9",
            "worker_name": worker.name,
            "disaggregation_bootstrap_port": worker.port,
            "model_path": os.path.abspath("model"),
        }
        for option in read_options():
            if not option.commands or command in option.commands:
                value = placed.get(option.field, wanted[option.group][option.field])
                assert got[option.group][option.field] == value, option.flag


def test_paths_mean_the_same_wherever_a_worker_is_started() -> None:
    flags = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "head", "--log-dir", "logs")
    (_, decode) = plan(*flags)
    here = Path.cwd()
    assert decode.model == str(here / "model")
    assert decode.log_dir == str(here / "logs")
    assert f"--speculative-draft-model-path={here / 'head'}" in decode.flags
    assert f"--cluster-key-file={here / 'cluster.key'}" in decode.flags


def test_a_list_has_each_worker_where_it_was_last() -> None:
    workers = plan("--decode", "2")
    places = KnownPlaces(workers)
    assert places.lines() == ""
    assert all(places.is_at(worker.name, f"10.0.0.{index}") for index, worker in enumerate(workers, 1))
    assert not places.is_at("decode-1", "10.0.0.3")
    assert places.is_at("decode-1", "10.0.0.4"), "it is elsewhere now"
    found = {entry.name: (entry.role, entry.address) for entry in parse_workers(places.lines())}
    assert found == {
        "prefill-0": (Role.PREFILL, "10.0.0.1:8998"),
        "decode-0": (Role.DECODE, "10.0.0.2:8999"),
        "decode-1": (Role.DECODE, "10.0.0.4:9000"),
    }
    for _ in range(2):
        places.forget("decode-0")
    assert [entry.name for entry in parse_workers(places.lines())] == ["decode-1", "prefill-0"]


@pytest.mark.parametrize(
    ("exits", "consequence"),
    [
        ({}, Consequence.GOES_ON),
        ({"decode-0": Exit.FAILED}, Consequence.GOES_ON),
        ({"decode-0": Exit.FAILED, "decode-1": Exit.OK}, Consequence.FAILS),
        ({"prefill-0": Exit.FAILED}, Consequence.FAILS),
        ({"decode-0": Exit.CONFIG}, Consequence.IS_REFUSED),
        ({"decode-0": Exit.CONFIG, "prefill-0": Exit.FAILED}, Consequence.IS_REFUSED),
    ],
)
def test_the_server_goes_on_while_both_roles_are_there(exits: dict[str, int], consequence: Consequence) -> None:
    assert consequence_of(plan("--decode", "2"), exits) is consequence


def test_nodes_beyond_this_machine_need_a_network_for_pages() -> None:
    check_nodes(["127.0.0.1", "127.0.3.4"], settings_of())
    check_nodes(["10.0.0.1"], settings_of("--trusted-data-network", "10.0.0.0/24"))
    with pytest.raises(ConfigError, match=r"a node is 10\.0\.0\.1, .*--trusted-data-network"):
        check_nodes(["127.0.0.1", "10.0.0.1"], settings_of())
