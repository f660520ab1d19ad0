"""What a front process is told, and how it is started: of the server only its settings are imported here, so that the
supervisor starts sooner and stays smaller."""

import sys
from pathlib import Path

import msgspec

from deltaserve.core.ids import Role
from deltaserve.core.sampling import SamplingSource
from deltaserve.process.children.child import ChildSpec, Kind
from deltaserve.process.children.terminal import LogSpec
from deltaserve.server.settings import ServerSettings


class FrontWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker the front dials: where it is told to, or where the supervisor says that the worker listens."""

    name: str
    role: Role
    url: str | None = None
    """Where the worker listens; None: the supervisor will say."""
    group: str | None = None
    """Name of the expert group that the worker is in; None: in none."""


class FrontSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a front process is told: resolved and checked by the command line."""

    name: str = "front"
    """Name as the workers know it: no two fronts of the same workers may share one."""
    model_path: str
    model_overrides: str | None = None
    tokenizer: str
    """Hash of tokenizer, chat template and end tokens, as workers say it."""
    kv_bytes_per_token: float
    secret_path: str
    api_key_file: str | None
    chat_template: str | None = None
    tool_call_parser: str
    reasoning_parser: str
    sampling_defaults: SamplingSource
    log: LogSpec
    conditional_prefill: bool = False
    traces_url: str | None = None
    """Collector that spans of requests go to."""
    server: ServerSettings
    """Without its keys, which only their own file holds, and the number of workers."""
    workers: tuple[FrontWorker, ...] = ()
    workers_file: str | None = None
    """File of further workers, which come and go."""
    workers_dns: str = ""
    """Names behind which further workers are: see settings/worker_list.py."""


def front_child(spec: FrontSpec, folder: Path) -> ChildSpec:
    """The front process of this machine, for the supervisor."""
    path = write_front_spec(spec, folder)
    argv = (sys.executable, "-m", "deltaserve.process.front.front_process", str(path))
    env = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return ChildSpec(spec.name, argv, Kind.FRONT, env, (path,))


def write_front_spec(spec: FrontSpec, folder: Path) -> Path:
    path = folder / f"{spec.name.replace('/', '_')}.json"
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(spec), indent=2))
    return path
