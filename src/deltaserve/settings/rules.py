"""What settings may not stand together. Each rule names both values; rules that need facts are in resolve, and those of
a branch in its own folder (launch/lacking.py asks for them)."""

import json
from collections.abc import Iterator

from deltaserve.settings.config import MAX_WORKERS, Settings
from deltaserve.settings.host_and_port import is_any, is_loopback
from deltaserve.settings.kv_events import read_kv_events
from deltaserve.settings.worker_list import parse_workers

WORKER_COMMANDS = ("prefill", "decode")
_HIGHEST_PORT = 65535


def breaches(settings: Settings, command: str) -> Iterator[str]:
    """Each rule that `deltaserve COMMAND` would break."""
    rules = (_paths, _modes, _cluster, _ranks, _lengths, _speculation, _listeners, _http, _kv_events, _logs)
    for rule in rules:
        yield from rule(settings, command)


def idle(settings: Settings, command: str) -> Iterator[str]:
    """What `deltaserve COMMAND` was given and does not read, because of something else that it was given or not."""
    parallelism = settings.parallelism
    if parallelism.dist_init_addr is not None and parallelism.nnodes == 1:
        yield f"--dist-init-addr {parallelism.dist_init_addr} changes nothing: all ranks are on this machine (--nnodes)"
    if command != "serve" or settings.cluster.cluster != "none":
        return
    asked, security = settings.disaggregation, settings.security
    here = "the workers of one `serve` are on this machine"
    if asked.transfer_devices is not None:
        yield f"--transfer-devices {asked.transfer_devices} changes nothing: {here}"
    if security.trusted_data_network is not None:
        yield f"--trusted-data-network {security.trusted_data_network} changes nothing: {here}"
    port = asked.disaggregation_bootstrap_port
    if port != Settings().disaggregation.disaggregation_bootstrap_port:
        yield (
            f"--disaggregation-bootstrap-port {port} changes nothing: the workers of one `serve` find ports for their "
            "links themselves"
        )


def _paths(settings: Settings, command: str) -> Iterator[str]:
    model = settings.model
    if model.model_path is None:
        yield f"no model: deltaserve {command} MODEL, or --model-path"
    if model.json_model_override_args is not None:
        try:
            override = json.loads(model.json_model_override_args)
        except (ValueError, RecursionError):
            override = None
        if type(override) is not dict:
            yield f"--json-model-override-args {model.json_model_override_args[:80]!r}: must be a JSON object"


def _modes(settings: Settings, command: str) -> Iterator[str]:
    memory = settings.memory
    if memory.cache_dir is not None and memory.disable_radix_cache:
        yield "--cache-dir copies what is cached: leave out --disable-radix-cache, or this"
    if memory.cache_dir is None and memory.cache_dir_mib != type(memory)().cache_dir_mib:
        yield f"--cache-dir-mib {memory.cache_dir_mib}: needs --cache-dir, the folder of that file"
    mode = settings.disaggregation.disaggregation_mode
    if command == "serve" and mode in WORKER_COMMANDS:
        yield f"--disaggregation-mode {mode}: a worker on its own is started by `deltaserve {mode}`, not by serve"
    if command in WORKER_COMMANDS and mode not in ("auto", command):
        yield f"--disaggregation-mode {mode}: this is `deltaserve {command}`; leave the flag out"
    if command == "serve" and mode == "null" and settings.disaggregation.prefill > 1:
        count = settings.disaggregation.prefill
        yield f"--prefill {count}: with --disaggregation-mode null no prefill worker is started"
    if command == "serve" and mode == "null":
        yield from _of_one_role(settings)
    if command == "serve" and mode == "null" and settings.memory.disable_decode_radix_cache:
        yield "--disable-decode-radix-cache: one worker has one cache (mode null); use --disable-radix-cache"
    if command == "router":
        yield from _router_workers(settings)


