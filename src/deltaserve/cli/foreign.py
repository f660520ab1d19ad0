"""Flags of SGLang and vLLM that people bring along: what each is called here, or why it is none of ours.

Some are accepted because they say what happens anyway.
"""

from collections.abc import Iterable, Mapping

from deltaserve.base.errors import ConfigError

_CACHE = "the prefix cache is always on; --disable-radix-cache turns it off"
_LAYERS = "layers are not split over workers"
_CHUNKS = "prompts are always computed in chunks; --chunked-prefill-size says how long"
_READERS = "weights are read from safetensors and GGUF files, whichever MODEL is"
_TORCH = "attention has four backends (--attention-backend), and no such choice; leave the flag out"
_LOGGED = "each request leaves one line of JSON in the log of the front, without its text"

ACCEPTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "disaggregation-decode-enable-radix-cache": (("true",), _CACHE),
    "disaggregation-enable-decode-radix-cache": (("true",), _CACHE),
    "enable-prefix-caching": (("true",), _CACHE),
    "radix-eviction-policy": (("lru",), "what was used least recently is evicted first"),
    "enable-chunked-prefill": (("true",), _CHUNKS),
    "enable-expert-parallel": (("true",), "experts are whole on ranks where they divide over them; see --ep-size"),
    "enable-mixed-chunk": (("true",), "prompts and decoding always share steps where one worker does both"),
    "enable-metrics": (("true",), "metrics are always on, at /metrics"),
    "enable-cache-report": (("true",), "usage always reports cached tokens"),
    "enable-request-time-stats-logging": (("true",), _LOGGED),
    "disable-log-requests": (("true",), _LOGGED),
    "no-enable-log-requests": (("true",), _LOGGED),
    "overlap-schedule": (
        ("1",),
        "steps are planned ahead; --disable-overlap-schedule ends that",
    ),
    "sleep-on-idle": (("true",), "an idle worker always sleeps"),
    "pd-disaggregation": (("true",), "--workers says which of them prefill and which decode"),
    "load-format": (("auto", "safetensors", "gguf"), _READERS),
    "tokenizer-mode": (("auto",), "the tokenizer is that of the model folder"),
    "mamba-scheduler-strategy": (("auto", "extra_buffer"), "a state that is kept is never written over"),
    "pp-size": (("1",), _LAYERS),
    "pipeline-parallel-size": (("1",), _LAYERS),
    "nnodes": (
        ("1",),
        "start `deltaserve prefill|decode` on each machine and name them to `deltaserve router --workers`",
    ),
}
"""name |-> the only values that mean what happens anyway, and why no other one does."""

SWITCHES = frozenset(name for name, (values, _) in ACCEPTED.items() if values == ("true",))

ALIASES = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
}
"""name |-> one of ours that it is another word for."""

RENAMED = {
    "model": "model-path",
    "max-model-len": "context-length",
    "max-num-seqs": "max-running-requests",
    "max-num-batched-tokens": "max-prefill-tokens",
    "block-size": "page-size",
    "gpu-memory-utilization": "mem-fraction-static",
    "no-enable-prefix-caching": "disable-radix-cache",
    "disaggregation-ib-device": "transfer-devices",
    "hf-overrides": "json-model-override-args",
    "enforce-eager": "disable-cuda-graph",
    "max-cudagraph-capture-size": "cuda-graph-max-bs",
}
"""name |-> what the same is called here."""

