"""Flags of other servers that people bring along: what each is called here, that it changes nothing, or why it is
refused and what to write instead.

One table for the flags of SGLang's server and router, of vLLM, Dynamo's workers and llama.cpp's server, as their
documentation names them. A name is written with what follows the flag: `name` is a switch, `name=` takes one value,
`name=*` several, and `name=a|b` is accepted with these values only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class Takes(Enum):
    """What follows a flag on a command line."""

    NOTHING = "no value"
    ONE = "one value"
    SEVERAL = "values up to the next flag"


@dataclass(frozen=True, slots=True)
class Alias:
    """Another word for an option of ours."""

    key: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Changes nothing here, and is accepted."""

    why: str
    values: tuple[str, ...] = ()
    """The only ones that mean what happens anyway; empty: any. Such a value needs no word; a switch or a value that is
    not looked at does."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Asks for what there is not."""

    remedy: str
    """Why, and what to write instead."""


Meaning = Alias | Idle | Denied


@dataclass(frozen=True, slots=True)
class Foreign:
    """A flag of another server."""

    name: str
    takes: Takes
    meaning: Meaning


_ALIASES = {
    "model-path": "model m",
    "served-model-name": "alias model-name a",
    "chat-template": "chat-template-file custom-jinja-template",
    "tool-call-parser": "dyn-tool-call-parser",
    "reasoning-parser": "dyn-reasoning-parser",
    "context-length": "max-model-len max-seq-len ctx-size c",
    "json-model-override-args": "hf-overrides",
    "page-size": "block-size kv-cache-block-size",
    "mem-fraction-static": "gpu-memory-utilization mem-fraction",
    "disable-radix-cache": "no-enable-prefix-caching",
    "mamba-ssm-dtype": "mamba-ssm-cache-dtype",
    "max-running-requests": "max-num-seqs max-batch-size parallel np",
    "max-prefill-tokens": "max-num-batched-tokens max-num-tokens",
    "schedule-policy": "scheduling-policy",
    "disable-cuda-graph": "enforce-eager",
    "cuda-graph-max-bs": "max-cudagraph-capture-size",
    "disable-overlap-schedule": "no-async-scheduling",
    "num-threads": "threads t",
    "speculative-algorithm": "speculative-algo",
    "speculative-draft-model-path": "speculative-draft-model speculative-draft",
    "tp-size": "tp tensor-parallel-size",
    "ep-size": "ep expert-parallel-size",
    "dp-size": "dp data-parallel-size",
    "transfer-devices": "disaggregation-ib-device",
    "fronts": "api-server-count tokenizer-worker-num",
    "host": "http-host",
    "ssl-certfile": "ssl-cert-file tls-cert-path",
    "ssl-keyfile": "ssl-key-file tls-key-path",
    "allowed-origins": "cors-allowed-origins",
    "port": "http-port",
    "request-timeout-s": "request-timeout-secs",
    "quantization": "q",
    "default-max-tokens": "n predict n-predict",
    "shutdown-grace-s": "shutdown-timeout shutdown-grace-period-secs",
    "start-timeout-s": "worker-startup-timeout-secs",
}
"""Our key |-> its names elsewhere."""

_LOGGED = "each request leaves one line of JSON in the log of the front, without its text"
_PAIR = "the pair of workers with the least expected time to first token is taken"
_LAYERS = "layers are not split over workers"
_MACHINES = (
    "start `deltaserve prefill|decode` on each machine and name them to `deltaserve router --workers`; leave it out"
)
_KERNELS = "which kernels compute is not a choice beyond --attention-backend"
_EXPERTS = "how experts are exchanged is not a choice, and none is held twice"
_GROUP = "a member of a group of workers that share experts has all else whole"