def _cluster(settings: Settings, command: str) -> Iterator[str]:
    asked = settings.cluster
    if command != "serve":
        return
    if asked.cluster == "none":
        if asked.address is not None:
            yield f"--address {asked.address[:80]}: names a cluster; add --cluster, what kind it is of"
        return
    flag = f"--cluster {asked.cluster}"
    if settings.disaggregation.disaggregation_mode == "null":
        yield f"{flag}: prefill and decode are workers of their own there; leave --disaggregation-mode null out"
    if max(settings.parallelism.dp_size, settings.parallelism.prefill_dp_size) > 1:
        yield f"{flag}: workers that share experts (--dp-size) are all on one machine; leave one of them out"
    if settings.network.kv_events_config is not None:
        yield f"{flag}: workers there tell no KV events; leave --kv-events-config out"
    disaggregation = settings.disaggregation
    last = disaggregation.disaggregation_bootstrap_port + disaggregation.prefill + disaggregation.decode - 1
    if last > _HIGHEST_PORT:
        first = disaggregation.disaggregation_bootstrap_port
        yield f"--disaggregation-bootstrap-port {first}: the last worker would have port {last}, above {_HIGHEST_PORT}"


def _ranks(settings: Settings, command: str) -> Iterator[str]:
    asked = settings.parallelism
    yield from _expert_group(settings, command)
    yield from _nodes(settings, command)
    sizes = (asked.tp_size, asked.prefill_tp_size or 1, asked.decode_tp_size or 1, asked.dp_size, asked.prefill_dp_size)
    if asked.ep_size != "auto" and asked.ep_size > max(sizes):
        yield f"--ep-size {asked.ep_size}: a worker has fewer ranks to divide experts over; add --tp-size"


def _nodes(settings: Settings, command: str) -> Iterator[str]:
    asked = settings.parallelism
    count, address = asked.nnodes, asked.dist_init_addr
    flag = f"--nnodes {count}"
    if asked.node_rank >= count:
        yield f"--node-rank {asked.node_rank}: the machines of a worker are 0 to {count - 1}; {flag} says how many"
    if count == 1:
        return
    if command not in WORKER_COMMANDS:
        yield (
            f"{flag}: the workers of `deltaserve {command}` are each on one machine; one on several is started by "
            "`deltaserve prefill` or `decode` on each of them"
        )
        return
    if asked.dp_size == 1 and asked.tp_size % count:
        yield f"{flag}: --tp-size {asked.tp_size} ranks cannot be shared out equally over so many machines"
    if address is None:
        yield f"{flag}: add --dist-init-addr HOST:PORT, where the machine of --node-rank 0 waits for the others"
        return
    host, _, port = address.rpartition(":")
    if int(port) > _HIGHEST_PORT:
        yield f"--dist-init-addr {address}: the port must be at most {_HIGHEST_PORT}"
    is_told = not is_loopback(settings.network.host)  # the same of page transfers
    if not is_loopback(host) and not is_told and settings.security.trusted_data_network is None:
        yield (
            f"--dist-init-addr {address}: what ranks add up carries no authentication; name their network with "
            "--trusted-data-network"
        )
    if asked.node_rank and asked.dp_size == 1 and settings.network.http is not None:
        yield f"--http {settings.network.http}: requests are taken at the machine of --node-rank 0; leave it out here"


def _expert_group(settings: Settings, command: str) -> Iterator[str]:
    asked = settings.parallelism
    if command in WORKER_COMMANDS:
        yield from _member(settings, command)
        return
    if asked.enable_dp_attention and asked.dp_size == asked.prefill_dp_size == 1:
        yield "--enable-dp-attention: add --dp-size N, how many decode workers share the experts"
    disaggregation = settings.disaggregation
    groups = (
        ("decode", "--dp-size", asked.dp_size, asked.decode_tp_size, disaggregation.decode),
        ("prefill", "--prefill-dp-size", asked.prefill_dp_size, asked.prefill_tp_size, disaggregation.prefill),
    )
    for role, name, size, own_ranks, count in groups:
        if size == 1:
            continue
        flag, ranks = f"{name} {size}", own_ranks or asked.tp_size
        if not asked.enable_dp_attention:
            yield f"{flag}: add --enable-dp-attention; workers that share nothing are started with --{role} {size}"
        if disaggregation.disaggregation_mode == "null":
            yield f"{flag}: one worker does both (mode null); a group decodes what other workers prefill"
        if ranks > 1:
            yield f"{flag}: each of these workers has all heads on one rank, not {ranks}; add --{role}-tp-size 1"
        if count * size > MAX_WORKERS:
            yield f"{flag} with --{role} {count}: more than {MAX_WORKERS} workers"


