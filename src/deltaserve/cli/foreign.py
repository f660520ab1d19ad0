"""Flags of SGLang and vLLM that people bring along: what each is called here, or why it is none of ours.

Some are accepted because they say what happens anyway.
"""

from collections.abc import Iterable

from deltaserve.base.errors import ConfigError

_CACHE = "the prefix cache is always on; --disable-radix-cache turns it off"
_RANKS = "tensor parallelism is not built yet: a worker has one rank; start more workers with --prefill and --decode"
_MORE_WORKERS = "start more workers with --prefill and --decode"

ACCEPTED = {
    "disaggregation-decode-enable-radix-cache": ("true", _CACHE),
    "disaggregation-enable-decode-radix-cache": ("true", _CACHE),
    "enable-prefix-caching": ("true", _CACHE),
    "enable-metrics": ("true", "metrics are always on, at /metrics"),
    "enable-cache-report": ("true", "usage always reports cached tokens"),
    "disable-overlap-schedule": ("true", "steps do not overlap"),
    "overlap-schedule": ("0", "a step is planned after the one before it is committed; depth 1 is not built yet"),
    "tp-size": ("1", _RANKS),
    "tp": ("1", _RANKS),
    "tensor-parallel-size": ("1", _RANKS),
    "dp-size": ("1", _MORE_WORKERS),
    "dp": ("1", _MORE_WORKERS),
    "data-parallel-size": ("1", _MORE_WORKERS),
    "pp-size": ("1", "layers are not split over workers"),
    "pipeline-parallel-size": ("1", "layers are not split over workers"),
    "ep-size": ("1", "experts are not split over workers"),
}
"""name |-> the only value that means what happens anyway, and why no other one does."""

SWITCHES = frozenset(name for name, (value, _) in ACCEPTED.items() if value == "true")

RENAMED = {
    "model": "model-path",
    "max-model-len": "context-length",
    "max-num-seqs": "max-running-requests",
    "max-num-batched-tokens": "max-prefill-tokens",
    "block-size": "page-size",
    "gpu-memory-utilization": "mem-fraction-static",
    "no-enable-prefix-caching": "disable-radix-cache",
}
"""name |-> what the same is called here."""

_MACHINES = "start `deltaserve prefill|decode` on each machine and name them to `deltaserve router --workers`"
_MODEL_FOLDER = "the tokenizer and its template are those of the model folder"
_GRAPHS = "there are no CUDA graphs to set up"
_TIERS = "pages have one tier, the memory of the worker"
_SPECULATION = "speculative decoding is not built yet"
_RECURRENT = "recurrent models are not built yet"

REFUSED = {
    "api-key": "secrets come from files; use --api-key-file",
    "admin-api-key": "secrets come from files; use --api-key-file with an admin line",
    "max-total-tokens": "use --num-pages (tokens / page size)",
    "kv-transfer-config": "use --disaggregation-transfer-backend",
    "schedule-conservativeness": "use --num-reserved-decode-tokens",
    "random-seed": "each request has a seed of its own; send `seed`",
    "trust-remote-code": "code from a model folder is never run",
    "load-format": "weights are read from safetensors only",
    "quantization": "the checkpoint says how it is quantized",
    "tokenizer-path": _MODEL_FOLDER,
    "tokenizer-mode": _MODEL_FOLDER,
    "chat-template": _MODEL_FOLDER,
    "skip-tokenizer-init": "send token ids as the prompt; the tokenizer stays",
    "nnodes": _MACHINES,
    "node-rank": _MACHINES,
    "dist-init-addr": _MACHINES,
    "disaggregation-ib-device": "use --transfer-devices and --transfer-tls",
    "load-balance-method": "the pair with the least expected time to first token is taken",
    "enable-hierarchical-cache": _TIERS,
    "hicache-ratio": _TIERS,
    "enable-hisparse": _TIERS,
    "disable-cuda-graph": _GRAPHS,
    "cuda-graph-max-bs": _GRAPHS,
    "cuda-graph-bs": _GRAPHS,
    "enable-symm-mem": "there are no ranks to share memory",
    "scheduler-recv-interval": "messages are read in every turn of a worker's loop",
    "prefill-round-robin-balance": "the pair with the least expected time to first token is taken",
    "enable-single-batch-overlap": "steps do not overlap",
    "speculative-algorithm": _SPECULATION,
    "speculative-num-steps": _SPECULATION,
    "speculative-eagle-topk": _SPECULATION,
    "speculative-num-draft-tokens": _SPECULATION,
    "speculative-draft-model-path": _SPECULATION,
    "tool-call-parser": "finding tool calls in answers is not built yet",
    "enable-auto-tool-choice": "finding tool calls in answers is not built yet",
    "reasoning-parser": "telling reasoning from answer is not built yet",
    "grammar-backend": "structured output is not built yet",
    "allow-auto-truncate": "a prompt that does not fit is refused with both lengths, never cut",
    "sleep-on-idle": "an idle worker always sleeps",
    "mamba-ssm-dtype": _RECURRENT,
    "mamba-scheduler-strategy": _RECURRENT,
    "max-mamba-cache-size": _RECURRENT,
    "log-requests": "each request leaves one line of JSON in the log of the front, without its text",
    "log-level-http": "use --log-level",
    "watchdog-timeout": "the watchdog has no setting; /livez reports it",
    "enable-mixed-chunk": "prompts and decoding always share steps where one worker does both",
}


def check_foreign(name: str, value: str, where: str) -> bool:
    """Whether `name` is a foreign flag that may be ignored. Raises ConfigError for one that may not."""
    if name in RENAMED:
        raise ConfigError(f"{where}: is called {'--' if where.startswith('-') else ''}{RENAMED[name]} here")
    if name in REFUSED:
        raise ConfigError(f"{where}: has no meaning here; {REFUSED[name]}")
    if name not in ACCEPTED:
        return False
    allowed, reason = ACCEPTED[name]
    if value.lower() != allowed:
        raise ConfigError(f"{where} {value[:80]}: only {allowed} is possible; {reason}")
    return True


def foreign_notes(names: Iterable[str]) -> tuple[str, ...]:
    """One line for each switch among the flags given: that it changes nothing, and why."""
    return tuple(f"--{name} changes nothing: {ACCEPTED[name][1]}" for name in names if name in SWITCHES)
