"""Flags as the documentation of other servers names them: each has a meaning here, or says what to write."""

import shlex

import pytest

from deltaserve.settings.flags.flag_help import About
from deltaserve.settings.flags.foreign import FOREIGN
from deltaserve.settings.flags.known_flags import known_flags
from deltaserve.settings.flags.line_words import take_apart
from deltaserve.settings.flags.merge import command_of, read_line

LINES = [
    (
        "serve",
        "meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --max-model-len 16384 "
        "--gpu-memory-utilization 0.9 --enable-chunked-prefill --max-num-batched-tokens 8192 --max-num-seqs "
        "256 --disable-log-stats --no-enable-prefix-caching --dtype bfloat16",
    ),
    (
        "serve",
        "Qwen/Qwen3-0.6B --port 8100 --gpu-memory-utilization 0.8 --trust-remote-code --enforce-eager "
        "--kv-transfer-config "
        '\'{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cuda"}\'',
    ),
    (
        "serve",
        "deepseek-ai/DeepSeek-V3 --data-parallel-size 8 --enable-expert-parallel --data-parallel-backend "
        "ray --all2all-backend deepep_low_latency --enable-dbo --dbo-decode-token-threshold 32 "
        "--data-parallel-external-lb",
    ),
    (
        "serve",
        "openai/gpt-oss-20b --async-scheduling --tool-call-parser openai --enable-auto-tool-choice "
        "--no-enable-prefix-caching --max-cudagraph-capture-size 2048 --stream-interval 20",
    ),
    (
        "serve",
        "Qwen/Qwen3-235B-A22B -tp 8 -O3 --enable-expert-parallel --reasoning-parser qwen3 --rope-scaling "
        '\'{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}\' --max-model-len '
        "131072",
    ),
    ("serve", 'm -q fp8 -dp 4 -pp 2 -cc \'{"cudagraph_mode":"PIECEWISE"}\' -O.mode=3'),
    (
        "serve",
        "m --disable-frontend-multiprocessing --enable-server-load-tracking --disable-fastapi-docs "
        "--enable-log-outputs --h11-max-incomplete-event-size 4194304 --h11-max-header-count 256 "
        "--enable-request-id-headers --response-role assistant --middleware x.y "
        "--enable-tokenizer-info-endpoint --enable-ssl-refresh --exclude-tools-when-tool-choice-none "
        "--use-gpu-for-pooling --log-config-file x.json --lora-modules a=b",
    ),
    (
        "serve",
        "m --max-seq-len-to-capture 8192 --preemption-mode swap --num-scheduler-steps 8 "
        "--max-long-partial-prefills 1 --long-prefill-token-threshold 0 --use-v2-block-manager "
        "--scheduler-delay-factor 0.1 --disable-sliding-window --calculate-kv-scales --cpu-offload-params x "
        "--fully-sharded-loras --device cuda --worker-cls auto --worker-extension-cls x",
    ),
    (
        "serve",
        "m --kv-cache-dtype fp8_e4m3 --attention-backend FLASHINFER --mm-encoder-tp-mode data "
        "--video-pruning-rate 0.5 --logprobs-mode raw_logprobs --seed 42 --config-format auto "
        "--hf-config-path x --allowed-local-media-path / --allow-deprecated-quantization "
        "--enable-prompt-embeds --hf-token --convert auto --pooler-config x --served-model-name a b",
    ),
    (
        "serve",
        'm --profiler-config \'{"profiler":"torch"}\' --kv-sharing-fast-prefill --mamba-block-size 8 '
        "--mamba-cache-mode align --kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics "
        "--show-hidden-metrics-for-version 0.8 --collect-detailed-traces all "
        "--enable-logging-iteration-details --enable-layerwise-nvtx-tracing --ec-transfer-config '{}' "
        "--disable-cascade-attn --disable-nccl-for-dp-synchronization --nnodes 2 --node-rank 0 "
        "--master-addr 10.0.0.1 --master-port 29501",
    ),
    (
        "serve",
        "m --tokens-only --safetensors-load-strategy lazy --ignore-patterns '*.pth' --pt-load-map-location "
        "cpu --use-tqdm-on-load --performance-mode throughput --optimization-level 2 "
        "--decode-context-parallel-size 2 -dcp 2 --prefill-context-parallel-size 1 "
        "--cp-kv-cache-interleave-size 1 --dcp-comm-backend ag_rs",
    ),
    (
        "serve",
        "m --data-parallel-rank 0 --data-parallel-size-local 2 --data-parallel-address 10.0.0.1 "
        "--data-parallel-rpc-port 13345 --data-parallel-hybrid-lb --headless -dpl 2 -dpa 1.2.3.4 -dpp 1",
    ),
    (
        "serve",
        "m --max-parallel-loading-workers 2 --ray-workers-use-nsight --guided-decoding-backend xgrammar "
        "--structured-outputs-config.backend=xgrammar --compilation-config.mode 3 "
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens 4 "
        "--reasoning-parser-plugin x.py --enable-return-routed-experts",
    ),
    (
        "serve",
        "m --ssl-keyfile-password x --uds /tmp/x.sock --enable-offline-docs --enable-flash-late-interaction "
        "--disable-access-log-for-endpoints /health --weight-transfer-config '{}' --attention-config '{}' "
        "--kernel-config '{}' --ir-op-priority x --numa-bind-nodes 0 --fail-on-environ-validation "
        "--shutdown-timeout 10 --gdn-prefill-backend triton --default-chat-template-kwargs "
        "'{\"enable_thinking\": false}' --trust-request-chat-template --enable-per-request-metrics",
    ),
    (
        "serve",
        "--model-path meta-llama/Meta-Llama-3-8B-Instruct --host 0.0.0.0 --port 30000 --tp 2 "
        "--mem-fraction-static 0.7 --chunked-prefill-size 4096 --enable-torch-compile --attention-backend "
        "flashinfer",
    ),
    ("serve", "--model x --port 8000"),
    (
        "serve",
        "--model-path deepseek-ai/DeepSeek-V3-0324 --disaggregation-ib-device mlx5_0 --disaggregation-mode "
        "prefill --host 0.0.0.0 --port 30000 --trust-remote-code --dist-init-addr 10.0.0.1:5000 --nnodes 2 "
        "--node-rank 0 --tp-size 16 --dp-size 8 --enable-dp-attention --moe-a2a-backend deepep "
        "--mem-fraction-static 0.8",
    ),
    (
        "serve",
        "--model-path x --disaggregation-mode decode --disaggregation-bootstrap-port 8998 "
        "--disaggregation-transfer-backend nixl --disaggregation-prefill-pp 1 --num-reserved-decode-tokens "
        "512 --disaggregation-decode-enable-fake-auto",
    ),
    (
        "prefill",
        "--model-path x --enable-nan-detection --allow-auto-truncate --stream-output --stream-interval 4 "
        "--constrained-json-disable-any-whitespace --random-seed 1 --watchdog-timeout 1000000 --tool-server "
        "demo --sampling-defaults model --asr-max-buffer-seconds 3 --enable-cache-report "
        "--completion-template x --file-storage-path x --reasoning-parser deepseek-r1 --tool-call-parser "
        "qwen25 --hf-chat-template-name x",
    ),
    (
        "prefill",
        "--model-path x --max-lora-chunk-size 16 --lora-eviction-policy lru --enable-lora-overlap-loading "
        "--fp8-gemm-runner-backend auto --fp4-gemm-runner-backend auto "
        "--disable-flashinfer-cutlass-moe-fp4-allgather --speculative-ngram-min-match-window-size 1 "
        "--speculative-ngram-max-match-window-size 12 --speculative-ngram-min-bfs-breadth 1 "
        "--speculative-ngram-max-bfs-breadth 10 --speculative-ngram-match-type BFS "
        "--speculative-ngram-branch-length 18 --speculative-ngram-capacity 10000000 "
        "--speculative-ngram-max-trie-depth 18 --enable-multi-layer-eagle --speculative-dflash-block-size 8",
    ),
    (
        "prefill",
        "--model-path x --ep-dispatch-algorithm static --eplb-min-rebalancing-utilization-threshold 1.0 "
        "--expert-distribution-recorder-mode stat --expert-distribution-recorder-buffer-size 10 "
        "--enable-expert-distribution-metrics --moe-dense-tp-size 1 --max-mamba-cache-size 10 "
        "--mamba-full-memory-ratio 0.9 --mamba-track-interval 256 "
        "--hierarchical-sparse-attention-extra-config x --kt-weight-path x --kt-method AMXINT4 "
        "--kt-cpuinfer 4 --kt-threadpool-count 2 --kt-num-gpu-experts 4 --kt-max-deferred-experts-per-token "
        "2",
    ),
    (
        "prefill",
        "--model-path x --enable-double-sparsity --ds-channel-config-path x --ds-heavy-channel-num 32 "
        "--ds-heavy-token-num 256 --ds-heavy-channel-type qk --ds-sparse-decode-threshold 4096 "
        "--cpu-offload-gb 4 --offload-group-size -1 --offload-num-in-group 1 --offload-prefetch-step 1 "
        "--multi-item-scoring-delimiter 1 --disable-fast-image-processor --keep-mm-feature-on-device "
        "--enable-broadcast-mm-inputs-process --mm-enable-dp-encoder",
    ),
    (
        "prefill",
        "--model-path x --delete-ckpt-after-loading --enable-deterministic-inference --rl-on-policy-target "
        "fsdp --enable-attn-tp-input-scattered --enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode "
        "x --enable-precise-embedding-interpolation --enable-draft-weights-cpu-backup "
        "--enable-weights-cpu-backup --triton-attention-num-kv-splits 16 --disable-custom-all-reduce "
        "--enable-nsys --custom-sigquit-handler x --gc-warning-threshold-secs 3 "
        "--prefill-delayer-max-delay-passes 30 --decrypted-config-file f --decryption-key-file "
        "--remote-instance-weight-loader-seed-instance-ip 1.2.3.4 --enable-pdmux --pdmux-config-path x "
        "--sm-group-num 8 --model-loader-extra-config '{}' --weight-version default --enable-lora "
        "--lora-paths a=b --scheduler-recv-interval 1 --enable-numa --fastapi-root-path /x "
        "--uvicorn-access-log-exclude-prefixes /health --warmups voice_chat --incremental-streaming-output "
        "--nccl-port 1 --device cuda --elastic-ep-backend mooncake --pre-warm-nccl "
        "--enable-fused-moe-sum-all-reduce --forward-hooks '{}' --msprobe-dump-config x",
    ),
    (
        "router",
        "--pd-disaggregation --prefill http://127.0.0.1:30000 8998 --decode http://127.0.0.1:30001 --host "
        "0.0.0.0 --port 8000 --policy cache_aware --retry-max-retries 5 --retry-initial-backoff-ms 50 "
        "--retry-max-backoff-ms 3000 --retry-backoff-multiplier 1.5 --retry-jitter-factor 0.2 "
        "--disable-retries --cb-failure-threshold 10 --cb-success-threshold 3 --cb-timeout-duration-secs 60 "
        "--cb-window-duration-secs 120 --disable-circuit-breaker --health-check-timeout-secs 5 "
        "--health-check-interval-secs 60 --health-check-endpoint /health --health-failure-threshold 3 "
        "--health-success-threshold 2 --worker-startup-timeout-secs 600 --worker-startup-check-interval 30 "
        "--max-payload-size 1 --log-dir x --log-level debug --queue-timeout-secs 60 "
        "--rate-limit-tokens-per-second 3 --request-id-headers a b",
    ),
    (
        "router",
        "--worker-urls http://w1:8000 http://w2:8000 --policy power_of_two --enable-igw --dp-aware "
        "--tokenizer-cache-enable-l0 --backend sglang --history-backend memory --service-discovery "
        "--service-discovery-port 80 --service-discovery-namespace x --prefill-selector a=b "
        "--mcp-config-path x --enable-trace --shutdown-grace-period-secs 180 --bucket-adjust-interval-secs "
        "5 --assignment-mode random --max-idle-secs 3 --api-key x --jwt-issuer x --server-cert-path x "
        "--ca-cert-path x --block-size 16 --schema-config x --client-cert-path x",
    ),
    ("serve", "-m model.gguf -c 8192 -ngl 99 -fa on --host 0.0.0.0 --port 8080 --jinja -ctk q8_0 -ctv q8_0 -np 4 -cb"),
    (
        "serve",
        "-m models/Qwen3-0.6B-Q8_0.gguf -c 4096 -n 512 --temp 0.7 --top-k 20 --top-p 0.95 --min-p 0 "
        "--presence-penalty 1.5 --repeat-penalty 1.0 -sm row -ts 1,1 -t 8 -tb 8 --no-context-shift "
        "--cache-reuse 256 --slots --props --no-webui --webui -a alias --reasoning-budget 0 "
        "--reasoning-format deepseek --chat-template chatml --chat-template-kwargs '{}' --spm-infill -md "
        "draft.gguf -ngld 99 --draft-max 16 --draft-min 1 --draft-p-min 0.75 -ot exps=CPU -cmoe --n-cpu-moe "
        "4 --no-kv-offload -nkvo --no-warmup --check-tensors --rope-scaling yarn --rope-scale 4 "
        "--yarn-orig-ctx 32768 --rope-freq-base 1 --lora x.gguf --control-vector x --log-file x "
        "--log-colors on -lv 3 --log-prefix --log-timestamps -to 600 --threads-http 4 --path x --api-prefix "
        "x --api-key-file f --ssl-key-file x --cache-ram 8192 -cram 100 --kv-unified -kvu --swa-full "
        "--ctx-checkpoints 8 --slot-prompt-similarity 0.5 -sps 0.5 --pooling mean --no-mmap --mlock --numa "
        "distribute --device none -dev none --list-devices --override-kv a=int:1 --samplers x --seed 3 -s 3 "
        "--ignore-eos --mirostat 2 --grammar-file x -j x -jf x --no-slots --metrics --prio 2 --poll 0 "
        "--cpu-mask f --defrag-thold 0.1 -dt 0.1 --keep 3 -e --offline --models-dir x --models-max 4 "
        "--sleep-idle-seconds 3 --fit on --spec-type ngram",
    ),
    ("serve", "-hf ggml-org/gemma-3-1b-it-GGUF:Q8_0"),
    ("serve", "-mu https://x/y.gguf"),
    (
        "serve",
        "-hff x -hft y --lookup-cache-static f -lcs f --direct-io -dio --no-repack --no-host "
        "--no-op-offload --perf --escape --verbose-prompt --image-min-tokens 3 --mmproj x --mmproj-url x "
        "--no-mmproj --mmproj-auto",
    ),
    ("serve", "--model Qwen/Qwen3-0.6B --is-prefill-worker --connector nixl --enforce-eager"),
    (
        "router",
        "--http-port 8000 --router-mode kv --kv-overlap-score-weight 1.0 --router-temperature 0 "
        "--no-kv-events --router-reset-states --kserve-grpc-server --busy-threshold 0.9 "
        "--router-replica-sync --http-host 0.0.0.0 --interactive --router-ttl 120",
    ),
    (
        "serve",
        "--model-path Qwen/Qwen3-0.6B --served-model-name Qwen/Qwen3-0.6B --page-size 16 --tp 1 "
        "--trust-remote-code --skip-tokenizer-init --disaggregation-mode prefill "
        "--disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 12345 --host 0.0.0.0 "
        '--enable-metrics --kv-events-config \'{"publisher":"zmq"}\' --use-sglang-tokenizer '
        "--dyn-chat-processor x --embedding-worker --multimodal-encode-worker --durable-kv-events",
    ),
    (
        "serve",
        "--model-path x --served-model-name y --extra-engine-args engine_configs/agg.yaml "
        "--disaggregation-mode prefill --disaggregation-strategy decode_first --publish-events-and-metrics "
        "--free-gpu-memory-fraction 0.8 --modality text --max-beam-width 1",
    ),
    (
        "serve",
        "meta-llama/Llama-3.1-8B --tp_size 2 --kv_cache_free_gpu_memory_fraction 0.9 --max_batch_size 8 "
        "--max_num_tokens 8192 --backend pytorch --extra_llm_api_options x.yaml --max_seq_len 3 --host "
        "localhost",
    ),
    ("serve", "m --max_model_len 4096 --tensor_parallel_size=2 --gpu_memory_utilization=0.5"),
    ("serve", "--model-path x --tp 4"),
    ("serve", "m --omni"),
    ("serve", "m --api-key a b --host :: --port 0 --uvicorn-log-level info --root-path /v1 --enable-log-deltas"),
]
"""(Command of ours, a line of vLLM, SGLang, its router, Dynamo, TensorRT-LLM or llama.cpp without the program.)"""


