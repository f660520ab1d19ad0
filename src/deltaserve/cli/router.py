"""`deltaserve router MODEL --workers LIST`: the front alone, for workers on other machines or started by hand."""

import os
from pathlib import Path

import msgspec

from deltaserve.base.config import Settings
from deltaserve.base.errors import ConfigError
from deltaserve.base.ids import Role
from deltaserve.cli.compose import Checkpoint
from deltaserve.cli.front_process import FrontWorker, run_front, write_front_spec
from deltaserve.cli.private_folder import private_folder
from deltaserve.cli.serve import front_spec, require_free_doors


def run(settings: Settings) -> int:
    """Route until a stop signal. Needs the model folder for tokenizer and fingerprint, not for weights."""
    if settings.network.workers is None:
        raise ConfigError("--workers: missing; a list such as prefill@10.0.0.1:8998,decode@10.0.0.2:8998")
    if settings.security.cluster_key_file is None:
        raise ConfigError("--cluster-key-file: missing; the router and its workers must share one key")
    checkpoint = Checkpoint.open(settings.model.model_path, settings.model.json_model_override_args)
    require_free_doors(settings)
    secret_path = Path(settings.security.cluster_key_file).resolve()
    workers = tuple(map(_worker, settings.network.workers.split(",")))
    spec = msgspec.structs.replace(front_spec(settings, checkpoint, secret_path), workers=workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with private_folder() as folder:
        return int(run_front(write_front_spec(spec, folder), None))


def _worker(text: str) -> FrontWorker:
    """`prefill@host:port`. The instance's name is its address: unique, and the same on both sides."""
    role, _, address = text.partition("@")
    return FrontWorker(name=f"{role}-{address}", role=Role(role), url=f"tcp://{address}")