_IDLE = {
    "the prefix cache is always on; --disable-radix-cache turns it off": (
        "disaggregation-decode-enable-radix-cache=true disaggregation-enable-decode-radix-cache=true "
        "enable-prefix-caching=true cache-prompt=true"
    ),
    "the key of a prefix is a keyed hash": "prefix-caching-hash-algo=",
    "prompts are always computed in chunks; --chunked-prefill-size says how long": "enable-chunked-prefill=true",
    "prompts and decoding always share steps where one worker does both": "enable-mixed-chunk=true",
    "a chunk is as long as --chunked-prefill-size says": "enable-dynamic-chunking",
    "experts are whole on ranks where they divide over them; see --ep-size": "enable-expert-parallel",
    "metrics are always on, at /metrics": (
        "enable-metrics=true enable-metrics-for-all-schedulers collect-tokens-histogram show-time-cost "
        "bucket-time-to-first-token=* bucket-inter-token-latency=* bucket-e2e-request-latency=* "
        "prompt-tokens-buckets=* generation-tokens-buckets=* metrics kv-cache-metrics kv-cache-metrics-sample= "
        "cudagraph-metrics enable-mfu-metrics enable-server-load-tracking show-hidden-metrics-for-version= "
        "enable-metrics-for-all-workers perf publish-events-and-metrics"
    ),
    "pages of --allowed-origins may use every method and header of the API": "allowed-methods=* allowed-headers=*",
    "usage always reports cached tokens": "enable-cache-report=true enable-prompt-tokens-details",
    "usage is sent where a request asks for it": "enable-force-include-usage",
    _LOGGED: (
        "enable-request-time-stats-logging disable-log-requests no-enable-log-requests log-requests "
        "enable-log-requests log-requests-level= log-requests-format= disable-uvicorn-access-log max-log-len= "
        "uvicorn-access-log-exclude-prefixes=* enable-log-outputs enable-log-deltas "
        "enable-logging-iteration-details disable-access-log-for-endpoints= log-colors=* log-prefix "
        "log-timestamps verbose-prompt enable-request-id-headers"
    ),
    "a worker that computes writes a line every 10 s": "decode-log-interval= disable-log-stats",
    "--log-level says it for all processes": (
        "log-level-http= uvicorn-log-level= verbose log-verbosity= verbosity= lv= log-verbose v"
    ),
    "steps are planned ahead; --disable-overlap-schedule ends that": "overlap-schedule=1 async-scheduling",
    "a step is planned while the one before computes": (
        "enable-single-batch-overlap enable-two-batch-overlap tbo-token-distribution-threshold= "
        "num-continuous-decode-steps= num-scheduler-steps= preemption-mode= "
        "disaggregation-decode-enable-fake-auto scheduler-delay-factor= enable-dbo dbo-decode-token-threshold= "
        "dbo-prefill-token-threshold= ubatch-split= enable-pdmux pdmux-config-path= sm-group-num="
    ),
    "messages are read in every turn of a worker's loop": (
        "scheduler-recv-interval= disaggregation-decode-polling-interval="
    ),
    "an idle worker always sleeps": "sleep-on-idle",
    "the watchdog has no setting; /livez reports it": "watchdog-timeout= soft-watchdog-timeout=",
    "each worker tries its transport when it starts": "skip-server-warmup warmups=* no-warmup warmup pre-warm-nccl",
    "reasoning is told apart where the chat template marks it": "enable-reasoning",
    "requests may offer tools wherever the chat template shows them": "enable-auto-tool-choice",
    "each request's `seed` makes its sampling repeatable": "random-seed= seed= s=",
    "code from a model folder is never run": "trust-remote-code",
    "models are never downloaded": "download-dir= offline",
    "weights are read from safetensors and GGUF files, whichever MODEL is": (
        "load-format=auto|safetensors|gguf model-loader-extra-config= weight-loader-disable-mmap "
        "weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads= no-mmap mlock ignore-patterns=* "
        "use-tqdm-on-load safetensors-load-strategy=lazy|eager|prefetch check-tensors direct-io no-direct-io "
        "dio ndio pt-load-map-location= max-parallel-loading-workers= config-format=auto|hf mmap"
    ),
    "each model family has one implementation": (
        "model-impl=auto|vllm|sglang runner=auto|generate task=auto|generate convert=auto|none"
    ),
    "the tokenizer is that of the model folder": "tokenizer-mode=auto use-sglang-tokenizer",
    "prompts may be token ids; text is read and written all the same": "skip-tokenizer-init",
    "the front has one tokenizer": (
        "enable-tokenizer-batch-encode disable-tokenizer-batch-decode enable-dynamic-batch-tokenizer "
        "dynamic-batch-tokenizer-batch-size= dynamic-batch-tokenizer-batch-timeout= "
        "disable-frontend-multiprocessing tokenizer-cache-enable-l0 tokenizer-cache-l0-max-entries= "
        "tokenizer-cache-enable-l1 tokenizer-cache-l1-max-memory= dyn-chat-processor= dyn-preprocessor="
    ),
    "the chat template of the model is always used": "jinja",
    "sampling that the model's folder recommends is the default": "generation-config=auto",
    "a state that is kept is never written over": "mamba-scheduler-strategy=auto|extra_buffer",
    "windows get what running requests hold": (
        "swa-full-tokens-ratio= disable-hybrid-swa-memory disable-hybrid-kv-cache-manager "
        "no-disable-hybrid-kv-cache-manager swa-full"
    ),
    _LAYERS: "pp-size=1 pipeline-parallel-size=1 pp-max-micro-batch-size= pp-async-batch-depth= pp=1",
    "a prompt is computed by one worker": (
        "attn-cp-size=1 attention-context-parallel-size=1 context-parallel-size=1 "
        "prefill-context-parallel-size=1 decode-context-parallel-size=1 pcp=1 dcp=1 cp-size=1 "
        "cp-kv-cache-interleave-size= dcp-kv-cache-interleave-size= dcp-comm-backend="
    ),
    "the ranks of a worker find each other": (
        "nccl-init-addr= nccl-port= dist-timeout= distributed-executor-backend=mp|uni|auto "
        "master-addr= master-port= data-parallel-address= data-parallel-rpc-port= data-parallel-backend=mp "
        "ray-workers-use-nsight dpp= disable-nccl-for-dp-synchronization worker-cls=auto"
    ),
    "workers learn from each other's greeting what they are": (
        "disaggregation-decode-tp= disaggregation-decode-dp= disaggregation-prefill-pp="
    ),
    _PAIR: (
        "load-balance-method= prefill-round-robin-balance policy= prefill-policy= decode-policy= "
        "cache-threshold= balance-abs-threshold= balance-rel-threshold= mini-lb router-mode= migration-limit= "
        "eviction-interval= max-tree-size= kv-overlap-score-weight= router-temperature= router-ttl= "
        "router-max-tree-size= router-prune-target-ratio= router-replica-sync router-reset-states "
        "router-snapshot-threshold= router-track-active-blocks no-router-track-active-blocks "
        "no-track-active-blocks no-kv-events bucket-adjust-interval-secs= assignment-mode= max-idle-secs= "
        "dp-aware slot-prompt-similarity= sps= conditional-disagg= router-queue-threshold= "
        "disaggregation-strategy="
    ),
    "--workers says which of them prefill and which decode": "pd-disaggregation",
    _GROUP: "enable-dp-lm-head moe-dense-tp-size= enable-prefill-delayer",
    _EXPERTS: (
        "moe-a2a-backend= deepep-mode= deepep-config= deepep-dispatcher-output-dtype= moe-runner-backend= "
        "ep-num-redundant-experts= ep-dispatch-algorithm= init-expert-location= enable-eplb eplb-algorithm= "
        "eplb-rebalance-num-iterations= eplb-config= disable-shared-experts-fusion all2all-backend= "
        "elastic-ep-backend= mooncake-ib-device= flashinfer-mxfp4-moe-precision= moe-backend= "
        "eplb-min-rebalancing-utilization-threshold= expert-placement-strategy= "
        "enable-expert-distribution-metrics expert-distribution-recorder-mode= "
        "expert-distribution-recorder-buffer-size= num-redundant-experts= enable-fused-moe-sum-all-reduce "
        "deepep-num-sms= disable-flashinfer-cutlass-moe-fp4-allgather"
    ),
    "of CUDA graphs only --disable-cuda-graph and --cuda-graph-max-bs can be set": (
        "cuda-graph-bs=* disable-cuda-graph-padding cudagraph-capture-sizes=* disable-piecewise-cuda-graph "
        "enable-piecewise-cuda-graph enforce-piecewise-cuda-graph piecewise-cuda-graph-tokens=* "
        "piecewise-cuda-graph-compiler= piecewise-cuda-graph-max-tokens= enable-profile-cuda-graph "
        "enable-cudagraph-gc compilation-config= enable-torch-compile torch-compile-max-bs= "
        "max-seq-len-to-capture= cc= disable-decode-cuda-graph enable-breakable-cuda-graph optimization-level= "
        "o= performance-mode= O= O0 O1 O2 O3 kernel-config= enable-layerwise-nvtx-tracing"
    ),
    _KERNELS: (
        "prefill-attention-backend= decode-attention-backend= mm-attention-backend= sampling-backend= "
        "fp8-gemm-backend= fp4-gemm-backend= enable-flashinfer-mla disable-chunked-prefix-cache "
        "flashinfer-mla-disable-ragged disable-flashinfer-autotune triton-attention-reduce-in-fp32 "
        "triton-attention-num-kv-splits= triton-attention-split-tile-size= nsa-prefill-backend= "
        "nsa-decode-backend= dsa-prefill-backend= dsa-decode-backend= enable-fused-qk-norm-rope "
        "speculative-attention-mode= speculative-draft-attention-backend= speculative-moe-runner-backend= "
        "speculative-moe-a2a-backend= mamba-backend= linear-attn-backend= linear-attn-prefill-backend= "
        "linear-attn-decode-backend= flash-attn=* fa=* linear-backend= attention-config= ac= "
        "fp8-gemm-runner-backend= fp4-gemm-runner-backend= disable-cascade-attn use-v2-block-manager "
        "gdn-prefill-backend= mamba-block-size= mamba-cache-mode=all|align|none kv-sharing-fast-prefill "
        "no-repack no-op-offload op-offload repack ir-op-priority= enable-flashinfer-autotune "
        "bf16-gemm-backend= prefill-delayer-max-delay-passes="
    ),
    "the device is as --device says, and holds all layers": (
        "n-gpu-layers= gpu-layers= ngl= split-mode= sm= tensor-split= ts= mg= n-gpu-layers-draft= ngld= "
        "gpu-layers-draft= fit= no-host kv-offload threads-batch= tb= prio= prio-batch= poll= poll-batch= "
        "cpu-mask= cpu-range= cpu-strict= threads-http= max-threads="
    ),
    "there is no memory that ranks share": "enable-symm-mem enable-torch-symm-mem",
    "how sums over ranks are made is not a choice": (
        "disable-custom-all-reduce enable-nccl-nvls enable-p2p-check enable-flashinfer-allreduce-fusion "
        "enable-aiter-allreduce-fusion enable-mscclpp enable-attn-tp-input-scattered"
    ),
    "requests of all kinds share steps": (
        "cont-batching cb batch-size= b= ubatch-size= ub= no-cont-batching nocb kv-unified kvu no-kv-unified "
        "no-kvu defrag-thold= dt= max-long-partial-prefills= long-prefill-token-threshold="
    ),
    "only text is read": (
        "language-model-only language-only mm-max-concurrent-calls= mm-processor-cache-gb= modality=text "
        "mm-encoder-tp-mode= mm-enable-dp-encoder video-pruning-rate= disable-fast-image-processor "
        "keep-mm-feature-on-device enable-broadcast-mm-inputs-process skip-mm-profiling no-mmproj mmproj-auto "
        "no-mmproj-auto mmproj-offload no-mmproj-offload image-min-tokens= image-max-tokens= "
        "mm-shm-cache-max-object-size-mb= interleave-mm-strings media-io-kwargs= allowed-local-media-path= "
        "allowed-media-domains=* asr-max-buffer-seconds= file-storage-path= use-gpu-for-pooling "
        "enable-precise-embedding-interpolation"
    ),
    "nothing is kept on disk": "disable-outlines-disk-cache",
    "no page of documentation or of chat needs a flag; /docs is there": (
        "webui no-webui ui no-ui disable-fastapi-docs enable-offline-docs"
    ),
    "a prompt that does not fit is refused, and nothing of a context is dropped": "no-context-shift",
    "the answer of a stream is sent as its tokens come; --stream-interval says how many at once": (
        "stream-output incremental-streaming-output"
    ),
    "a head of guesses is found by its files": "enable-multi-layer-eagle",
    "headers of a request have a limit that is not a setting": "h11-max-incomplete-event-size= h11-max-header-count=",
    "guesses of NGRAM look at the request itself": (
        "speculative-ngram-min-match-window-size= speculative-ngram-max-match-window-size= "
        "speculative-ngram-min-bfs-breadth= speculative-ngram-max-bfs-breadth= speculative-ngram-match-type= "
        "speculative-ngram-branch-length= speculative-ngram-capacity= speculative-ngram-max-trie-depth= "
        "lookup-cache-static= lcs= lookup-cache-dynamic= lcd= spec-ngram-size-n= spec-ngram-size-m="
    ),
    "the router asks its workers all the time whether they live, and tries another where one is lost": (
        "retry-max-retries= retry-initial-backoff-ms= retry-max-backoff-ms= retry-backoff-multiplier= "
        "retry-jitter-factor= disable-retries cb-failure-threshold= cb-success-threshold= "
        "cb-timeout-duration-secs= cb-window-duration-secs= disable-circuit-breaker health-check-timeout-secs= "
        "health-check-interval-secs= health-check-endpoint= health-failure-threshold= health-success-threshold= "
        "worker-startup-check-interval= health-check-port= disable-health-check"
    ),
    "logprobs are of what the model says, before temperature and penalties": "logprobs-mode=raw_logprobs",
    "unused memory is not kept for later": "gc-warning-threshold-secs= freeze-gc",
    "no usage is reported to anybody": "no-usage-stats disable-usage-stats",
    "a request has the id of its header `x-request-id`": "request-id-headers=*",
    "text of requests is taken as it is": "e escape no-escape keep=",
}
"""Why it changes nothing |-> names."""

