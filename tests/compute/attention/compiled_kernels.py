"""Triton's kernels compiled for a GPU that need not be there. For a process that does not interpret them."""

import importlib
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A compute capability (major * 10 + minor), and a model's sizes."""

    capability: int
    head_dim: int
    value_dim: int
    group_size: int


def compiled_sizes(target: Target) -> list[int]:
    """Bytes of shared memory that partial results take in bfloat16, for short queries and for long ones; of the merges,
    and of storing keys. The last three may be 0."""
    kernels: Any = importlib.import_module("deltaserve.compute.attention.triton.triton_kernels")
    merges: Any = importlib.import_module("deltaserve.compute.attention.triton_merge")
    attention: Any = importlib.import_module("deltaserve.compute.attention.triton.triton_attention")
    d1, d2 = attention.split_dim(target.head_dim)
    v1, v2 = attention.split_dim(target.value_dim)
    heads = {"NUM_HEADS": 8 * target.group_size}
    sizes = {"D": target.head_dim, "DV": target.value_dim, "D1": d1, "D2": d2, "V1": v1, "V2": v2}
    kinds = {"GROUP_SIZE": target.group_size, "PAGE_SIZE": 64, "WINDOW": 100, "FP8": False}
    bf16 = importlib.import_module("triton.language").bfloat16
    types = dict.fromkeys(("q", "keys", "values", "plane"), "*bf16") | dict.fromkeys(("outs", "sums", "sinks"), "*fp32")
    types |= {"out": "*bf16", "scale": "fp32"}
    lists = ("tiles", "tokens", "positions", "first_parts", "part_starts", "order", "pages", "write_pages")
    types |= dict.fromkeys((*lists, "num_tiles", "num_tokens"), "*i32")
    found = []
    for rows, keys in attention.tile_sizes(target.group_size, target.head_dim):
        fixed = {**heads, **sizes, **kinds, "ROWS": rows, "KEYS": keys, "COMPUTE": bf16}
        found.append(_compiled(kernels.partial_results, types, fixed, target, attention.num_warps(target.head_dim)))
    for has_order, outs in ((False, "*fp32"), (True, "*bf16")):  # of Triton's partial results, of FlashInfer's
        fixed = {**heads, "DV": target.value_dim, "V": 512, "HEADS": 4, "HAS_ORDER": has_order, "HAS_SINKS": True}
        found.append(_compiled(merges.merge_results, types | {"outs": outs}, fixed, target, 4))
    fixed = {"NUM_HEADS": 8, "PAGE_SIZE": 64, "D": target.head_dim, "W": 1024, "ROWS": 2}
    found.append(_compiled(kernels.store_tokens, types, fixed, target, 4))
    return found


def _compiled(kernel: Any, types: dict[str, str], fixed: dict[str, Any], target: Target, num_warps: int) -> int:
    compiler: Any = importlib.import_module("triton.compiler")
    gpu: Any = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", target.capability, 32)
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name] not in ("constexpr", "fp32")]
    source = compiler.ASTSource(
        fn=kernel, signature=signature, constexprs=fixed, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    compiled = compiler.compile(source, target=gpu, options={"num_warps": num_warps, "num_stages": 2})
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)