def _member(settings: Settings, command: str) -> Iterator[str]:
    """A worker on its own may be a member of a group whose others are elsewhere."""
    asked = settings.parallelism
    if asked.dp_size == 1 and not asked.enable_dp_attention:
        return
    flag = f"--dp-size {asked.dp_size}" if asked.dp_size > 1 else "--enable-dp-attention"
    if asked.dp_size == 1 or asked.nnodes != asked.dp_size:
        size = asked.dp_size if asked.dp_size > 1 else "N"
        yield (
            f"{flag}: `deltaserve serve` starts a group of decode workers; `deltaserve {command}` is a member: "
            f"add --dp-size {size} --nnodes {size}, its --node-rank, and --dist-init-addr; leave --tp-size out"
        )
    elif not asked.enable_dp_attention:
        yield f"{flag}: add --enable-dp-attention, or leave it out"
    elif asked.tp_size > 1:
        yield f"{flag}: each of these workers has all heads on one rank, not {asked.tp_size}; leave --tp-size out"


def _speculation(settings: Settings, command: str) -> Iterator[str]:
    asked = settings.speculation
    if asked.speculative_eagle_topk != 1:
        yield f"--speculative-eagle-topk {asked.speculative_eagle_topk}: guesses are verified in a row, no tree; use 1"
    both = asked.speculative_num_draft_tokens
    if both is not None and both != asked.speculative_num_steps + 1:
        yield (
            f"--speculative-num-draft-tokens {both}: it is --speculative-num-steps {asked.speculative_num_steps} "
            "and one more; leave it out"
        )


def _of_one_role(settings: Settings) -> Iterator[str]:
    memory, parallelism = settings.memory, settings.parallelism
    for role, flag, asked in (
        ("prefill", "tp-size", parallelism.prefill_tp_size),
        ("decode", "tp-size", parallelism.decode_tp_size),
        ("prefill", "page-size", memory.prefill_page_size),
        ("decode", "page-size", memory.decode_page_size),
        ("prefill", "kv-cache-dtype", memory.prefill_kv_cache_dtype),
        ("decode", "kv-cache-dtype", memory.decode_kv_cache_dtype),
        ("prefill", "num-threads", settings.scheduling.prefill_num_threads),
        ("decode", "num-threads", settings.scheduling.decode_num_threads),
    ):
        if asked is not None:
            yield f"--{role}-{flag} {asked}: one worker does both (mode null); use --{flag}"


def _router_workers(settings: Settings) -> Iterator[str]:
    network = settings.network
    may_join = network.workers_file is not None or network.workers_dns is not None
    if network.workers is None and not may_join:
        example = "prefill@10.0.0.1:8998,decode@10.0.0.2:8998"
        yield f"no workers: deltaserve router needs --workers, such as {example}, --workers-file or --workers-dns"
    own = f"{network.host}:{network.port}"
    for flag, text in (("--workers", network.workers), ("--workers-dns", network.workers_dns)):
        try:
            entries = parse_workers(text or "")
        except ValueError as error:
            yield f"{flag} {error}"
            continue
        if any(entry.address == own for entry in entries):
            yield f"{flag} {own}: is this router's own address (--host, --port)"
    if network.workers is not None and "decode@" not in network.workers and not may_join:
        yield f"--workers {network.workers[:80]}: at least one decode worker is needed"


def _lengths(settings: Settings, command: str) -> Iterator[str]:
    page, scheduling = settings.memory.page_size, settings.scheduling
    split = scheduling.attention_split_tokens
    chunk, step = scheduling.chunked_prefill_size, scheduling.max_prefill_tokens
    if page != "auto":
        if chunk != "auto" and chunk % page:
            yield f"--chunked-prefill-size {chunk}: must be a multiple of --page-size {page}"
        if split % page:
            yield f"--attention-split-tokens {split}: must be a multiple of --page-size {page}"
    if chunk != "auto" and step != "auto" and step < chunk:
        yield f"--max-prefill-tokens {step}: must be at least --chunked-prefill-size {chunk}"
    drain, request = settings.disaggregation.drain_timeout_s, scheduling.request_timeout_s
    if drain >= request:
        yield f"--drain-timeout-s {drain:g}: must be below --request-timeout-s {request:g}"


