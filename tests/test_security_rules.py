"""The ten rules about listeners, secrets and tenants: where each one is tested, and the checks that had no other home.

1 No way from data to code.
  tests/test_security_ast.py::test_sources_hold_no_way_from_data_to_code
2 One codec: tagged structs, nothing unknown, everything bounded, then checked against local state.
  tests/test_security_rules.py::test_every_message_is_tagged_and_refuses_unknown_fields
  tests/core/wire/test_codec.py::test_mutated_frames_raise_nothing_but_protocol_errors
  tests/core/wire/test_codec.py::test_small_messages_end_at_one_mebibyte
  tests/control/engine/test_strangers.py::test_numbers_that_no_ticket_has_are_refused
3 Everything binds 127.0.0.1 unless told otherwise, and then only with keys.
  tests/test_security_rules.py::test_nothing_listens_beyond_this_machine_by_default
  tests/test_security_rules.py::test_sources_name_no_address_that_is_everywhere
  tests/launch/test_bad_settings.py::test_bad_flags
  tests/e2e/test_service.py::test_every_listener_of_every_process_is_on_this_machine_only
4 Secrets come from private files, are compared in constant time, and are never empty.
  tests/test_security_rules.py::test_no_command_takes_a_secret_as_an_argument
  tests/test_security_rules.py::test_secrets_are_compared_in_constant_time
  tests/process/front/test_secrets.py::test_a_file_that_others_can_reach_is_refused
  tests/process/front/test_secrets.py::test_short_empty_and_huge_keys_are_refused_and_not_shown
  tests/commands/bench/test_command.py::test_a_key_file_that_is_no_secret_is_refused
  tests/process/front/test_secrets.py::test_a_bad_key_file_is_refused_without_telling_a_key
  tests/process/links/test_links.py::test_who_lacks_the_cluster_key_is_not_heard
  tests/e2e/test_service.py::test_no_secret_is_in_an_argument_the_environment_or_a_file_of_others
5 Separate listeners, allowed methods only, nothing for browsers; `doctor` prints every listener.
  tests/test_security_rules.py::test_admin_routes_are_not_on_a_public_port
  tests/test_security_rules.py::test_only_listed_methods_and_no_origin_is_let_in
  tests/test_security_rules.py::test_doctor_prints_every_listener
  tests/server/test_access.py::test_admin_routes_have_a_listener_of_their_own
  tests/server/test_access.py::test_admin_calls_from_a_browser_are_refused
  tests/launch/test_worker_command.py::test_transfers_listen_on_the_trusted_network_alone
6 Peers come from the configuration or an authenticated link; no request names one; no URL is fetched.
  tests/test_security_rules.py::test_what_serves_cannot_fetch
  tests/server/test_corpus.py
  tests/server/test_raw_corpus.py
  tests/control/engine/test_strangers.py::test_a_request_cannot_make_decode_greet_its_front_or_itself
  tests/process/links/test_links.py::test_a_dialled_peer_with_another_name_is_not_heard
  tests/e2e/test_strangers.py::test_a_stranger_at_the_workers_ports
7 Weights are safetensors, nothing in a checkpoint runs, templates are fenced in.
  tests/compute/weights/test_loader.py::test_only_unsafe_weights
  tests/compute/weights/test_loader.py::test_index_that_leads_elsewhere
  tests/model/test_tensors.py::test_a_header_that_lies_is_refused
  tests/server/text/test_text_codec.py::test_a_template_that_reaches_too_far_is_refused
8 The tenant is the first part of every cache key and cannot be left out.
  tests/test_security_rules.py::test_no_type_or_function_has_a_default_namespace
  tests/core/test_keys.py::test_each_part_of_the_seed_counts
  tests/server/test_access.py::test_a_key_names_the_tenant
  tests/control/engine/test_hits.py::test_namespaces_share_nothing_on_either_side
9 No shared memory has a name; only pages can be written from outside, and by living peers only.
  tests/test_security_rules.py::test_sources_share_no_memory_by_name
  tests/compute/memory/test_page_memory.py::test_regions_name_real_memory
  tests/e2e/test_service.py::test_no_process_shares_memory_by_name
  tests/e2e/test_nixl_fence.py
10 Warm-up and probes say what they are; no value is magic.
  tests/test_security_rules.py::test_sources_name_no_address_that_is_everywhere
  tests/control/engine/test_hits.py::test_bypass_leaves_the_trees_empty_and_takes_nothing_from_them
  tests/e2e/test_service.py::test_a_request_without_cache_leaves_and_finds_nothing
"""

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import httpx
import msgspec
import pytest
from starlette.routing import Route

