"""Launch lines that people copy from SGLang's pull requests: each flag is accepted, or refused with a reason."""

import pytest

from deltaserve.base.errors import ConfigError
from deltaserve.cli.settings_merge import load

M = "models/tiny"

ACCEPTED = [
    ("decode", ["--disaggregation-mode", "decode"]),
    ("prefill", ["--disaggregation-mode", "prefill"]),
    ("decode", ["--disaggregation-decode-enable-radix-cache"]),
    ("decode", ["--disaggregation-enable-decode-radix-cache"]),
    ("decode", ["--disaggregation-transfer-backend", "nixl"]),
    ("prefill", ["--disaggregation-bootstrap-port", "8998"]),
    ("decode", ["--page-size", "64"]),
    ("decode", ["--kv-cache-dtype", "fp8_e4m3"]),
    ("decode", ["--context-length", "131072"]),
    ("decode", ["--json-model-override-args", '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}']),
    ("decode", ["--mem-fraction-static", "0.85"]),
    ("prefill", ["--max-prefill-tokens", "16384"]),
    ("prefill", ["--chunked-prefill-size", "16384", "--max-prefill-tokens", "16384"]),
    ("decode", ["--max-running-requests", "256"]),
    ("decode", ["--num-reserved-decode-tokens", "400"]),
    ("router", ["--workers", "decode@localhost:1", "--stream-interval", "30"]),
    ("prefill", ["--disable-overlap-schedule"]),
    ("decode", ["--tp-size", "1"]),
]
REFUSED = [
    ("decode", ["--tp-size", "2"], "tensor parallelism is not built yet"),
    ("decode", ["--dp-size", "4"], "start more workers"),
    ("decode", ["--ep-size", "4"], "experts are not split"),
    ("decode", ["--chunked-prefill-size", "-1"], "must be an integer >= 1 or auto"),
    ("decode", ["--stream-interval", "30"], "only `deltaserve serve` or `deltaserve router` has it"),
    ("decode", ["--disaggregation-transfer-backend", "mooncake"], "must be nixl"),
    ("decode", ["--disaggregation-ib-device", "mlx5_0,mlx5_1"], "--transfer-devices"),
    ("decode", ["--load-balance-method", "total_tokens"], "least expected time to first token"),
    ("decode", ["--prefill-round-robin-balance"], "least expected time to first token"),
    ("decode", ["--cuda-graph-max-bs", "64"], "no CUDA graphs"),
    ("decode", ["--enable-symm-mem"], "no ranks"),
    ("decode", ["--scheduler-recv-interval", "10"], "every turn of a worker's loop"),
    ("prefill", ["--enable-single-batch-overlap"], "steps do not overlap"),
    ("prefill", ["--trust-remote-code"], "never run"),
    ("decode", ["--schedule-policy", "lof"], "must be fcfs, lpm"),
    ("decode", ["--speculative-algorithm", "EAGLE"], "speculative decoding is not built yet"),
    ("decode", ["--speculative-num-steps", "3"], "speculative decoding is not built yet"),
    ("decode", ["--speculative-eagle-topk", "1"], "speculative decoding is not built yet"),
    ("decode", ["--speculative-num-draft-tokens", "4"], "speculative decoding is not built yet"),
    ("decode", ["--mamba-scheduler-strategy", "extra_buffer"], "recurrent models are not built yet"),
    ("decode", ["--mamba-ssm-dtype", "bfloat16"], "recurrent models are not built yet"),
    ("decode", ["--grammar-backend", "xgrammar"], "structured output is not built yet"),
    ("decode", ["--tool-call-parser", "qwen3_coder"], "not built yet"),
    ("decode", ["--allow-auto-truncate"], "never cut"),
    ("decode", ["--sleep-on-idle"], "always sleeps"),
]


@pytest.mark.parametrize(("command", "flags"), ACCEPTED, ids=[f"{row[1][0]}-{row[0]}" for row in ACCEPTED])
def test_a_flag_is_accepted(command: str, flags: list[str]) -> None:
    load(command, "", [M, *flags], {})


@pytest.mark.parametrize(("command", "flags", "reason"), REFUSED, ids=[f"{row[1][0]}-{row[0]}" for row in REFUSED])
def test_a_flag_is_refused_with_a_reason(command: str, flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(command, "", [M, *flags], {})
    assert flags[0] in str(refused.value)
    assert reason in str(refused.value)
