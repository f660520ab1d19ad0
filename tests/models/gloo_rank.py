"""A rank in a process of its own: python -m tests.models.gloo_rank RANK SIZE FOLDER all|forever|silent TIMEOUT_S"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from deltaserve.layout.shard import Shard
from deltaserve.models.collective import CollectiveError, GlooCollective
from tests.models.test_collective import try_all


def run(shard: Shard, folder: Path, action: str, timeout_s: float) -> None:
    collective = GlooCollective.join(shard, folder / "meet", timeout_s)
    print("joined", flush=True)
    match action:
        case "all":
            save_file(try_all(collective), folder / f"{shard.rank}.safetensors")
        case "forever":
            while True:
                collective.all_reduce(torch.ones(8))
        case "silent":
            sys.stdin.read()  # until the test has seen what the other did


if __name__ == "__main__":
    try:
        run(Shard(int(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    except CollectiveError as error:
        print(f"CollectiveError: {error}", flush=True)
    else:
        print("done", flush=True)
