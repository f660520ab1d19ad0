"""`deltaserve router MODEL --workers LIST`: the front alone, for workers on other machines or started by hand."""

import os
from pathlib import Path

import msgspec

from deltaserve.base.config import Settings
from deltaserve.base.errors import ConfigError
from deltaserve.base.ids import Role
from deltaserve.cli.compose import Checkpoint, resolve_settings
from deltaserve.cli.front_process import FrontWorker, run_front, write_front_spec
from deltaserve.cli.serve import front_spec, private_folder, require_free_port


def run(settings: Settings) -> int:
    """Route until SIGTERM or SIGINT. Needs the model folder for tokenizer and fingerprint, not for weights."""
    if settings.network.workers is None:
        raise ConfigError("--workers: missing; a list such as prefill@10.0.0.1:8998,decode@10.0.0.2:8998")
    if settings.security.cluster_key_file is None:
        raise ConfigError("--cluster-key-file: missing; the router and its workers must share one key")
    checkpoint = Checkpoint.open(settings.model.model_path, settings.model.json_model_override_args)
    resolved = resolve_settings(settings, checkpoint, 1)
    require_free_port(settings.network.host, settings.network.port)
    secret_path = Path(settings.security.cluster_key_file).resolve()
    workers = tuple(map(_worker, settings.network.workers.split(",")))
    spec = msgspec.structs.replace(front_spec(settings, checkpoint, resolved, secret_path), workers=workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with private_folder() as folder:
        run_front(write_front_spec(spec, folder), None)
    return 0


def _worker(text: str) -> FrontWorker:
    """`prefill@host:port`. The instance's name is its address: unique, and the same on both sides."""
    role, _, address = text.partition("@")
    return FrontWorker(name=f"{role}-{address}", role=Role(role), url=f"tcp://{address}")