_REASONS = {
    "secrets come from files; use --api-key-file": "api-key",
    "secrets come from files; use --api-key-file with an admin line": "admin-api-key",
    "TLS is ended by a proxy before the server": "ssl-keyfile ssl-certfile ssl-ca-certs ssl-keyfile-password",
    "use --num-pages (tokens / page size)": "max-total-tokens num-gpu-blocks-override",
    "use --disaggregation-transfer-backend": "kv-transfer-config",
    "use --num-reserved-decode-tokens": "schedule-conservativeness",
    "use --log-level": "log-level-http uvicorn-log-level",
    "use --workers prefill@HOST:PORT,decode@HOST:PORT": "worker-urls",
    "each request has a seed of its own; send `seed`": "random-seed seed",
    "code from a model folder is never run; leave it out": "trust-remote-code",
    "models are never downloaded; MODEL is a folder or a GGUF file": "download-dir revision tokenizer-revision",
    "the checkpoint says how it is quantized; leave it out": (
        "quantization-param-path modelopt-quant fp8-gemm-backend fp4-gemm-backend torchao-config"
    ),
    "the tokenizer and its template are those of the model folder": (
        "tokenizer tokenizer-path chat-template hf-chat-template-name chat-template-content-format "
        "completion-template preferred-sampling-params generation-config override-generation-config"
    ),
    "send token ids as the prompt; the tokenizer stays": "skip-tokenizer-init",
    "the front has one tokenizer": "tokenizer-worker-num api-server-count",
    "start `deltaserve prefill|decode` on each machine and name them to `deltaserve router --workers`": (
        "node-rank dist-init-addr nccl-init-addr nccl-port dist-timeout distributed-executor-backend "
        "data-parallel-address data-parallel-rpc-port data-parallel-start-rank data-parallel-size-local"
    ),
    "CUDA_VISIBLE_DEVICES says which GPUs a command sees": "base-gpu-id gpu-id-step",
    "workers learn from each other's greeting what they are": (
        "disaggregation-decode-tp disaggregation-decode-dp disaggregation-prefill-pp "
        "disaggregation-decode-polling-interval"
    ),
    "the pair with the least expected time to first token is taken": (
        "load-balance-method prefill-round-robin-balance policy prefill-policy decode-policy cache-threshold "
        "balance-abs-threshold balance-rel-threshold"
    ),
    "of a group of workers that share experts each has all else; a prompt is computed by one worker": (
        "enable-dp-lm-head moe-dense-tp-size enable-prefill-delayer attn-cp-size context-parallel-size"
    ),
    "how experts are exchanged is not a choice, and none is held twice": (
        "moe-a2a-backend deepep-mode deepep-config moe-runner-backend ep-num-redundant-experts "
        "ep-dispatch-algorithm init-expert-location enable-eplb eplb-algorithm eplb-rebalance-num-iterations "
        "disable-shared-experts-fusion expert-distribution-recorder-mode"
    ),
    "pages have one tier, the memory of the worker": (
        "enable-hierarchical-cache hicache-ratio hicache-size hicache-io-backend hicache-write-policy "
        "hicache-mem-layout hicache-storage-backend hicache-storage-prefetch-policy enable-lmcache enable-hisparse "
        "disaggregation-decode-enable-offload-kvcache cpu-offload-gb swap-space"
    ),
    "nothing of CUDA graphs can be set but --disable-cuda-graph and --cuda-graph-max-bs": (
        "cuda-graph-bs disable-cuda-graph-padding cudagraph-capture-sizes "
        "disable-piecewise-cuda-graph enable-piecewise-cuda-graph compilation-config enable-torch-compile "
        "torch-compile-max-bs"
    ),
    _TORCH: (
        "prefill-attention-backend decode-attention-backend mm-attention-backend sampling-backend "
        "enable-flashinfer-mla disable-chunked-prefix-cache flashinfer-mla-disable-ragged"
    ),
    "there is no memory that ranks share": "enable-symm-mem",
    "how sums over ranks are made is not a choice": (
        "disable-custom-all-reduce enable-nccl-nvls enable-p2p-check enable-flashinfer-allreduce-fusion enable-mscclpp"
    ),
    "messages are read in every turn of a worker's loop": "scheduler-recv-interval",
    "a step is planned while the one before computes, and computed when that is over": (
        "enable-single-batch-overlap enable-two-batch-overlap async-scheduling num-continuous-decode-steps"
    ),
    "--speculative-draft-model-path names the folder of a draft head, which brings its own map of tokens": (
        "speculative-draft-model speculative-token-map speculative-config"
    ),
    "states get as much memory as pages of tokens do; --max-mamba-cache-size says how many": "mamba-full-memory-ratio",
    "use --mamba-ssm-dtype; the inputs of convolutions are kept as --kv-cache-dtype says": (
        "mamba-cache-dtype mamba-ssm-cache-dtype"
    ),
    "recurrent layers are computed by torch alone": "mamba-backend linear-attn-backend",
    "windows get what running requests hold": "swa-full-tokens-ratio disable-hybrid-swa-memory",
    "finding tool calls in answers is not built yet": "tool-call-parser enable-auto-tool-choice tool-server",
    "telling reasoning from answer is not built yet": "reasoning-parser",
    "structured output is not built yet": "grammar-backend guided-decoding-backend structured-outputs-config",
    "adapters are not built yet": "enable-lora lora-paths lora-modules max-lora-rank max-loras-per-batch",
    "only text is read": "enable-multimodal limit-mm-per-prompt is-embedding",
    "a prompt that does not fit is refused with both lengths, never cut": "allow-auto-truncate",
    _LOGGED: "log-requests log-requests-level enable-log-requests",
    "a worker that computes writes a line every 10 s": "decode-log-interval disable-log-stats",
    "the watchdog has no setting; /livez reports it": "watchdog-timeout soft-watchdog-timeout",
    "each worker tries its transport when it starts": "skip-server-warmup warmups",
    "prompts are always computed in chunks": "no-enable-chunked-prefill max-num-partial-prefills",
}
"""reason |-> names, apart by spaces."""

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""name |-> why there is no such thing here, and what to use in its place."""

_NO_CHUNKS = ("chunked-prefill-size", "-1")
CHUNKLESS = "decode computes no prompts, only suffixes up to --decode-extend-tokens"

VALUES = {
    _NO_CHUNKS: "chunks cannot be turned off, the memory of a step is planned for them; name the longest that may be",
    ("dtype", "half"): "is called float16 here",
    ("dtype", "float"): "is called float32 here",
    ("dtype", "bf16"): "is called bfloat16 here",
    ("dtype", "fp16"): "is called float16 here",
    ("dtype", "fp32"): "is called float32 here",
    ("kv-cache-dtype", "bf16"): "is called bfloat16 here",
    ("kv-cache-dtype", "fp8"): "is called fp8_e4m3 here",
    ("kv-cache-dtype", "fp8_e5m2"): "of the two forms of fp8 only fp8_e4m3 is built",
    **{
        ("quantization", name): "what a checkpoint is quantized as is read from it; leave it out"
        for name in ("awq", "gptq", "fp8", "gguf", "w8a8_int8", "w8a8_fp8", "compressed-tensors", "bitsandbytes")
    },
    ("schedule-policy", "lof"): "the order of requests is by arrival (fcfs) or by cached prefix (lpm)",
}
"""(our name, a value that has a meaning elsewhere) |-> what to say of it."""

_ELSEWHERE = {
    ("prefill", "port"): "a worker has no HTTP; its links listen on --disaggregation-bootstrap-port",
    ("decode", "port"): "a worker has no HTTP; its links listen on --disaggregation-bootstrap-port",
    ("router", "prefill"): "name workers with --workers prefill@HOST:PORT,decode@HOST:PORT",
    ("router", "decode"): "name workers with --workers prefill@HOST:PORT,decode@HOST:PORT",
}
"""(command, a name of ours that it has not) |-> what to use there."""


def check_foreign(name: str, value: str, where: str) -> bool:
    """Whether `name` is a foreign flag that may be ignored. Raises ConfigError for one that may not."""
    if name in RENAMED:
        raise ConfigError(f"{where}: is called {'--' if where.startswith('-') else ''}{RENAMED[name]} here")
    if name in REFUSED:
        raise ConfigError(f"{where}: has no meaning here; {REFUSED[name]}")
    if name not in ACCEPTED:
        return False
    allowed, reason = ACCEPTED[name]
    if value.lower() not in allowed:
        raise ConfigError(f"{where} {value[:80]}: only {' or '.join(allowed)} is possible; {reason}")
    return True


def check_value(command: str, key: str, value: str, where: str) -> bool:
    """Whether this value of an option of ours, which has a meaning elsewhere, may be left out of this command's.

    Raises ConfigError for one that may not; False for every other value.
    """
    if (key, value) == _NO_CHUNKS and command == "decode":
        return True
    if (key, value) in VALUES:
        raise ConfigError(f"{where} {value}: {VALUES[key, value]}")
    return False


def advice_elsewhere(command: str, key: str, commands: Iterable[str]) -> str:
    """Of an option that `command` has not, and `commands` have."""
    of_others = f"only `deltaserve {'` or `deltaserve '.join(commands)}` has it"
    return f"{of_others}; {_ELSEWHERE[command, key]}" if (command, key) in _ELSEWHERE else of_others


def foreign_notes(command: str, flags: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each switch among the flags given: that it changes nothing, and why."""
    notes = [f"--{name} changes nothing: {ACCEPTED[name][1]}" for name in flags if name in SWITCHES]
    if command == "decode" and flags.get("chunked_prefill_size") == "-1":
        notes.append(f"--chunked-prefill-size -1 changes nothing: {CHUNKLESS}")
    return tuple(notes)
