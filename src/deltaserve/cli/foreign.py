"""Flags of SGLang that people bring along: what replaces each, or that it is accepted because it changes nothing."""

from deltaserve.base.errors import ConfigError

ACCEPTED = {
    "disaggregation-decode-enable-radix-cache": ("true", "it is always on; --disable-radix-cache turns it off"),
    "enable-metrics": ("true", "metrics are always on"),
    "enable-cache-report": ("true", "usage always reports cached tokens"),
    "disable-overlap-schedule": ("true", "steps do not overlap"),
    "overlap-schedule": ("0", "a step is planned after the one before it is committed; depth 1 is not built yet"),
    "tp-size": ("1", "a worker has one rank; start more workers with --prefill and --decode"),
    "dp-size": ("1", "start more workers with --prefill and --decode"),
    "pp-size": ("1", "layers are not split over workers"),
    "ep-size": ("1", "experts are not split over workers"),
}
"""name |-> the only value that means what happens anyway, and why no other one does."""

SWITCHES = frozenset(name for name, (value, _) in ACCEPTED.items() if value == "true")

_MACHINES = "start `deltaserve prefill|decode` on each machine and name them to `deltaserve router --workers`"
_MODEL_FOLDER = "the tokenizer and its template are those of the model folder"
_GRAPHS = "there are no CUDA graphs to set up"
_TIERS = "pages have one tier, the memory of the worker"

REFUSED = {
    "model": "use --model-path",
    "tp": "use --tp-size",
    "tensor-parallel-size": "use --tp-size",
    "dp": "use --prefill and --decode",
    "data-parallel-size": "use --prefill and --decode",
    "api-key": "secrets come from files; use --api-key-file",
    "admin-api-key": "secrets come from files; use --api-key-file with an admin line",
    "max-total-tokens": "use --num-pages (tokens / page size)",
    "max-model-len": "use --context-length",
    "max-num-seqs": "use --max-running-requests",
    "block-size": "use --page-size",
    "gpu-memory-utilization": "use --mem-fraction-static",
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
    "disaggregation-ib-device": "use --trusted-data-network; devices follow from it",
    "load-balance-method": "the pair with the least expected time to first token is taken",
    "enable-hierarchical-cache": _TIERS,
    "hicache-ratio": _TIERS,
    "disable-cuda-graph": _GRAPHS,
    "cuda-graph-max-bs": _GRAPHS,
    "cuda-graph-bs": _GRAPHS,
    "speculative-algorithm": "speculative decoding is not built yet",
    "mamba-ssm-dtype": "recurrent models are not built yet",
    "log-requests": "use --log-level debug",
    "log-level-http": "use --log-level",
    "watchdog-timeout": "the watchdog has no setting; /livez reports it",
    "enable-mixed-chunk": "prompts and decoding always share steps where one worker does both",
}


def check_foreign(name: str, value: str, where: str) -> bool:
    """Whether `name` is a foreign flag that may be ignored. Raises ConfigError for one that may not."""
    if name in REFUSED:
        raise ConfigError(f"{where}: has no meaning here; {REFUSED[name]}")
    if name not in ACCEPTED:
        return False
    allowed, reason = ACCEPTED[name]
    if value.lower() != allowed:
        raise ConfigError(f"{where} {value[:80]}: only {allowed} is possible; {reason}")
    return True
