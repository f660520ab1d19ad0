"""What a rank's process is told: one JSON file for all ranks of a worker, beside the sockets they meet over."""

from pathlib import Path

import msgspec

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Boot
from deltaserve.core.layout.shard import Shard
from deltaserve.process.worker.worker_spec import WorkerSpec


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written by rank 0, for ranks 1 .. worker.tp_size - 1."""

    worker: WorkerSpec
    boot: Boot
    """Boot of rank 0."""


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


def steps_path(folder: Path, rank: int) -> Path:
    """Where rank 0's step thread listens for that of `rank`."""
    return folder / f"steps-{rank}"


def transfers_path(folder: Path, rank: int) -> Path:
    """Where rank 0's transfer thread listens for that of `rank`."""
    return folder / f"transfers-{rank}"


def meeting_point(folder: Path) -> Path:
    """The file over which the ranks' collective finds its members."""
    return folder / "collective"


def rank_device(device: str, shard: Shard) -> str:
    """`device` is rank 0's; each further rank has the next GPU: no two ranks of a worker may have one (NCCL)."""
    kind, _, number = device.partition(":")
    return device if kind != "cuda" else f"cuda:{int(number or 0) + shard.rank}"
