"""What a command with settings needs and does not find, and what the branches that it names refuse: looked for before
anything is read or opened."""

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec

from deltaserve.core.branches import CLUSTERS, TRANSPORTS
from deltaserve.core.errors import ConfigError
from deltaserve.launch.clusters.cluster_kinds import cluster_kind
from deltaserve.launch.net_devices import check_devices, net_devices
from deltaserve.model.drafts.draft_algorithm import HeadFolder, draft_algorithm
from deltaserve.process.front.secrets import NO_CLUSTER_KEY
from deltaserve.settings.config import Settings
from deltaserve.settings.rules import WORKER_COMMANDS
from deltaserve.transports.registry import TransferFlags, transport_kind

_SHARE_A_KEY = (*WORKER_COMMANDS, "router")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def lacking(command: str, settings: Settings) -> Iterator[str]:
    """What is needed and missing, one line each."""
    path = settings.model.model_path
    problem = None if path is None else model_problem(path)
    if problem is not None:
        yield problem
    devices = settings.disaggregation.transfer_devices
    if command in WORKER_COMMANDS and devices is not None:
        yield from _missing_devices(devices)
    cluster = settings.cluster.cluster
    if (command in _SHARE_A_KEY or cluster in CLUSTERS) and settings.security.cluster_key_file is None:
        yield NO_CLUSTER_KEY
    if cluster in CLUSTERS:
        yield from cluster_kind(cluster).refuse(settings)
    transport = settings.disaggregation.disaggregation_transfer_backend
    if transport in TRANSPORTS:
        yield from transport_kind(transport).refuse(transfer_flags(settings))
    if command != "router":
        yield from _unfit_head(settings)
    if settings.logging.otlp_traces_endpoint is not None and find_spec("opentelemetry") is None:
        yield "--otlp-traces-endpoint: OpenTelemetry is not installed: pip install 'deltaserve[otel]'"


def transfer_flags(settings: Settings) -> TransferFlags:
    return TransferFlags(settings.disaggregation.transfer_tls, settings.disaggregation.transfer_devices)


def _unfit_head(settings: Settings) -> Iterator[str]:
    name, folder = settings.speculation.speculative_algorithm, settings.speculation.speculative_draft_model_path
    use = draft_algorithm(name).folder
    if folder is None and use is HeadFolder.REQUIRED:
        yield f"--speculative-algorithm {name}: needs the head's folder, --speculative-draft-model-path"
    if folder is not None and use is HeadFolder.NONE:
        yield f"--speculative-draft-model-path {folder[:80]}: --speculative-algorithm {name} reads none"


def _missing_devices(devices: str) -> Iterator[str]:
    try:
        check_devices(devices, net_devices())
    except ConfigError as error:
        yield str(error)


def model_problem(path: str) -> str | None:
    """What is wrong with a path that is neither a folder nor a file; None: nothing. A name of the hub comes with the
    line that gets its files."""
    if os.path.isdir(path) or os.path.isfile(path):  # pathlib's raise for a name that is too long
        return None
    problem = f"MODEL {path[:200]}: not a folder, nor a GGUF file; models are never downloaded"
    owner, _, folder = path.partition("/")
    if not _HUB_NAME.fullmatch(path) or os.path.isdir(owner) or path.lower().endswith(".gguf"):
        return problem
    return f"{problem}: `hf download {path} --local-dir {folder}`, then write {folder}"