from deltaserve.cli.dispatch import COMMANDS
from deltaserve.commands.doctor.machine import check_listeners
from deltaserve.core.ids import Namespace
from deltaserve.core.wire.messages import Message
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.server.app import create_admin_app, create_app
from deltaserve.server.settings import ApiKey, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.options import read_options
from deltaserve.settings.host_and_port import is_loopback
from tests.fixtures.text_folder import write_text_folder
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.server.oracle import OracleEngine

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "deltaserve"
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_EXAMPLE = re.compile(r"10\.0\.0\.\d+")
"""Addresses in help texts."""
_SECRET = re.compile(r"(^|[-_])(key|secret|token|password|credential)$")
_ADMIN = (
    "/metrics",
    "/flush_cache",
    "/reset_prefix_cache",
    "/admin/drain",
    "/admin/role",
    "/admin/workers",
    "/admin/workers/join",
    "/admin/workers/leave",
    "/admin/requests/x",
)


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((path.relative_to(SRC).as_posix(), ast.parse(path.read_text())) for path in sorted(SRC.rglob("*.py")))


# ---------------------------------------------------------------- the index itself


def test_the_index_names_every_rule_and_only_tests_that_exist() -> None:
    lines = (__doc__ or "").splitlines()
    assert [int(line.split()[0]) for line in lines if line[:1].isdigit()] == list(range(1, 11))
    named = [line.strip().partition("::") for line in lines if line.startswith("  tests/")]
    assert len(named) > 30
    for path, _, function in named:
        tree = ast.parse((ROOT / path).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert not function or function in names, f"{path}::{function}"


# ---------------------------------------------------------------- 2


def test_every_message_is_tagged_and_refuses_unknown_fields() -> None:
    for struct in get_args(Message):
        assert issubclass(struct, msgspec.Struct)
        config = struct.__struct_config__
        assert config.frozen and config.tag == struct.__name__ and config.forbid_unknown_fields


# ---------------------------------------------------------------- 3, 10


def test_nothing_listens_beyond_this_machine_by_default() -> None:
    assert is_loopback(Settings().network.host)
    assert is_loopback(ServerSettings("m").host)
    defaults = {field.name: field.default for field in msgspec.structs.fields(WorkerSpec)}
    assert is_loopback(defaults["host"])
    assert defaults["transport_devices"] == "lo"


def test_sources_name_no_address_that_is_everywhere() -> None:
    """Nor any other one: hosts that mean something special have served other engines as flags."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = [a for a in _ADDRESS.findall(node.value) if not is_loopback(a) and not _EXAMPLE.fullmatch(a)]
                assert not found, f"{name}:{node.lineno}: {found}"
                assert "tcp://*" not in node.value, f"{name}:{node.lineno}"


# ---------------------------------------------------------------- 4


def flags() -> Iterator[str]:
    yield from (option.flag for option in read_options())
    for command in COMMANDS.values():
        if not command.has_settings:
            parser = argparse.ArgumentParser()
            importlib.import_module(command.module).add_arguments(parser)
            yield from (flag for action in parser._actions for flag in action.option_strings)


def test_no_command_takes_a_secret_as_an_argument() -> None:
    """Each flag of a server is an environment variable as well."""
    named = list(flags())
    assert {"--api-key-file", "--cluster-key-file", "--base-url"} <= set(named)
    assert [flag for flag in named if _SECRET.search(flag)] == []


def test_secrets_are_compared_in_constant_time() -> None:
    for name, tree in sources():
        if name.startswith("sim/"):
            continue  # no secret is there
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                sides = {_last_name(side) for side in (node.left, *node.comparators)}
                assert not sides & {"secret", "digest", "api_key", "password"}, f"{name}:{node.lineno}"


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


# ---------------------------------------------------------------- 5


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.load(write_text_folder(tmp_path))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


LOCAL = ServerSettings("m")
KEYED = replace(LOCAL, api_keys=(ApiKey("k" * 32, Namespace("tenant")),))


@pytest.mark.anyio
@pytest.mark.parametrize("settings", [KEYED, replace(LOCAL, host="0.0.0.0")], ids=["keys", "reachable from elsewhere"])
async def test_admin_routes_are_not_on_a_public_port(codec: TextCodec, settings: ServerSettings) -> None:
    """Only a server that this machine alone can reach, without keys, has them there."""
    headers = {"authorization": f"Bearer {'k' * 32}"}
    for now, is_there in ((settings, False), (LOCAL, True)):
        app = create_app(OracleEngine(), codec, now)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=PATIENCE_S
        ) as client:
            for path in _ADMIN:
                statuses = {(await client.request(m, path, headers=headers)).status_code for m in ("GET", "POST")}
                assert (statuses != {404}) is is_there, path
            told = (await client.get("/server_info", headers=headers)).json()
            assert ("engine" in told) is is_there, "without admin routes it says what the model is called, no more"


@pytest.mark.anyio
async def test_only_listed_methods_and_no_origin_is_let_in(codec: TextCodec) -> None:
    app = create_app(OracleEngine(), codec, KEYED)
    for listener in (app, create_admin_app(app)):
        assert all(isinstance(route, Route) for route in listener.routes), "nothing mounted"
    local = create_app(OracleEngine(), codec, LOCAL)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=local), base_url="http://localhost", timeout=PATIENCE_S
    ) as client:
        for route in local.routes:
            assert isinstance(route, Route) and route.methods is not None
            assert route.methods - {"HEAD"} in ({"GET"}, {"POST"})
            path = route.path.replace("{name:path}", "m").replace("{id}", "x")
            for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
                reply = await client.request(method, path, headers={"origin": "http://evil.example"})
                assert reply.status_code == 405
                assert set(reply.headers["allow"].split(", ")) == route.methods
                assert not [name for name in reply.headers if name.startswith("access-control-")]


def test_doctor_prints_every_listener() -> None:
    port = free_port()
    listeners = "\n".join(line.text for line in check_listeners("127.0.0.1", port))
    by_hand = Settings().disaggregation.disaggregation_bootstrap_port
    for wanted in (
        f":{port}: API",
        f":{port + 1}: admin",
        "links of each worker",
        "page transfers",
        f":{by_hand}: links",
    ):
        assert wanted in listeners


# ---------------------------------------------------------------- 6


def test_what_serves_cannot_fetch() -> None:
    """Clients exist in the commands that talk to a server, nowhere else."""
    clients = {"httpx", "urllib.request", "requests", "aiohttp", "http.client"}
    for name, tree in sources():
        if name.startswith("commands/"):
            continue
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not set(modules) & clients, name


# ---------------------------------------------------------------- 8


def test_no_type_or_function_has_a_default_namespace() -> None:
    num_found = 0
    for name, tree in sources():
        if name.startswith("sim/"):
            continue  # no tenant is there
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "namespace":
                num_found += 1
                assert node.value is None, f"{name}:{node.lineno}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args]
                optional = arguments[len(arguments) - len(node.args.defaults) :]
                optional += [a for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
                assert "namespace" not in {argument.arg for argument in optional}, f"{name}:{node.lineno}"
    assert num_found >= 5


# ---------------------------------------------------------------- 9


def test_sources_share_no_memory_by_name() -> None:
    for name, tree in sources():
        words = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not [word for word in words if "/dev/shm" in word], name
        names = {_last_name(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
        assert not names & {"SharedMemory", "shm_open", "share_memory_"}, name