def _listeners(settings: Settings, command: str) -> Iterator[str]:
    host, security = settings.network.host, settings.security
    is_worker = command in WORKER_COMMANDS
    is_local = is_loopback(host)
    if is_worker and ":" in host:
        yield f"--host {host}: a worker listens on an IPv4 address; name one, or a host name"
    if is_worker and is_any(host) and settings.network.advertise is None:
        yield f"--host {host}: nobody can dial that, and a worker is known by its address; add --advertise HOST"
    if not is_local and is_worker and security.trusted_data_network is None:
        yield f"--host {host}: page transfers carry no authentication; name their network with --trusted-data-network"
    devices = settings.disaggregation.transfer_devices
    if is_worker and is_local and devices not in (None, "lo") and security.trusted_data_network is None:
        yield f"--transfer-devices {devices}: page transfers carry no authentication; add --trusted-data-network"
    network = settings.network
    if network.uds is not None and not is_local:
        yield f"--host {host}: with --uds {network.uds} nothing listens there; leave one of them out"
    if network.uds is not None and network.fronts > 1:
        yield f"--fronts {network.fronts}: a Unix socket (--uds {network.uds}) has one listener; leave one of them out"
    if network.uds is not None and network.ssl_certfile is not None:
        yield f"--ssl-certfile {network.ssl_certfile}: a Unix socket is not encrypted; leave it or --uds out"
    if network.ssl_keyfile is not None and network.ssl_certfile is None:
        yield f"--ssl-keyfile {network.ssl_keyfile}: needs --ssl-certfile, the certificate of the key"
    if not is_worker and network.admin_port == network.port:
        yield f"--admin-port {network.port}: is that of the API (--port); leave it out, or choose another"
    if security.insecure_network:
        return
    if not is_worker and network.admin_host and not is_loopback(network.admin_host) and security.api_key_file is None:
        yield f"--admin-host {network.admin_host}: admin routes beyond this machine need --api-key-file"
    if not is_local and not is_worker and security.api_key_file is None:
        yield f"--host {host}: listening beyond this machine needs --api-key-file (or --insecure-network)"


def _http(settings: Settings, command: str) -> Iterator[str]:
    """A worker that takes its half of requests by HTTP."""
    network, security = settings.network, settings.security
    port = network.http
    if port is None or command not in WORKER_COMMANDS:
        return
    flag = f"--http {port}"
    links = settings.disaggregation.disaggregation_bootstrap_port
    if port == links:
        yield f"{flag}: is the port of its links (--disaggregation-bootstrap-port); choose another"
    if port == network.admin_port:
        yield f"--admin-port {port}: is that of the API (--http); leave it out, or choose another"
    if links == _admin_port_of_worker(settings):
        yield f"--disaggregation-bootstrap-port {links}: admin routes listen there ({flag}); choose another"
    if command == "prefill" and network.worker_name is not None:
        yield f"--worker-name {network.worker_name}: with --http requests name this worker by its address; leave it out"
    if security.insecure_network or security.api_key_file is not None:
        return
    if not is_loopback(network.host):
        yield f"--host {network.host}: listening there for {flag} needs --api-key-file (or --insecure-network)"
    if network.admin_host is not None and not is_loopback(network.admin_host):
        yield f"--admin-host {network.admin_host}: admin routes beyond this machine need --api-key-file"


def _admin_port_of_worker(settings: Settings) -> int | None:
    """Port of the admin routes of a worker with --http; None: they are on that of its API."""
    network, security = settings.network, settings.security
    if network.admin_port is not None or network.http is None:
        return network.admin_port
    has_own = security.api_key_file is not None or network.admin_host is not None or not is_loopback(network.host)
    return network.http + 1 if has_own else None


def _kv_events(settings: Settings, command: str) -> Iterator[str]:
    text = settings.network.kv_events_config
    if text is None:
        return
    try:
        config = read_kv_events(text)
    except ValueError as error:
        yield f"--kv-events-config {text[:80]!r}: {error}"
        return
    if not config.is_on or settings.security.insecure_network or settings.security.trusted_data_network is not None:
        return
    for host in [each for each in config.hosts if not is_loopback(each)]:
        yield (
            f"--kv-events-config: {host} is beyond this machine, and events carry the tokens of prompts to whoever "
            "connects; take an address of loopback, or add --insecure-network"
        )


def _logs(settings: Settings, command: str) -> Iterator[str]:
    if settings.logging.log_to == "stdout" and settings.logging.log_dir is not None:
        yield f"--log-dir {settings.logging.log_dir}: with --log-to stdout nothing is written there"
