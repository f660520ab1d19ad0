"""Launch lines of public work and documentation: each flag alone, and the lines as they are printed.

A line runs, or one message tells all that stands in its way, and what to write instead.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltaserve.cli.main import main
from deltaserve.core.errors import ConfigError
from deltaserve.settings.flags.foreign import Denied, Idle, key_of
from deltaserve.settings.flags.foreign_values import VALUES
from deltaserve.settings.flags.merge import load

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
    ("prefill", ["--reasoning-parser", "gpt-oss"]),
    ("serve", ["--reasoning-parser=openai_gptoss", "--enable-reasoning"]),
    *(
        ("serve", ["--tool-call-parser", name, "--enable-auto-tool-choice"])
        for name in ("qwen25", "qwen3_coder", "llama3")
    ),
    *(
        ("serve", ["--reasoning-parser", name])
        for name in ("deepseek-r1", "deepseek_r1", "qwen3", "minimax_m2", "gemma4")
    ),
    ("router", ["--workers", "decode@localhost:1", "--dyn-reasoning-parser", "gpt_oss"]),
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
    ("prefill", ["--port", "30000"]),
    ("decode", ["--served-model-name", "Qwen/Qwen3-0.6B"]),
    ("decode", ["--stream-interval", "30"]),
    ("router", ["--workers", "decode@localhost:1", "--policy", "cache_aware"]),
    ("decode", ["--attention-backend", "fa3"]),
    ("decode", ["--dtype", "half"]),
    ("decode", ["--kv-cache-dtype", "fp8"]),
    ("prefill", ["--moe-a2a-backend", "deepep"]),
    ("prefill", ["--moe-dense-tp-size", "1"]),
    ("prefill", ["--dist-init-addr", "10.0.0.1:5000", "--nnodes", "1", "--node-rank", "0"]),
    ("decode", ["--decode-log-interval", "50"]),
    ("decode", ["--log-requests-level", "2"]),
    ("decode", ["--load-balance-method", "total_tokens"]),
    ("decode", ["--prefill-round-robin-balance"]),
    ("decode", ["--cuda-graph-bs", "8", "16", "64"]),
    ("decode", ["--enforce-eager"]),
    ("decode", ["--enable-symm-mem"]),
    ("decode", ["--scheduler-recv-interval", "10"]),
    ("prefill", ["--enable-single-batch-overlap"]),
    ("prefill", ["--trust-remote-code"]),
    ("prefill", ["--random-seed", "3"]),
    ("prefill", ["--watchdog-timeout", "1000000"]),
    ("decode", ["--disaggregation-ib-device", "mlx5_0", "--trusted-data-network", "10.0.0.0/24"]),
]
REFUSED = [
    ("decode", ["--disaggregation-ib-device", "mlx5_0"], "add --trusted-data-network"),
    ("prefill", ["--attn-cp-size", "2"], "a prompt is computed by one worker"),
    ("decode", ["--dp-size", "4"], "`deltaserve serve` starts a group"),
    ("decode", ["--enable-dp-attention"], "`deltaserve serve` starts a group"),
    ("serve", ["--dp-size", "4"], "add --enable-dp-attention"),
    ("serve", ["--enable-dp-attention"], "add --dp-size N"),
    ("serve", ["--dp-size", "2", "--enable-dp-attention", "--disaggregation-mode", "null"], "one worker does both"),
    ("serve", ["--dp-size", "2", "--enable-dp-attention", "--tp-size", "2"], "add --decode-tp-size 1"),
    ("serve", ["--prefill-dp-size", "2"], "add --enable-dp-attention"),
    ("serve", ["--prefill-dp-size", "2", "--enable-dp-attention", "--tp-size", "2"], "add --prefill-tp-size 1"),
    ("serve", ["--dp-size", "33", "--enable-dp-attention", "--decode", "2"], "more than 64 workers"),
    ("decode", ["--ep-size", "4"], "add --tp-size"),
    ("prefill", ["--chunked-prefill-size", "-1"], "cannot be turned off"),
    ("serve", ["--chunked-prefill-size", "-1"], "cannot be turned off"),
    ("router", ["--prefill", "http://10.0.0.1:30000"], "write --workers prefill@10.0.0.1:8998"),
    ("decode", ["--kv-cache-dtype", "fp8_e5m2"], "only fp8_e4m3"),
    ("prefill", ["--enable-dp-attention"], "`deltaserve serve` starts a group"),
    ("serve", ["--nnodes", "2"], "`deltaserve prefill` or `decode` on each of them"),
    ("prefill", ["--nnodes", "2"], "--tp-size 1 ranks cannot be shared out equally"),
    ("prefill", ["--nnodes", "2", "--tp-size", "2"], "add --dist-init-addr HOST:PORT"),
    ("prefill", ["--dist-init-addr", "10.0.0.1:5000", "--nnodes", "2", "--tp-size", "2"], "--trusted-data-network"),
    ("prefill", ["--dist-init-addr", "localhost:70000", "--nnodes", "2", "--tp-size", "2"], "at most 65535"),
    ("prefill", ["--node-rank", "1"], "the machines of a worker are 0 to 0"),
    ("decode", ["--dp-size", "2", "--enable-dp-attention"], "add --dp-size 2 --nnodes 2, its --node-rank"),
    ("decode", ["--dp-size", "2", "--nnodes", "2", "--dist-init-addr", "localhost:1"], "add --enable-dp-attention"),
    ("decode", ["--base-gpu-id", "1"], "CUDA_VISIBLE_DEVICES"),
    ("prefill", ["--quantization", "fp8"], "leave it out"),
    ("decode", ["--enable-hierarchical-cache"], "--cache-dir-mib"),
    ("decode", ["--schedule-policy", "lof"], "by arrival, cached prefix or priority; write fcfs, lpm or"),
    ("decode", ["--enable-priority-scheduling"], "write --schedule-policy priority"),
    ("decode", ["--schedule-low-priority-values-first"], "write --schedule-policy priority-low-first"),
    ("decode", ["--priority-scheduling-preemption-threshold", "10"], "nothing that runs makes way"),
    ("decode", ["--speculative-token-map", "map"], "brings its own map of tokens"),
    ("decode", ["--speculative-eagle-topk", "4"], "speculative-eagle-topk"),
    ("decode", ["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8"], "and one more"),
    ("decode", ["--mamba-scheduler-strategy", "no_buffer"], "a state that is kept is never written over"),
    ("decode", ["--mamba-ssm-dtype", "float16"], "mamba-ssm-dtype"),
    ("decode", ["--grammar-backend", "xgrammar"], "structured output is not built yet"),
    ("decode", ["--tool-parser-plugin", "x.py"], "no code is loaded"),
    ("decode", ["--allow-auto-truncate"], "never cut"),
]


@pytest.mark.parametrize(("command", "flags"), ACCEPTED, ids=[f"{row[1][0]}-{row[0]}" for row in ACCEPTED])
def test_a_flag_is_accepted(command: str, flags: list[str]) -> None:
    load(command, "", [M, *flags], {})


@pytest.mark.parametrize(("command", "flags", "reason"), REFUSED, ids=[f"{row[1][0]}-{row[0]}" for row in REFUSED])
def test_a_flag_is_refused_with_a_reason(command: str, flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(command, "", [M, *flags], {})
    assert f"--{key_of(flags[0][2:])}" in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize("flag", ["--no-such-cache-at-all", "--kv-cache-colour", "--batch-shape"])
def test_a_flag_of_elsewhere_is_not_taken_for_a_misspelt_one_of_ours(flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("decode", "", [M, flag, "1"], {})
    assert str(refused.value) == f"{flag}: unknown flag; `deltaserve decode --help-all` lists those there are"


def test_no_chunking_is_what_decode_does_and_a_line_says_so(tmp_path: Path) -> None:
    line = load("decode", "", [M, "--chunked-prefill-size", "-1"], {})
    assert line.settings == load("decode", "", [M], {}).settings
    (note,) = line.notes
    assert note.startswith("--chunked-prefill-size -1 changes nothing: decode computes no prompts")
    path = tmp_path / "decode.yaml"
    path.write_text("chunked-prefill-size: -1\n")
    assert load("decode", "", [M, "--config", str(path)], {}).settings == line.settings


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_value_of_elsewhere_is_ours_or_left_out_or_refused_with_what_it_is_here(key: str, value: str) -> None:
    argv = [M, f"--{key}", value]
    match VALUES[key, value]:
        case str(ours):
            assert load("serve", "", argv, {}).settings == load("serve", "", [M, f"--{key}", ours], {}).settings
        case Idle(why):
            line = load("serve", "", argv, {})
            assert line.settings == load("serve", "", [M], {}).settings
            assert line.notes == (f"--{key} {value} changes nothing: {why}",)
        case Denied(remedy):
            with pytest.raises(ConfigError) as refused:
                load("serve", "", argv, {})
            assert str(refused.value) == f"--{key} {value}: {remedy}"


@pytest.mark.parametrize(("text", "count"), [("32k", 32_000), ("32K", 32_768), ("1M", 1 << 20), ("-1", "auto")])
def test_lengths_may_be_written_as_for_vllm(text: str, count: int | str) -> None:
    assert load("serve", "", [M, "--max-model-len", text], {}).settings.model.context_length == count


@pytest.mark.parametrize(
    ("flag", "policy"), [("--schedule-policy", "priority"), ("--scheduling-policy", "priority-low-first")]
)
def test_priority_means_what_it_means_where_the_flag_comes_from(flag: str, policy: str) -> None:
    """SGLang takes higher values first, vLLM lower ones."""
    assert load("decode", "", [M, flag, "priority"], {}).settings.scheduling.schedule_policy == policy


# ---------------------------------------------------------------- whole lines


@dataclass(frozen=True)
class Printed:
    """A line as its source prints it, from the first flag on."""

    source: str
    command: str
    """The one of ours in place of theirs."""
    line: str
    model: str
    """A tiny one of the family."""
    refused: tuple[str, ...] = ()
    """What is said of flags that ask for what there is not."""
    left_out: tuple[str, ...] = ()
    """These flags with their values, which one writes no more once it was said."""

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def given_model(self) -> str:
        argv = self.argv
        flag = next((word for word in argv if word in ("--model-path", "--model", "-m")), None)
        return argv[0] if flag is None else argv[argv.index(flag) + 1]


_YARN = (
    '\'{"rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768},'
    '"max_position_embeddings":131072}\''
)
_OF_19746 = (
    "--model-path /scratch/fsw/ishan/qwen32b --served-model-name Qwen/Qwen3-32B --host 0.0.0.0 "
    "--dump-config-to /scratch/fsw/ishan/ignition/outputs/12486/logs/config.json --enable-metrics --trust-remote-code "
    "--kv-cache-dtype fp8_e4m3 --attention-backend flashinfer --context-length 131072 "
    "--disaggregation-transfer-backend nixl --enable-symm-mem --stream-interval 30 --watchdog-timeout 1000000 "
    f"--log-level debug --page-size 64 --json-model-override-args {_YARN} --tensor-parallel-size 2 "
    "--mem-fraction-static 0.90 --cuda-graph-max-bs 256 --max-running-requests 256 "
    "--disaggregation-bootstrap-port 13000 "
)
_OF_22234 = (
    "--model-path /home/admin/MiniMax-M2.5/ --host 0.0.0.0 --trust-remote-code --tp-size 4 --page-size 64 "
    "--mem-fraction-static 0.9 --chunked-prefill-size 8192 --attention-backend fa3 "
    "--disaggregation-transfer-backend mooncake "
    "--disaggregation-ib-device mlx5_bond_0,mlx5_bond_1,mlx5_bond_2,mlx5_bond_3 "
)
_TWO_MACHINES = (
    "--model-path deepseek-ai/DeepSeek-V3-0324 --disaggregation-transfer-backend nixl --host 10.0.0.1 "
    "--trust-remote-code --dist-init-addr 10.0.0.1:5000 --nnodes 2 --tp-size 16 --dp-size 8 --enable-dp-attention "
    "--moe-a2a-backend deepep --mem-fraction-static 0.8 "
)
_DYNAMO = (
    "--model-path Qwen/Qwen3-0.6B --served-model-name Qwen/Qwen3-0.6B --page-size 16 --tp 1 --trust-remote-code "
    "--disaggregation-bootstrap-port 12345 --host 0.0.0.0 --disaggregation-transfer-backend nixl --enable-metrics "
)
_DUMP = "--dump-config-to: write --dump-config > FILE"
_MLX = "this machine has no mlx5"
_RDMA = "mooncake listens on one interface, or add --transfer-tls rdma"
_GPU = "--base-gpu-id 1: only 0 is possible; write CUDA_VISIBLE_DEVICES=N"
_KV_TRANSFER = "--kv-transfer-config: write --disaggregation-transfer-backend"
_NIXL = '\'{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}\''
_IB = ("--disaggregation-ib-device",)
_GROUP = "`deltaserve serve` starts a group of decode workers"

PRINTED = [
    Printed(
        "SGLang #19746, prefill",
        "prefill",
        f"{_OF_19746} --disaggregation-mode prefill --enable-single-batch-overlap --max-prefill-tokens 32768 "
        "--scheduler-recv-interval 1 --chunked-prefill-size 32768 --port 10000",
        "qwen3",
        (_DUMP,),
        ("--dump-config-to", "--attention-backend"),
    ),
    Printed(
        "SGLang #19746, decode",
        "decode",
        f"{_OF_19746} --disaggregation-mode decode --disaggregation-decode-enable-radix-cache "
        "--chunked-prefill-size -1 --load-balance-method total_tokens --prefill-round-robin-balance "
        "--scheduler-recv-interval 10 --num-reserved-decode-tokens 400 --cuda-graph-bs 1 2 4 8 --port 10001",
        "qwen3",
        (_DUMP,),
        ("--dump-config-to", "--attention-backend"),
    ),
    Printed(
        "SGLang #22234, prefill",
        "prefill",
        f"{_OF_22234} --port 8188 --max-running-requests 32 --disaggregation-mode prefill",
        "minimax_m2",
        (_MLX, _RDMA),
        _IB,
    ),
    Printed(
        "SGLang #22234, decode",
        "decode",
        f"{_OF_22234} --port 8189 --max-running-requests 128 --disaggregation-mode decode "
        "--disaggregation-enable-decode-radix-cache",
        "minimax_m2",
        (_MLX, _RDMA),
        _IB,
    ),
    Printed(
        "SGLang #22234, a hybrid with guesses on decode",
        "decode",
        "--model-path /home/admin/Qwen3.5-35B-A3B --host 0.0.0.0 --port 8189 --trust-remote-code --tp-size 2 "
        "--page-size 64 --mamba-scheduler-strategy extra_buffer --attention-backend fa3 --disaggregation-mode decode "
        "--disaggregation-transfer-backend mooncake --disaggregation-enable-decode-radix-cache "
        "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4 --disaggregation-ib-device mlx5_bond_0",
        "qwen3_5_moe_mtp",
        (_MLX,),
        _IB,
    ),
    Printed(
        "SGLang #22234, router",
        "router",
        "--pd-disaggregation --prefill http://127.0.0.1:8188 --decode http://127.0.0.1:8189 --host 0.0.0.0 --port 8000",
        "",
        ("--prefill and --decode: workers have no HTTP; write --workers prefill@127.0.0.1:8998,decode@127.0.0.1:8999",),
    ),
    Printed(
        "SGLang #11214",
        "serve",
        "--model Qwen/Qwen3-Next-80B-A3B-Instruct --tp 2 --chunked-prefill-size 64 --max-running-requests 16",
        "qwen3_next",
    ),
    Printed(
        "SGLang #11214, the reviewer's flags",
        "serve",
        "--model Qwen/Qwen3-Next-80B-A3B-Instruct --tp 2 --trust-remote-code --random-seed 1 --schedule-policy lof "
        "--allow-auto-truncate --sleep-on-idle --tool-call-parser qwen3_coder --grammar-backend xgrammar "
        "--mamba-ssm-dtype bfloat16 --max-mamba-cache-size 64",
        "qwen3_next",
        (
            "--schedule-policy lof: the order of requests is by arrival",
            "--allow-auto-truncate: a prompt that does not fit is refused",
            "--grammar-backend: structured output is not built yet",
        ),
        ("--schedule-policy", "--allow-auto-truncate", "--grammar-backend"),
    ),
    Printed(
        "SGLang #22536, decode of DEP4",
        "decode",
        "--model-path /models/Qwen3.5-397B-A17B-FP8 --disaggregation-mode decode "
        "--disaggregation-transfer-backend nixl "
        "--tp-size 4 --dp-size 4 --ep-size 4 --enable-dp-attention --enable-dp-lm-head --trust-remote-code",
        "qwen3_5_moe",
        (_GROUP,),
        ("--dp-size", "--enable-dp-attention"),
    ),
    Printed(
        "SGLang's documentation, prefill over NIXL",
        "serve",
        "--model-path meta-llama/Llama-3.1-8B-Instruct --disaggregation-mode prefill --port 30000 "
        "--disaggregation-transfer-backend nixl",
        "llama",
    ),
    Printed(
        "SGLang's documentation, decode over NIXL",
        "serve",
        "--model-path meta-llama/Llama-3.1-8B-Instruct --disaggregation-mode decode --port 30001 --base-gpu-id 1 "
        "--disaggregation-transfer-backend nixl",
        "llama",
        (_GPU,),
        ("--base-gpu-id",),
    ),
    Printed(
        "SGLang's documentation, prefill over Mooncake",
        "serve",
        "--model-path meta-llama/Llama-3.1-8B-Instruct --disaggregation-mode prefill --port 30000 "
        "--disaggregation-ib-device mlx5_roce0",
        "llama",
        (_MLX, "--transfer-devices mlx5_roce0: page transfers carry no authentication; add --trusted-data-network"),
        _IB,
    ),
    Printed(
        "SGLang's documentation, router",
        "router",
        "--pd-disaggregation --prefill http://10.0.0.1:30000 9000 --decode http://10.0.0.2:30001 --host 0.0.0.0 "
        "--port 8000 --policy cache_aware",
        "",
        ("write --workers prefill@10.0.0.1:9000,decode@10.0.0.2:8998",),
    ),
    Printed(
        "SGLang's documentation, one of two machines",
        "prefill",
        f"{_TWO_MACHINES} --disaggregation-mode prefill --port 30000 --node-rank 1",
        "deepseek_v3",
        (_GROUP,),
        ("--nnodes", "--node-rank", "--dp-size", "--enable-dp-attention", "--host", "--tp-size"),
    ),
    Printed(
        "SGLang's documentation, guesses by a head",
        "serve",
        "--model meta-llama/Llama-3.1-8B-Instruct --speculative-algo NGRAM --mem-fraction 0.7 --cuda-graph-max-bs 2 "
        "--enable-torch-compile --dtype float16 --log-level warning",
        "llama",
    ),
    Printed("Dynamo, prefill", "prefill", f"{_DYNAMO} --disaggregation-mode prefill", "qwen3"),
    Printed("Dynamo, decode", "decode", f"{_DYNAMO} --disaggregation-mode decode", "qwen3"),
    Printed(
        "vLLM, one server",
        "serve",
        "Qwen/Qwen3-0.6B --max-model-len 512 --gpu-memory-utilization 0.3 --tensor-parallel-size 2 --max-num-seqs 8 "
        "--dtype half --enable-prefix-caching --trust-remote-code --served-model-name qwen --port 8000 --seed 0 "
        "--disable-log-requests --max-num-batched-tokens 2048 --block-size 16",
        "qwen3",
    ),
    Printed(
        "vLLM, a prefiller",
        "serve",
        f"Qwen/Qwen3-0.6B --port 8100 --enforce-eager --kv-transfer-config {_NIXL}",
        "qwen3",
        (_KV_TRANSFER,),
        ("--kv-transfer-config",),
    ),
    Printed(
        "llama.cpp", "serve", "-m /models/small.gguf -c 512 -np 4 -t 2 -ngl 99 --jinja -fa on --port 8080", "llama"
    ),
]
_SECURITY = (
    (" --host 0.0.0.0 ", ("prefill", "decode"), "--host 0.0.0.0: nobody can dial that, and a worker is known by its"),
    (" --host 0.0.0.0 ", ("prefill", "decode"), "name their network with --trusted-data-network"),
    (" --host 10.0.0.1 ", ("prefill", "decode"), "name their network with --trusted-data-network"),
    (" --host 0.0.0.0 ", ("router",), "listening beyond this machine needs --api-key-file"),
    (
        " ",
        ("prefill", "decode", "router"),
        "--cluster-key-file: missing; the router and its workers must share one key",
    ),
)


def role(printed: Printed) -> str:
    """The command that it becomes."""
    return next((r for r in ("prefill", "decode") if f"--disaggregation-mode {r}" in printed.line), printed.command)


def expected(printed: Printed) -> list[str]:
    """All that stands in its way where the model is not there, and nothing else."""
    found = list(printed.refused)
    found += [text for part, roles, text in _SECURITY if part in printed.line and role(printed) in roles]
    found.append(f"MODEL {printed.given_model}: not a folder" if printed.model else "no model: deltaserve router MODEL")
    return found


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, and what an operator sets once: whom to trust, and by which keys."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("cluster.key", "x" * 40), ("api.keys", f"{'k' * 40} tenant")):
        Path(name).touch(mode=0o600)
        Path(name).write_text(text)
    monkeypatch.setenv("DELTASERVE_CLUSTER_KEY_FILE", "cluster.key")
    monkeypatch.setenv("DELTASERVE_API_KEY_FILE", "api.keys")
    monkeypatch.setenv("DELTASERVE_TRUSTED_DATA_NETWORK", "127.0.0.0/8")
    monkeypatch.setenv("DELTASERVE_ADVERTISE", "127.0.0.1")
    return tmp_path


def names(printed: list[Printed]) -> list[str]:
    return [one.source for one in printed]


@pytest.mark.parametrize("printed", PRINTED, ids=names(PRINTED))
def test_all_that_stands_in_the_way_of_a_printed_line_is_told_at_once(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([printed.command, *printed.argv, "--dump-config"]) == 2
    told = [
        line
        for line in capsys.readouterr().err.splitlines()
        if " changes nothing: " not in line and " makes " not in line
    ]
    problems = [line.strip() for line in told if line.startswith("  ")] or told
    wanted = expected(printed)
    assert [sum(text in problem for problem in problems) for text in wanted] == [1] * len(wanted)
    assert len(problems) == len(wanted)


@pytest.mark.parametrize("printed", [p for p in PRINTED if p.model], ids=names([p for p in PRINTED if p.model]))
def test_a_line_runs_once_done_as_told(
    printed: Printed, operator: Path, tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed, where nothing of it was refused: a model of that name, and the operator's environment."""
    own = operator / printed.given_model.lstrip("/")
    own.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(tiny_models / printed.model, own)
    argv = [str(own) if word == printed.given_model and word.startswith("/") else word for word in printed.argv]
    for flag in printed.left_out:
        at = argv.index(flag)
        end = next((i for i in range(at + 1, len(argv)) if argv[i].startswith("--")), len(argv))
        del argv[at:end]
    code = main([printed.command, *argv, "--dump-config"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "model-path: " in captured.out
