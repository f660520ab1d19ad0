"""Triton's kernels compiled for a GPU that need not be there. For a process that does not interpret them."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A compute capability (major * 10 + minor), and a model's sizes."""

    capability: int
    head_dim: int
    value_dim: int
    group_size: int


class Constants:
    """In place of a kernel: the constants that it is compiled for."""

    def __init__(self) -> None:
        self.found: set[tuple[tuple[str, object], ...]] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *tensors, **constants: self.found.add(tuple(constants.items()))


def compiled_sizes(target: Target) -> list[int]:
    """Bytes of shared memory that partial results take, for short queries and for long ones, in bfloat16 and over
    e4m3; of the merges, and of storing keys. The last three may be 0."""
    kernels: Any = importlib.import_module("deltaserve.compute.attention.triton.triton_kernels")
    merges: Any = importlib.import_module("deltaserve.compute.attention.triton_merge")
    attention: Any = importlib.import_module("deltaserve.compute.attention.triton.triton_attention")
    d1, d2 = attention.split_dim(target.head_dim)
    v1, v2 = attention.split_dim(target.value_dim)
    heads = {"NUM_HEADS": 8 * target.group_size}
    sizes = {"D": target.head_dim, "DV": target.value_dim, "D1": d1, "D2": d2, "V1": v1, "V2": v2}
    strides = {
        "Q_TOKEN_STRIDE": 1 << 12,
        "Q_HEAD_STRIDE": target.head_dim,
        "PAGE_STRIDE": 1 << 18,
        "HEAD_STRIDE": 1 << 14,
    }
    kinds = {"GROUP_SIZE": target.group_size, "PAGE_SIZE": 64, "WINDOW": 100}
    language: Any = importlib.import_module("triton.language")
    types = dict.fromkeys(("q", "first", "second", "plane"), "*bf16") | dict.fromkeys(
        ("outs", "sums", "sinks"), "*fp32"
    )
    types |= {"out": "*bf16", "scale": "fp32"}
    lists = ("tiles", "tokens", "positions", "first_parts", "part_starts", "order", "pages", "write_pages")
    types |= dict.fromkeys((*lists, "num_tiles", "num_tokens"), "*i32")
    has_e4m3 = target.capability >= 89
    found = []
    for is_fp8 in (False, True):
        of = types | dict.fromkeys(("keys", "values"), "*u8" if is_fp8 else "*bf16")
        kept = {"FP8": is_fp8, "HAS_E4M3": has_e4m3, "COMPUTE": language.float16 if is_fp8 else language.bfloat16}
        for rows, keys in attention.tile_sizes(target.group_size, target.head_dim):
            fixed = {**heads, **sizes, **strides, **kinds, **kept, "ROWS": rows, "KEYS": keys}
            num_warps = attention.num_warps(target.head_dim)
            found.append(compiled_bytes(kernels.partial_results, of, fixed, target.capability, num_warps))
    for has_order, outs in ((False, "*fp32"), (True, "*bf16")):  # of Triton's partial results, of FlashInfer's
        fixed = {**heads, "DV": target.value_dim, "V": 512, "PARTS": 8, "HAS_ORDER": has_order, "HAS_SINKS": True}
        found.append(compiled_bytes(merges.merge_results, types | {"outs": outs}, fixed, target.capability))
    of_values = dict.fromkeys(("FIRST_TOKEN_STRIDE", "SECOND_TOKEN_STRIDE"), 1 << 13)
    of_values |= dict.fromkeys(("FIRST_HEAD_STRIDE", "SECOND_HEAD_STRIDE"), target.head_dim)
    rows = {"NUM_HEADS": 8, "PAGE_SIZE": 64, "D": target.head_dim, "W": 1024, "ROWS": 2, "TO_E4M3": has_e4m3}
    of = types | ({"plane": "*u8"} if has_e4m3 else {})
    found.append(compiled_bytes(kernels.store_tokens, of, {**strides, **of_values, **rows}, target.capability))
    return found


def compile_state_moves(capability: int) -> None:
    """Both copies of recurrent states, in each of their types."""
    kernels: Any = importlib.import_module("deltaserve.compute.attention.triton.state_kernels")
    fixed = {"SLOT_STRIDE": 36 << 19, "HEAD_STRIDE": 36 << 14, "NUM_HEADS": 32, "LENGTH": 1 << 14}
    fixed |= {"NUM_BLOCKS": 16, "BLOCK": 1024}
    for kernel in (kernels.load_states, kernels.store_states):
        for kept_as in ("*fp32", "*bf16", "*fp16"):
            types = {"slots": "*i64", **dict.fromkeys(("states", "values", "out"), kept_as)}
            compiled_bytes(kernel, types, fixed, capability)


def compile_planning(capability: int) -> None:
    """Compile the kernel that makes work lists of rows of one position, and of a few, over windows and not."""
    kernels: Any = importlib.import_module("deltaserve.compute.attention.triton.row_planning")
    types = dict.fromkeys(("lines", "positions", "lens"), "*i64")
    lists = ("num_rows", "table", "private_from", "num_shared", "token_positions", "write_pages", "first_parts")
    types |= dict.fromkeys((*lists, "part_starts", "num_tiles", "tiles"), "*i32")
    sizes = {"BLOCK": 256, "PAGE_SIZE": 64, "SPLIT": 256, "GROUP_SIZE": 7, "TILE_ROWS": 16, "KEYS": 64, "WRITTEN": 32}
    for window_len in (0, 100):
        for most_len, doublings in ((1, 0), (16, 11)):
            fixed = sizes | {"WINDOW": window_len, "MOST_LEN": most_len, "MOST_RESULTS": 128, "DOUBLINGS": doublings}
            compiled_bytes(kernels.plan_rows, types, fixed, capability)


def compiled_bytes(
    kernel: Any,
    types: dict[str, str],
    fixed: dict[str, Any],
    capability: int,
    num_warps: int = 4,
    num_stages: int = 2,
) -> int:
    """Bytes of shared memory. `types`: of what is not `fixed`, int32 where it is not named."""
    compiled = compiled_kernel(kernel, types, fixed, capability, num_warps=num_warps, num_stages=num_stages)
    return int(compiled.metadata.shared)


def compiled_kernel(
    kernel: Any, types: dict[str, str], fixed: dict[str, Any], capability: int, **options: object
) -> Any:
    """What Triton made of it; `types` as above, `options` as of a launch."""
    compiler: Any = importlib.import_module("triton.compiler")
    gpu: Any = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name] not in ("constexpr", "fp32")]
    source = compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: value for name, value in fixed.items() if name in kernel.arg_names},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = compiler.compile(source, target=gpu, options=options)
    assert compiled.asm["cubin"]
    return compiled
