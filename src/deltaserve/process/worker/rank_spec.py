"""What a rank's process is told: one JSON file for all ranks of a machine, and where they meet."""

from pathlib import Path

import msgspec

from deltaserve.compute.collective.net_meeting import NetMeeting
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Boot
from deltaserve.core.layout.shard import Shard
from deltaserve.process.links.security import LinkSecurity, derive_key
from deltaserve.process.worker.worker_spec import WorkerSpec, ranks_here, read_secret


class RankWires(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of a start meet rank 0 and each other."""

    steps: dict[int, str]
    """Url at which rank 0's step thread listens for that of each other rank."""
    transfers: dict[int, str]
    """The same of the transfer threads."""
    meeting: tuple[str, int] | None = None
    """Address and port at which rank 0 is found by the collective of ranks on several machines; None: a file in the
    folder is where they meet."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written by rank 0, or on another machine by its node, for the other ranks there."""

    worker: WorkerSpec
    boot: Boot
    """Boot of rank 0."""
    wires: RankWires


MeetingPoint = Path | NetMeeting
"""Where the collective of a worker's ranks finds its members: the beginning of paths, or a place on the network."""


def write_rank_spec(spec: RankSpec, folder: Path) -> Path:
    """The file, in a folder that only this user may enter."""
    path = folder / "ranks.json"
    path.write_bytes(msgspec.json.encode(spec))
    return path


def read_rank_spec(path: Path) -> RankSpec:
    """The spec in a file. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RankSpec)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"ranks of a worker: {path}: {error}") from None


def steps_url(folder: Path, rank: int) -> str:
    """Where rank 0's step thread listens for that of `rank`, on the same machine."""
    return f"ipc://{folder / f'steps-{rank}'}"


def transfers_url(folder: Path, rank: int) -> str:
    """Where rank 0's transfer thread listens for that of `rank`, on the same machine."""
    return f"ipc://{folder / f'transfers-{rank}'}"


def start_key(spec: WorkerSpec, boot: Boot) -> bytes:
    """A key that only ranks of this start of the worker derive: [32] bytes. One that outlived a former rank 0 has
    another, and is nobody here. Raises ConfigError."""
    return derive_key(read_secret(spec), b"deltaserve ranks" + boot.to_bytes(8, "little") + spec.name.encode())


def group_key(spec: WorkerSpec) -> bytes:
    """A key that only members of an expert group of this cluster derive: [32] bytes. Raises ConfigError."""
    return derive_key(read_secret(spec), b"deltaserve experts")


def rank_security(spec: WorkerSpec, boot: Boot) -> LinkSecurity | None:
    """What both ends of a link between ranks on several machines must hold; None where all are on one."""
    return None if spec.nodes is None else LinkSecurity.from_cluster_key(start_key(spec, boot))


def meeting_point(spec: RankSpec, folder: Path) -> MeetingPoint:
    """Where the ranks' collective finds its members. Raises ConfigError."""
    nodes, meeting = spec.worker.nodes, spec.wires.meeting
    if nodes is None or meeting is None:
        return folder / "collective"
    return NetMeeting(*meeting, nodes.own_host, start_key(spec.worker, spec.boot))


def rank_device(spec: WorkerSpec, shard: Shard) -> str:
    """The device of a rank of this machine: that of the spec is its first rank's, each further one has the next GPU. No
    two ranks of a worker may have one (NCCL)."""
    kind, _, number = spec.device.partition(":")
    return spec.device if kind != "cuda" else f"cuda:{int(number or 0) + shard.rank - ranks_here(spec).start}"
