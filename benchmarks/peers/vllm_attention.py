"""One layer's attention by vLLM's CPU operator, timed when asked. Runs in vLLM's environment.

    python vllm_attention.py float32|bfloat16

Reads a case in JSON from the first line of its input (`Case`), then runs it once for each further line and answers
with the milliseconds of CPU time that it took. One thread.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops
from vllm.platforms import current_platform

BLOCK = 32
SCORES_OFF = 2e-2
"""Most that the operator's answer may differ from torch's, in bfloat16."""


@dataclass(frozen=True)
class Case:
    """Rows of one step."""

    kv_heads: int
    group_size: int
    head_dim: int
    queries: list[list[int]]
    """Start and length of each."""
    common: int
    """Positions that all rows share; a multiple of BLOCK."""

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group_size


class Step:
    """The operator's arguments, and the keys and values that they stand for."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        ends = [start + length for start, length in case.queries]
        table = torch.zeros(len(ends), -(-max(ends) // BLOCK), dtype=torch.int32)
        num_common = case.common // BLOCK
        free = num_common
        for row, end in enumerate(ends):
            own = -(-end // BLOCK) - num_common
            table[row, :num_common] = torch.arange(num_common)
            table[row, num_common : num_common + own] = torch.arange(free, free + own)
            free += own
        self.table = table
        self.keys, self.values = (torch.randn(free * BLOCK, case.kv_heads, case.head_dim).to(dtype) for _ in range(2))
        planes = torch.zeros(free, case.kv_heads, 2 * BLOCK, case.head_dim, dtype=dtype).chunk(2, dim=2)
        slots = torch.arange(free * BLOCK)
        isa = instruction_set(dtype)
        _custom_ops.cpu_attn_reshape_and_cache(self.keys, self.values, *planes, slots, isa)
        lens = torch.tensor([length for _, length in case.queries])
        starts = torch.cat((torch.zeros(1), lens.cumsum(0))).int()
        seq_lens = torch.tensor(ends, dtype=torch.int32)
        self.q = torch.randn(int(lens.sum()), case.num_heads, case.head_dim).to(dtype)
        self.out = torch.empty_like(self.q)
        self.scale = case.head_dim**-0.5
        plan = _custom_ops.cpu_attn_get_scheduler_metadata(
            *(len(ends), case.num_heads, case.kv_heads, case.head_dim, seq_lens, dtype, starts, True, -1, isa, True)
        )
        self.run: Callable[[], object] = lambda: _custom_ops.cpu_attention_with_kv_cache(
            *(self.q, *planes, self.out, starts, seq_lens, self.scale, True, None, -1, self.table, 0, plan, None)
        )

    def check(self) -> None:
        """Against torch. Raises RuntimeError: then the operator was not asked for what is meant."""
        self.run()
        at = 0
        for row, (start, length) in enumerate(self.case.queries):
            slots = (self.table[row].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: start + length]
            k, v = (kept[slots].float().repeat_interleave(self.case.group_size, 1) for kept in (self.keys, self.values))
            q = self.q[at : at + length].float()
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            unseen = torch.arange(start + length) > torch.arange(start, start + length)[:, None]
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            off = (torch.einsum("hqk,khd->qhd", weights, v) - self.out[at : at + length].float()).abs().max()
            if not off < SCORES_OFF:
                raise RuntimeError(f"row {row} is off by {off}")
            at += length


def instruction_set(dtype: torch.dtype) -> str:
    """As vLLM's backend chooses it."""
    is_amx = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return "amx" if is_amx else "vec"


def main() -> None:
    torch.set_num_threads(1)
    platform: Any = current_platform
    platform.import_kernels()
    dtype = getattr(torch, sys.argv[1])
    Step(Case(2, 4, 128, [[40, 1], [64, 20]], 32), dtype).check()
    step = Step(Case(**json.loads(sys.stdin.readline())), dtype)
    print(instruction_set(dtype), flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        step.run()
        print((time.process_time() - began) * 1e3, flush=True)


if __name__ == "__main__":
    main()
