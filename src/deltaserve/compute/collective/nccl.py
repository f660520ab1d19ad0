"""Ranks that are processes with a GPU each: they add up over NCCL, and nothing goes through the memory of the host.

No GPU has run this yet with more than one rank: tests/gpu/test_nccl.py waits for a machine that has two.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.core.layout.shard import Shard


class NcclCollective:
    """One rank's end: a Collective.

    Calls return when the device has them in its queue. A rank that is not there in time, or fails, ends the process
    from a thread of the library, with a signal: nobody waits longer than the time limit, and nobody is told here.
    """

    def __init__(self, shard: Shard, group: Any) -> None:
        self._shard = shard
        self._group = group

    @classmethod
    def join(cls, shard: Shard, device: torch.device, meeting_point: Path, timeout_s: float) -> "NcclCollective":
        """Returns when all ranks are there. `device`: no two of them may have the same. `meeting_point`: a path, in a
        folder that only this user may enter, that no group has used before. Raises CollectiveError."""
        if not distributed.is_nccl_available():
            raise CollectiveError("ranks: this build of torch has no NCCL, by which those on GPUs add up")
        limit = timedelta(seconds=timeout_s)
        nccl: Any = distributed.ProcessGroupNCCL  # of builds for CUDA only
        try:
            options = nccl.Options()
            options._timeout = limit
            store: Any = FileStore(str(meeting_point), shard.size)
            store.set_timeout(limit)
            torch.cuda.set_device(device)
            collective = cls(shard, nccl(store, shard.rank, shard.size, options))
            collective.all_reduce(torch.zeros(1, device=device))  # only now it connects
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise _failed(error) from None
        return collective

    @property
    def shard(self) -> Shard:
        return self._shard

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, as Collective's. Raises CollectiveError."""
        sums = x.contiguous()
        try:
            self._group.allreduce([sums]).wait()
        except RuntimeError as error:
            raise _failed(error) from None
        return sums

    def all_gather(self, x: Tensor) -> Tensor:
        """Parts of all ranks side by side, as Collective's. Raises CollectiveError."""
        own = x.contiguous()
        parts = own.new_empty((self._shard.size, *own.shape))
        try:
            self._group._allgather_base(parts, own).wait()
        except RuntimeError as error:
            raise _failed(error) from None
        return torch.cat(parts.unbind(), -1)


def _failed(error: RuntimeError) -> CollectiveError:
    return CollectiveError("ranks: " + " ".join(str(error).split())[:200])
