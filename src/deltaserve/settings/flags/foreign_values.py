"""Values of our options that have a meaning elsewhere, and our options where a command has no use for them."""

import re
from collections.abc import Iterable, Mapping, Sequence

from deltaserve.core.branches import ANSWERS, ATTENTION
from deltaserve.settings.config import DisaggregationSettings
from deltaserve.settings.flags.foreign import Denied, Idle

_LATTER = "auto takes what computes attention here"
_READ = "what a checkpoint is quantized as is read from it; leave it out"
_NO_CHUNKS = "decode computes no prompts, only suffixes up to --decode-extend-tokens"
_NO_END = "chunks cannot be turned off, the memory of a step is planned for them; write the longest that may be"

_ATTENTION = (
    "fa3 fa4 FLASH_ATTN flashmla FLASHMLA cutlass_mla CUTLASS_MLA trtllm_mla trtllm_mha flex_attention "
    "FLEX_ATTENTION dual_chunk_flash_attn hybrid_linear_attn aiter wave intel_amx ascend nsa dsa"
)
_QUANTIZED = "awq gptq fp8 w8a8_int8 w8a8_fp8 bitsandbytes modelopt modelopt_fp8 modelopt_fp4 mxfp4"

Told = str | Idle | Denied
"""Our own value for one of elsewhere, or why it is left out, or why it is refused."""

VALUES: Mapping[tuple[str, str], Told] = {
    ("dtype", "half"): "float16",
    ("dtype", "fp16"): "float16",
    ("dtype", "bf16"): "bfloat16",
    ("dtype", "float"): "float32",
    ("dtype", "fp32"): "float32",
    ("kv-cache-dtype", "fp16"): "float16",
    ("kv-cache-dtype", "bf16"): "bfloat16",
    ("kv-cache-dtype", "fp8"): "fp8_e4m3",
    ("kv-cache-dtype", "fp8_e5m2"): Denied("of the two forms of fp8 only fp8_e4m3 is built; write that"),
    ("allowed-origins", '["*"]'): "*",  # vLLM's list in JSON
    ("context-length", "-1"): "auto",
    ("context-length", "0"): "auto",
    **{("default-max-tokens", text): Idle("the context says how long an answer may be") for text in ("-1", "-2")},
    **{("attention-backend", word): name for name, branch in ATTENTION.items() for word in branch.known_as},
    **{("attention-backend", name): Idle(_LATTER) for name in _ATTENTION.split()},
    **{
        (setting.replace("_", "-"), word): name
        for name, branch in ANSWERS.items()
        for setting in branch.help
        for word in branch.known_as
    },
    **{("quantization", name): Idle("the checkpoint says so") for name in ("gguf", "compressed-tensors")},
    **{("quantization", name): Denied(_READ) for name in _QUANTIZED.split()},
    ("schedule-policy", "lof"): Denied(
        "the order of requests is by arrival, cached prefix or priority; write fcfs, lpm or priority, or leave it out"
    ),
    ("scheduling-policy", "priority"): "priority-low-first",  # vLLM's; SGLang's of that name takes higher values first
}
"""(our key or its name elsewhere, a value that has a meaning there) |-> what becomes of it."""

_OF_COMMAND: Mapping[tuple[str, str, str], Told] = {
    ("decode", "chunked-prefill-size", "-1"): Idle(_NO_CHUNKS),
    ("decode", "chunked-prefill-size", "0"): Idle(_NO_CHUNKS),
    **{
        (command, "chunked-prefill-size", value): Denied(_NO_END)
        for command in ("prefill", "serve")
        for value in ("-1", "0")
    },
}
"""Values of one command: (command, our key, a value that has a meaning elsewhere) |-> what becomes of it."""

_TOKENS = ("context-length", "max-prefill-tokens")
_ROUND_TOKENS = {"k": 1000, "K": 1024, "m": 1_000_000, "M": 1 << 20}
_ROUND = re.compile(r"[0-9]{1,6}[kKmM]")
"""vLLM's way to write 32768 as 32K."""
_NO_HTTP = "a worker has no HTTP; its links listen on --disaggregation-bootstrap-port"
_ROUTERS = "the router says it, not a worker"
_ROUTERS_KEYS = ("served-model-name", "stream-interval", "default-max-tokens", "tool-call-parser", "reasoning-parser")

_ELSEWHERE: Mapping[tuple[str, str], Idle | Denied] = {
    **{(worker, "port"): Idle(_NO_HTTP) for worker in ("prefill", "decode")},
    **{(worker, key): Idle(_ROUTERS) for worker in ("prefill", "decode") for key in _ROUTERS_KEYS},
}
"""(command, a key of ours that it has not) |-> what becomes of it."""


def told_value(command: str, name: str, key: str, value: str) -> Told | None:
    """What becomes of a value of an option of ours that has a meaning elsewhere; None: it has none. `name`: what the
    option was called, `key` or its name elsewhere."""
    if key in _TOKENS and _ROUND.fullmatch(value):
        return str(int(value[:-1]) * _ROUND_TOKENS[value[-1]])
    return _OF_COMMAND.get((command, key, value)) or VALUES.get((name, value)) or VALUES.get((key, value))


def told_elsewhere(command: str, key: str, commands: Iterable[str]) -> Idle | Denied:
    """What becomes of an option that `command` has not, and `commands` have."""
    fallback = Denied(f"only `deltaserve {'` or `deltaserve '.join(commands)}` has it; leave it out")
    return _ELSEWHERE.get((command, key), fallback)


_LINK_PORT = str(DisaggregationSettings().disaggregation_bootstrap_port)
PAIR = ("prefill", "decode")
"""Flags of SGLang's router: `--prefill URL [BOOTSTRAP_PORT]` and `--decode URL`, each as often as there are workers."""


def advise_workers(workers: Sequence[tuple[str, Sequence[str]]]) -> str:
    """What to write for the flags of `PAIR`: (name, values).

    A URL names where a worker has HTTP, which ours have not. The port beside it is that of a prefill worker's links.
    Workers on one host need a port each.
    """
    entries: list[str] = []
    for role, values in workers:
        url, *ports = values or ("HOST",)
        host = url.partition("://")[2] or url
        host = host.partition("/")[0].rpartition(":")[0] or host
        port = int(next((port for port in ports if port.isdigit()), _LINK_PORT))
        while any(entry.endswith(f"@{host}:{port}") for entry in entries):
            port += 1
        entries.append(f"{role}@{host}:{port}")
    flags = " and ".join(dict.fromkeys(f"--{role}" for role, _ in workers))
    return (
        f"{flags}: workers have no HTTP; write --workers {','.join(entries)}, with the port of each one's "
        "--disaggregation-bootstrap-port"
    )