_REFUSED = {
    "secrets come from files; write --api-key-file FILE": (
        "api-key=* jwt-issuer= jwt-audience= jwt-jwks-uri= control-plane-api-keys=* control-plane-audit-enabled"
    ),
    "secrets come from files; write --api-key-file FILE, with a line `SECRET NAMESPACE admin`": "admin-api-key=",
    "TLS here is --ssl-certfile and --ssl-keyfile without a password; for more, let a proxy end it": (
        "ssl-ca-certs= ssl-keyfile-password= ssl-cert-reqs= enable-ssl-refresh ssl-ciphers= server-cert-path= "
        "server-key-path= ca-cert-path=* ca-cert-paths=* client-cert-path= client-key-path="
    ),
    "the API begins at /; let a proxy take the path away": "root-path= fastapi-root-path= api-prefix=",
    "keys are no cookies, so a page needs no credentials; write --allowed-origins alone": (
        "allow-credentials cors-allow-credentials"
    ),
    "write --num-pages (tokens / page size)": "max-total-tokens= num-gpu-blocks-override=",
    "write --mem-fraction-static, or --num-pages": "kv-cache-memory-bytes= kv-cache-memory=",
    "write --disaggregation-transfer-backend (auto finds one), and `deltaserve prefill` for a kv_producer, `decode` "
    "for a kv_consumer; `serve` starts both": (
        "kv-transfer-config= kv-connector= connector=* is-prefill-worker is-decode-worker ec-transfer-config= "
        "lmcache-config= kv-buffer-device="
    ),
    "write --num-reserved-decode-tokens, how many tokens are kept free for each running request": (
        "schedule-conservativeness="
    ),
    "write --max-prefill-tokens, how many tokens of all prompts a step computes": "prefill-max-requests=",
    "write --workers prefill@HOST:PORT,decode@HOST:PORT": (
        "worker-urls=* service-discovery selector=* prefill-selector=* decode-selector=* "
        "service-discovery-port= service-discovery-namespace= model-path-selector= enable-igw prefill-urls=* "
        "decode-urls=*"
    ),
    "/metrics is on the admin port; write --admin-port": "prometheus-port= prometheus-host= metrics-port=",
    "write --max-queued-requests, how many may wait for their first token": (
        "max-concurrent-requests= queue-size= rate-limit-tokens-per-second= queue-timeout-secs= busy-threshold= "
        "active-decode-blocks-threshold= active-prefill-tokens-threshold= max-payload-size="
    ),
    "write --dump-config > FILE, which prints the settings and ends": "dump-config-to=",
    "models are never downloaded; MODEL is a folder or a GGUF file, `hf download NAME --local-dir FOLDER` gets one": (
        "revision= tokenizer-revision= code-revision= hf-repo= hf-file= hf= hf-token= model-url= "
        "speculative-draft-model-revision= hff= hft= hfr= mu= hfv= hf-repo-v= fim-qwen-1.5b-default "
        "fim-qwen-3b-default fim-qwen-7b-default fim-qwen-7b-spec fim-qwen-14b-spec fim-qwen-30b-default "
        "gpt-oss-20b-default gpt-oss-120b-default hf-file-v= dr= docker-repo= models-dir= models-max= models-preset= "
        "models-autoload no-models-autoload"
    ),
    "weights are read from safetensors and GGUF files as they are; leave it out": (
        "model-checksum= custom-weight-loader=* delete-ckpt-after-loading "
        "checkpoint-engine-wait-weights-before-ready speculative-draft-load-format= "
        "remote-instance-weight-loader-backend= decryption-key-file= weight-transfer-config= "
        "enable-weights-cpu-backup enable-draft-weights-cpu-backup weight-version= "
        "remote-instance-weight-loader-seed-instance-ip= "
        "remote-instance-weight-loader-seed-instance-service-port= rl-on-policy-target= model-impl-plugin= "
        "control-vector=* control-vector-scaled=* control-vector-layer-range=*"
    ),
    "the checkpoint says how it is quantized; leave it out": (
        "quantization-param-path= modelopt-quant= torchao-config= speculative-draft-model-quantization= "
        "modelopt-checkpoint-restore-path= quantize-and-serve allow-deprecated-quantization calculate-kv-scales"
    ),
    "the tokenizer is that of the model folder, and so is the template; write --chat-template FILE for another one": (
        "tokenizer= tokenizer-path= hf-chat-template-name= chat-template-content-format= completion-template= "
        "trust-request-chat-template response-role= exclude-tools-when-tool-choice-none spm-infill "
        "skip-chat-parsing no-jinja prefill-assistant no-prefill-assistant sp special"
    ),
    "sampling that generation_config.json in MODEL recommends is the default; write it there, or in requests": (
        "preferred-sampling-params= override-generation-config="
    ),
    _MACHINES: (
        "data-parallel-start-rank= data-parallel-size-local= data-parallel-hybrid-lb headless "
        "data-parallel-external-lb data-parallel-rank= dpl= dpa= dpr= dp-rank= dph dpe"
    ),
    "write CUDA_VISIBLE_DEVICES=N before the command: it says which GPUs it sees; leave it out": (
        "base-gpu-id=0 gpu-id-step=1 main-gpu= device-ids=*"
    ),
    "write `numactl` before the command; leave it out": (
        "numa-node=* numa-bind numa= numa-bind-nodes=* numa-bind-cpus=* enable-numa"
    ),
    "layers are not split over workers; leave it out": "pp-partition=",
    "write --cache-dir and --cache-dir-mib: what was evicted comes back from a file; or leave it out": (
        "enable-hierarchical-cache hicache-ratio= hicache-size= hicache-io-backend= hicache-write-policy= "
        "hicache-mem-layout= hicache-storage-backend= hicache-storage-prefetch-policy= "
        "hicache-storage-backend-extra-config= enable-lmcache kv-offloading-size= kv-offloading-backend= "
        "enable-hicache hicache-storage= enable-lmcache-mp cache-ram= cram= kv-offloading="
    ),
    "pages have no tier but --cache-dir; leave it out": (
        "enable-hisparse hisparse-config= disaggregation-decode-enable-offload-kvcache cpu-offload-gb= swap-space= "
        "offload-group-size= offload-mode= cache-reuse= ctx-checkpoints= swa-checkpoints= ctxcp= cache-idle-slots "
        "no-cache-idle-slots slot-save= decode-enable-offload-kvcache "
        "hierarchical-sparse-attention-extra-config= enable-double-sparsity ds-channel-config-path= "
        "ds-heavy-channel-num= ds-heavy-token-num= ds-heavy-channel-type= ds-sparse-decode-threshold= "
        "enable-nsa-prefill-context-parallel nsa-prefill-cp-mode="
    ),
    "write --speculative-algorithm, and for a head of its own --speculative-draft-model-path": "speculative-config=",
    "--speculative-draft-model-path names the folder of a draft head, which brings its own map of tokens; "
    "leave it out": "speculative-token-map=",
    "guesses are verified exactly; leave it out": (
        "speculative-accept-threshold-single= speculative-accept-threshold-acc="
    ),
    "states get as much memory as pages of tokens do; write --max-mamba-cache-size, how many": (
        "mamba-full-memory-ratio="
    ),
    "write --mamba-ssm-dtype; the inputs of convolutions are kept as --kv-cache-dtype says": "mamba-cache-dtype=",
    "no tools are run here, and no code is loaded that reads answers; leave it out": (
        "tool-server= tool-parser-plugin= reasoning-parser-plugin= tools= agent webui-mcp-proxy mcp-config-path="
    ),
    "write --reasoning-parser, or leave it out": "reasoning-format=",
    "structured output is not built yet; leave it out, and `response_format` out of requests": (
        "grammar-backend= guided-decoding-backend= structured-outputs-config= grammar= json-schema= "
        "constrained-json-whitespace-pattern= constrained-json-disable-any-whitespace grammar-file= j= jf= "
        "json-schema-file= guided-decoding-disable-fallback reasoning-parser-for-grammar="
    ),
    "adapters are not built yet; merge it into the weights of MODEL": (
        "enable-lora lora-paths=* lora-modules=* lora= max-lora-rank= max-loras= max-loras-per-batch= "
        "max-loaded-loras= lora-target-modules=* lora-backend= lora-scaled=* lora-init-without-apply "
        "fully-sharded-loras lora-extra-vocab-size= long-lora-scaling-factors= max-cpu-loras= lora-dtype= "
        "default-mm-loras= max-lora-chunk-size= lora-eviction-policy= enable-lora-overlap-loading "
        "enable-tower-connector-lora specialize-active-lora"
    ),
    "only text is read; leave it out": (
        "enable-multimodal limit-mm-per-prompt= limit-mm-data-per-request= mm-process-config= mmproj= "
        "encoder-only encoder-urls=* mm-processor-kwargs= mmproj-url= mm= mmu= multimodal-encode-worker "
        "multimodal-worker multimodal-processor enable-mm-embeds enable-prompt-embeds mv= model-vocoder= "
        "tts-use-guide-tokens omni"
    ),
    "answers are text; embeddings are not built; leave it out": (
        "is-embedding embedding embeddings reranking rerank pooling= pooler-config= override-pooler-config= "
        "embd-normalize= embedding-worker multi-item-scoring-delimiter= embd-gemma-default "
        "enable-flash-late-interaction"
    ),
    "a prompt that does not fit is refused with both lengths, never cut; leave it out": "allow-auto-truncate",
    "write --schedule-policy priority": "enable-priority-scheduling",
    "write --schedule-policy priority-low-first": "schedule-low-priority-values-first",
    "nothing that runs makes way for a higher priority; leave it out": "priority-scheduling-preemption-threshold=",
    "under another --schedule-policy a priority changes nothing; leave it out": "abort-on-priority-when-disabled",
    "code of requests is never run; leave it out": (
        "enable-custom-logit-processor logits-processors=* middleware=* forward-hooks= worker-extension-cls= "
        "logits-processor-pattern= custom-sigquit-handler= enable-tokenizer-info-endpoint io-processor-plugin="
    ),
    "answers carry no inner values; leave it out": (
        "enable-return-hidden-states enable-return-routed-experts max-logprobs= return-tokens-as-token-ids"
    ),
    "traces go where --otlp-traces-endpoint says, all parts of a request; leave it out": (
        "enable-trace collect-detailed-traces=*"
    ),
    "there are metrics, logs and --otlp-traces-endpoint; leave it out": (
        "enable-kv-cache-events durable-kv-events profiler-config= enable-nsys enable-per-request-metrics "
        "dump-request-path="
    ),
    "no text of requests is kept; leave it out": (
        "crash-dump-folder= export-metrics-to-file export-metrics-to-file-dir= log-requests-target=* "
        "debug-tensor-dump-output-folder= slot-save-path= log-file= msprobe-dump-config= request-dump-folder= "
        "history-backend= schema-config= storage-backend="
    ),
    "a server keeps its weights and memory until it ends; leave it out": (
        "enable-memory-saver enable-sleep-mode sleep-idle-seconds= enable-elastic-ep-scaling"
    ),
    "prompts are always computed in chunks; write --chunked-prefill-size, how long": (
        "no-enable-chunked-prefill max-num-partial-prefills="
    ),
    "there is one protocol, HTTP; leave it out": (
        "grpc-mode enable-grpc kserve-grpc-server grpc-metrics-port= interactive tokens-only"
    ),
    "workers are known by --workers of the router; leave it out": (
        "endpoint= store-kv= discovery-backend= request-plane= event-plane= namespace="
    ),
    "write --json-model-override-args '{\"rope_scaling\": {...}}'": (
        "rope-scaling=* rope-theta= rope-scale= rope-freq-base= rope-freq-scale= yarn-orig-ctx= "
        "yarn-ext-factor= yarn-attn-factor= yarn-beta-slow= yarn-beta-fast="
    ),
    "write --json-model-override-args, a JSON object of fields of config.json": (
        "override-kv= override-architecture= hf-config-path= decrypted-config-file= disable-sliding-window"
    ),
    "requests say it; write `chat_template_kwargs` in them": (
        "chat-template-kwargs= default-chat-template-kwargs= reasoning-budget= reasoning-budget-message= "
        "reasoning= rea= reasoning-config="
    ),
    "requests say it; write `ignore_eos` in them": "ignore-eos",
    "sampling is said by requests, or by generation_config.json in MODEL; leave it out": (
        "temp= temperature= top-k= top-p= min-p= top-n-sigma= typical= typical-p= presence-penalty= "
        "frequency-penalty= repeat-penalty= repeat-last-n= dry-multiplier= dry-base= dry-allowed-length= "
        "dry-penalty-last-n= dry-sequence-breaker= xtc-probability= xtc-threshold= dynatemp-range= "
        "dynatemp-exp= mirostat= mirostat-lr= mirostat-ent= samplers= sampler-seq= sampling-seq= logit-bias= l= "
        "max-beam-width=1 backend-sampling"
    ),
    "keys and values have one type; write --kv-cache-dtype fp8_e4m3, or leave it out": (
        "cache-type-k= ctk= cache-type-v= ctv= cache-type-k-draft= ctkd= cache-type-v-draft= ctvd="
    ),
    "guesses are not made by a smaller model; write --speculative-algorithm NGRAM, or EAGLE3 and its head": (
        "md= model-draft= spec-draft-model= draft-max= draft= draft-n= draft-min= draft-n-min= draft-p-min= "
        "draft-p-split= ctx-size-draft= cd= device-draft= devd= spec-type= spec-draft-n-max= spec-draft-n-min= "
        "hf-repo-draft= hfd= hfrd= speculative-dflash-block-size= speculative-dspark-block-size="
    ),
    "write --mem-fraction-static, or --num-pages, how many": (
        "kv-cache-free-gpu-memory-fraction= free-gpu-memory-fraction="
    ),
    "all layers are on one device; write --device, or leave it out": (
        "n-cpu-moe= ncmoe= cpu-moe cmoe override-tensor= ot= no-kv-offload nkvo offload-num-in-group= "
        "offload-prefetch-step= cpu-offload-params=* offload-backend= offload-prefetch-step-size= dev= rpc= "
        "kt-weight-path= kt-method= kt-cpuinfer= kt-threadpool-count= kt-num-gpu-experts= "
        "kt-max-deferred-experts-per-token="
    ),
    "one server listens on a port; leave it out": "reuse-port",
    "its paths are fixed, see /docs; leave it out": "slots no-slots props path= tools-endpoint= models-endpoint=",
    "write --log-level, --log-format and --log-to; logging is not configured by a file": (
        "log-config-file= log-disable"
    ),
    "all a server is told is in flags, a YAML file or variables; leave it out": (
        "extra-engine-args= extra-llm-api-options= override-engine-args= list-devices fail-on-environ-validation"
    ),
    "the time that a request may take is one setting; write --request-timeout-s": "to= timeout=",
    "layers, dispatch and numbers are checked by `deltaserve verify`; leave it out": "enable-nan-detection",
    "workers are told apart by their greeting, and all are of this server; leave it out": "backend=* runtime=",
}
"""Why it is refused, and what to write instead |-> names."""


