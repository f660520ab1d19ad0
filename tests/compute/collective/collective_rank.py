"""A rank in a process of its own, until another one dies.

python -m tests.compute.collective.collective_rank RANK SIZE FOLDER TIMEOUT_S
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from deltaserve.compute.collective.collective import Collective, ProcessCollective
from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.core.layout.shard import Shard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part_of(rank: int, dtype: torch.dtype) -> Tensor:
    """What a rank has; numbers whose sums are not exact."""
    return torch.randn(5, 48, generator=torch.Generator().manual_seed(rank)).to(dtype)


def try_all(collective: Collective) -> dict[str, Tensor]:
    """Sums and gathers, in each type, of parts that are and are not contiguous; in the mode that models run in."""
    rank = collective.shard.rank
    with torch.inference_mode():
        results = {}
        for dtype in DTYPES:
            part = part_of(rank, dtype)
            results[f"sum {dtype}"] = collective.all_reduce(part.clone())
            results[f"gather {dtype}"] = collective.all_gather(part)
            results[f"gather lines {dtype}"] = collective.all_gather(part.t())
    return results


def main(rank: int, size: int, folder: Path, timeout_s: float) -> None:
    collective = ProcessCollective.join(Shard(rank, size), folder / "meet", timeout_s)
    save_file(try_all(collective), folder / f"{rank}.safetensors")
    print("saved", flush=True)
    try:
        while True:
            collective.all_reduce(torch.ones(8))
    except CollectiveError as error:
        print(f"CollectiveError: {error}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