@pytest.mark.parametrize(("command", "line"), LINES, ids=[f"{index}" for index in range(len(LINES))])
def test_no_flag_of_another_server_is_unknown(command: str, line: str) -> None:
    argv = shlex.split(line)
    read = read_line(command_of(command, argv), About(""), argv, {})
    assert not [problem for problem in read.problems if "unknown flag" in problem or "given twice" in problem]


@pytest.mark.parametrize("flag", ["speculative-config", "structured-outputs-config", "kv-transfer-config"])
def test_parts_of_a_refused_flag_are_refused_once(flag: str) -> None:
    read = read_line("serve", About(""), ["m", f"--{flag}.a=1", f"--{flag}.b", "2"], {})
    assert [problem.partition(":")[0] for problem in read.problems] == [f"--{flag}.a"]


def test_parts_of_an_idle_flag_are_noted_once() -> None:
    read = read_line("serve", About(""), ["m", "--compilation-config.mode", "3", "--compilation-config.level=2"], {})
    assert not read.problems
    assert [note.partition(" ")[0] for note in read.notes] == ["--compilation-config.mode"]


@pytest.mark.parametrize("flag", ["--page-size.x", "--hf-overrides.rope_theta", "--port.y"])
def test_a_setting_is_not_set_by_a_part_of_it(flag: str) -> None:
    read = read_line("serve", About(""), ["m", flag, "16"], {})
    assert [problem.partition(": ")[0] for problem in read.problems] == [flag]
    assert "its parts are no flags; write --" in read.problems[0]


def test_each_flag_is_read_as_itself() -> None:
    """Also one with a dot in its name, which sets a part of no other flag's value."""
    takes = known_flags("serve").takes
    read = {name: next(iter(take_apart([f"--{name}"], takes))).name for name in sorted(FOREIGN)}
    assert {name: word for name, word in read.items() if word != name} == {}