def _rows() -> Iterator[Foreign]:
    for key, names in _ALIASES.items():
        yield from (Foreign(name, Takes.ONE, Alias(key)) for name in names.split())
    for why, name, takes, values in _specs(_IDLE):
        yield Foreign(name, takes, Idle(why, values))
    for remedy, name, takes, values in _specs(_REFUSED):
        yield Foreign(name, takes, Idle(remedy, values) if values else Denied(remedy))


def _specs(table: Mapping[str, str]) -> Iterator[tuple[str, str, Takes, tuple[str, ...]]]:
    for text, specs in table.items():
        for spec in specs.split():
            name, equals, rest = spec.partition("=")
            values = () if rest in ("", "*") else tuple(rest.split("|"))
            if not equals or values == _SWITCHED_ON:
                yield text, name, Takes.NOTHING, values
            else:
                yield text, name, Takes.SEVERAL if rest == "*" else Takes.ONE, values


_SWITCHED_ON = ("true",)
FOREIGN: Mapping[str, Foreign] = {row.name: row for row in _rows()}
"""Name of a foreign flag |-> its row."""
SHORTEST_IN_FILES = 2
"""Letters: shorter names are flags of a line only."""


def key_of(name: str) -> str:
    """Our key for a name that may be an alias of one."""
    row = FOREIGN.get(name)
    return row.meaning.key if row is not None and isinstance(row.meaning, Alias) else name
