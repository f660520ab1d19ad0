"""Launch lines that people copy from SGLang's pull requests: each flag is accepted, or refused with a reason."""

from pathlib import Path

import pytest

from deltaserve.base.errors import ConfigError
from deltaserve.cli.foreign import CHUNKLESS, VALUES
from deltaserve.cli.settings_merge import load

M = "models/tiny"

ACCEPTED = [
    ("decode", ["--disaggregation-mode", "decode"]),
    ("prefill", ["--disaggregation-mode", "prefill"]),
    ("decode", ["--disaggregation-decode-enable-radix-cache"]),
    ("decode", ["--disaggregation-enable-decode-radix-cache"]),
    ("decode", ["--disaggregation-transfer-backend", "nixl"]),
    ("decode", ["--disaggregation-transfer-backend", "mooncake"]),
    ("prefill", ["--disaggregation-bootstrap-port", "8998"]),
    ("decode", ["--page-size", "64"]),
    ("decode", ["--kv-cache-dtype", "fp8_e4m3"]),
    ("decode", ["--attention-backend", "flashinfer"]),
    ("decode", ["--context-length", "131072"]),
    ("decode", ["--json-model-override-args", '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}']),
    ("decode", ["--mem-fraction-static", "0.85"]),
    ("prefill", ["--max-prefill-tokens", "16384"]),
    ("prefill", ["--chunked-prefill-size", "16384", "--max-prefill-tokens", "16384"]),
    ("decode", ["--max-running-requests", "256"]),
    ("decode", ["--num-reserved-decode-tokens", "400"]),
    ("router", ["--workers", "decode@localhost:1", "--stream-interval", "30"]),
    ("prefill", ["--disable-overlap-schedule"]),
    ("decode", ["--chunked-prefill-size", "-1"]),
    ("decode", ["--tp-size", "1"]),
    ("decode", ["--tp-size", "2"]),
    ("prefill", ["--tp", "2"]),
    ("prefill", ["--tensor-parallel-size", "4"]),
    ("decode", ["--ep-size", "4", "--tp-size", "4"]),
    ("prefill", ["--ep", "1", "--tp-size", "4"]),
    ("prefill", ["--enable-expert-parallel"]),
    ("decode", ["--dp", "1"]),
    ("serve", ["--dp-size", "2", "--enable-dp-attention", "--ep-size", "2"]),
    ("serve", ["--data-parallel-size", "4", "--enable-dp-attention", "--tp", "2", "--decode-tp-size", "1"]),
    ("decode", ["--nnodes", "1"]),
    ("prefill", ["--load-format", "auto"]),
    ("prefill", ["--disable-cuda-graph"]),
    ("decode", ["--cuda-graph-max-bs", "64"]),
    ("prefill", ["--enable-cache-report"]),
    ("decode", ["--sleep-on-idle"]),
    ("decode", ["--mamba-scheduler-strategy", "extra_buffer"]),
    ("decode", ["--mamba-ssm-dtype", "bfloat16", "--max-mamba-cache-size", "500", "--mamba-track-interval", "256"]),
    ("prefill", ["--enable-mixed-chunk"]),
    ("prefill", ["--radix-eviction-policy", "lru"]),
    ("router", ["--workers", "decode@localhost:1", "--pd-disaggregation"]),
    ("decode", ["--speculative-algorithm", "NGRAM"]),
    ("decode", ["--speculative-num-steps", "3"]),
    ("decode", ["--speculative-eagle-topk", "1"]),
    ("decode", ["--speculative-num-draft-tokens", "4"]),
]
REFUSED = [
    ("decode", ["--dp-size", "4"], "`deltaserve serve` starts a group"),
    ("decode", ["--enable-dp-attention"], "`deltaserve serve` starts a group"),
    ("serve", ["--dp-size", "4"], "add --enable-dp-attention"),
    ("serve", ["--enable-dp-attention"], "add --dp-size N"),
    ("serve", ["--dp-size", "2", "--enable-dp-attention", "--disaggregation-mode", "null"], "one worker does both"),
    ("serve", ["--dp-size", "2", "--enable-dp-attention", "--tp-size", "2"], "add --decode-tp-size 1"),
    ("serve", ["--dp-size", "33", "--enable-dp-attention", "--decode", "2"], "more than 64 workers"),
    ("decode", ["--ep-size", "4"], "add --tp-size"),
    ("prefill", ["--chunked-prefill-size", "-1"], "cannot be turned off"),
    ("serve", ["--chunked-prefill-size", "-1"], "cannot be turned off"),
    ("prefill", ["--port", "30000"], "--disaggregation-bootstrap-port"),
    ("router", ["--prefill", "http://10.0.0.1:30000"], "--workers prefill@HOST:PORT"),
    ("router", ["--policy", "cache_aware"], "least expected time to first token"),
    ("decode", ["--attention-backend", "fa3"], "auto, native, torch, triton, flashinfer"),
    ("decode", ["--kv-cache-dtype", "fp8_e5m2"], "only fp8_e4m3"),
    ("decode", ["--dtype", "half"], "is called float16"),
    ("prefill", ["--enable-dp-attention"], "`deltaserve serve` starts a group"),
    ("prefill", ["--moe-a2a-backend", "deepep"], "how experts are exchanged is not a choice"),
    ("prefill", ["--moe-dense-tp-size", "1"], "each has all else"),
    ("prefill", ["--dist-init-addr", "10.0.0.1:5000"], "on each machine"),
    ("prefill", ["--nnodes", "2"], "on each machine"),
    ("prefill", ["--node-rank", "0"], "on each machine"),
    ("decode", ["--base-gpu-id", "1"], "CUDA_VISIBLE_DEVICES"),
    ("decode", ["--decode-log-interval", "50"], "every 10 s"),
    ("decode", ["--log-requests-level", "2"], "one line of JSON"),
    ("prefill", ["--quantization", "fp8"], "leave it out"),
    ("decode", ["--enable-hierarchical-cache"], "one tier"),
    ("decode", ["--stream-interval", "30"], "only `deltaserve serve` or `deltaserve router` has it"),
    ("decode", ["--disaggregation-ib-device", "mlx5_0,mlx5_1"], "is called --transfer-devices here"),
    ("decode", ["--load-balance-method", "total_tokens"], "least expected time to first token"),
    ("decode", ["--prefill-round-robin-balance"], "least expected time to first token"),
    ("decode", ["--cuda-graph-bs", "64"], "--cuda-graph-max-bs"),
    ("decode", ["--enforce-eager"], "is called --disable-cuda-graph here"),
    ("decode", ["--enable-symm-mem"], "memory that ranks share"),
    ("decode", ["--scheduler-recv-interval", "10"], "every turn of a worker's loop"),
    ("prefill", ["--enable-single-batch-overlap"], "a step is planned while the one before computes"),
    ("prefill", ["--trust-remote-code"], "never run"),
    ("decode", ["--schedule-policy", "lof"], "by arrival (fcfs) or by cached prefix (lpm)"),
    ("decode", ["--speculative-algorithm", "EAGLE3"], "needs the head's folder"),
    ("decode", ["--speculative-draft-model-path", "draft"], "--speculative-algorithm off reads none"),
    ("decode", ["--speculative-token-map", "map"], "brings its own map of tokens"),
    ("decode", ["--speculative-eagle-topk", "4"], "speculative-eagle-topk"),
    ("decode", ["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8"], "and one more"),
    ("decode", ["--mamba-scheduler-strategy", "no_buffer"], "a state that is kept is never written over"),
    ("decode", ["--mamba-ssm-dtype", "float16"], "mamba-ssm-dtype"),
    ("decode", ["--grammar-backend", "xgrammar"], "structured output is not built yet"),
    ("decode", ["--tool-call-parser", "qwen3_coder"], "not built yet"),
    ("decode", ["--allow-auto-truncate"], "never cut"),
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


@pytest.mark.parametrize("flag", ["--disable-outlines-disk-cache", "--kv-cache-memory-bytes", "--ubatch-size"])
def test_a_flag_of_elsewhere_is_not_taken_for_a_misspelt_one_of_ours(flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("decode", "", [M, flag, "1"], {})
    assert str(refused.value) == f"{flag}: unknown flag; `deltaserve decode --help-all` lists those there are"


def test_no_chunking_is_what_decode_does_and_a_line_says_so(tmp_path: Path) -> None:
    line = load("decode", "", [M, "--chunked-prefill-size", "-1"], {})
    assert line.settings == load("decode", "", [M], {}).settings
    assert line.notes == (f"--chunked-prefill-size -1 changes nothing: {CHUNKLESS}",)
    path = tmp_path / "decode.yaml"
    path.write_text("chunked-prefill-size: -1\n")
    assert load("decode", "", [M, "--config", str(path)], {}).settings == line.settings


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_value_of_elsewhere_is_refused_with_what_it_is_here(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("serve", "", [M, f"--{key}", value], {})
    assert str(refused.value) == f"--{key} {value}: {VALUES[key, value]}"
