"""`deltaserve serve MODEL`: a supervisor, the front (or several), and the workers, all on this machine."""

import dataclasses
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.core.lifetime import Lifetime
from deltaserve.core.quantization import Quantization
from deltaserve.core.sizes import size
from deltaserve.launch.clusters.cluster_kinds import load_launcher
from deltaserve.launch.compose import (
    Checkpoint,
    computes_prompts,
    device_of,
    group_size,
    has_staging,
    log_spec,
    open_checkpoint,
    preload_child,
    resolve_settings,
    settings_of,
    with_core_shares,
    with_expert_seat,
    with_own_kv_events,
    worker_child,
    worker_names,
    worker_spec,
)
from deltaserve.launch.fronts import front_ports, front_specs, view_url
from deltaserve.launch.process_limits import require_threads
from deltaserve.launch.restarts import RestartPolicy
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.child import ChildSpec
from deltaserve.process.children.child_events import AllReady, ChildEvent
from deltaserve.process.children.exits import Exit
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.children.terminal import Say, say, say_in_json
from deltaserve.process.front.front_spec import FrontSpec, FrontWorker, front_child
from deltaserve.process.front.secrets import read_api_keys, read_cluster_key
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.server.settings import HttpLimits, ServerSettings, StreamTimes, TlsFiles
from deltaserve.server.sockets import check_certificate
from deltaserve.server.text.answers.answer_choice import AUTO, NONE, Parsers, name_of
from deltaserve.server.text.text_codec import SamplingDefaults, TextCodec
from deltaserve.settings.config import Settings
from deltaserve.settings.resolve import ResolvedConfig, auto_values, kv_bytes_per_token
from deltaserve.settings.urls import api_url


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything `serve` starts."""

    children: tuple[ChildSpec, ...]
    preload: ChildSpec | None
    """What workers are forked from."""
    resolved: Mapping[Role, ResolvedConfig]
    base_url: str
    sampling: SamplingDefaults
    notes: tuple[str, ...]
    """Lines for the user."""


def run(settings: Settings) -> int:
    """Serve until a stop signal; the exit code. Raises ConfigError before any process is started."""
    if settings.cluster.cluster != "none":
        return load_launcher(settings.cluster.cluster).run(settings)
    return run_adjusted(settings, as_resolved)


def run_adjusted(settings: Settings, adjust: Callable[[WorkerSpec], WorkerSpec]) -> int:
    """Do what `run` does, with a last change to each worker's spec."""
    with private_folder(settings.process.state_dir) as folder:
        logging = settings.logging
        tell = speaker(settings)
        log_dir = folder if logging.log_dir is None else open_log_dir(Path(logging.log_dir))
        cluster = compose(settings, folder, adjust)
        for who, config in by_config(cluster.resolved):
            tell_resolved(config, tell, who)
        tell_native(cluster.resolved.values(), tell)
        for note in cluster.notes:
            tell(note)
        tell_sampling(cluster.sampling, tell)
        tell_pair(settings, cluster.resolved, tell)
        for line in describe_groups(settings):
            tell(line)
        if has_staging(settings):
            tell(describe_staging(settings))
        if settings.memory.cache_dir is not None:
            tell(describe_cache_dir(settings))
        if logging.log_to == "files":
            tell(f"logs of all processes: {log_dir}")
        options = supervisor_options(settings, log_dir if logging.log_to == "files" else None)
        code = Supervisor(cluster.children, options, teller(settings, tell), cluster.preload).run()
        if code is Exit.FAILED and options.log_dir is folder:
            tell(keep_logs(folder))
        return int(code)


def speaker(settings: Settings) -> Say:
    """Where lines for the user of `serve` go: with JSON logs that are on stdout, among them."""
    logging = settings.logging
    return say_in_json("serve", sys.stdout) if (logging.log_format, logging.log_to) == ("json", "stdout") else say


def supervisor_options(settings: Settings, log_dir: Path | None) -> SupervisorOptions:
    process = settings.process
    return SupervisorOptions(
        log_dir=log_dir,
        grace_s=process.shutdown_grace_s,
        restarts=RestartPolicy(start_timeout_s=process.start_timeout_s),
    )


def open_log_dir(path: Path) -> Path:
    """Make it if need be. Raises ConfigError when no log could be written there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(f"--log-dir {path}: {error.strerror or error}") from None
    return path


def keep_logs(folder: Path) -> str:
    """Move them out of a folder that is removed soon, for whoever looks for the cause; a line that says where to."""
    try:
        kept = Path(tempfile.mkdtemp(prefix="deltaserve-logs-"))
        for log in folder.glob("*.log*"):
            shutil.move(log, kept)
    except OSError as error:
        return f"the logs cannot be kept: {error.strerror or error}"
    return f"the logs are kept: {kept}"


def rehearse(settings: Settings) -> dict[str, str]:
    """What auto came to, by field. Raises ConfigError as `run` does; ports and log folder are not tried."""
    if settings.cluster.cluster != "none":
        return load_launcher(settings.cluster.cluster).rehearse(settings)
    prepared = prepare(settings)
    *_, resolved = prepared.resolved.values()
    found = auto_values(settings, resolved, "prefill and decode apart")
    return {**found, **parser_values(settings, prepared.text.parsers)}


def as_resolved(spec: WorkerSpec) -> WorkerSpec:
    return spec


def compose(settings: Settings, folder: Path, adjust: Callable[[WorkerSpec], WorkerSpec] = as_resolved) -> Deployment:
    """Resolve everything, write the specs of all processes into `folder` (private).

    `adjust`: the last change to each worker's spec, for what settings say of all workers alike.
    """
    prepared = prepare(settings)
    checkpoint, resolved = prepared.checkpoint, prepared.resolved
    require_free_ports(settings)
    secret_path = cluster_secret(settings, folder)
    names = worker_names(settings)
    first_ranks = accumulate((resolved[role].tp_size for _, role in names), initial=0)
    specs = [
        msgspec.structs.replace(
            worker_spec(name, role, settings, checkpoint, resolved[role], secret_path),
            device=device_of(resolved[role], first),
        )
        for (name, role), first in zip(names, first_ranks, strict=False)
    ]
    specs = [with_own_kv_events(spec, index) for index, spec in enumerate(specs)]
    ranks = [resolved[role] for _, role in names]
    require_threads(
        settings.network.fronts + sum(r.tp_size for r in ranks), sum(r.tp_size * r.num_threads for r in ranks)
    )
    specs = [
        with_expert_seat(spec, index, settings, folder)
        for role in resolved
        for index, spec in enumerate(spec for spec in specs if spec.role is role)
    ]
    specs = with_core_shares(specs, resolved, settings, folder)
    front = front_spec(settings, checkpoint, secret_path)
    workers = tuple(_front_worker(spec) for spec in specs)
    children = [worker_child(adjust(spec), folder) for spec in specs]
    fronts = front_specs(msgspec.structs.replace(front, workers=workers), settings)
    children += [front_child(spec, folder) for spec in fronts]
    if secret_path.parent == folder:  # made for this start: no user's, who may remove it
        children = [dataclasses.replace(child, files=(*child.files, secret_path)) for child in children]
    preload = preload_child(children)
    notes = (*checkpoint.notes, *_notes_on_cores(specs, settings))
    return Deployment(tuple(children), preload, resolved, api_url(settings.network), prepared.text.sampling, notes)


def _notes_on_cores(specs: Sequence[WorkerSpec], settings: Settings) -> tuple[str, ...]:
    """Why prefill may have little to do."""
    if not any(computes_prompts(spec.role, spec.options, settings) for spec in specs):
        return ()
    return (
        "prefill and decode share this machine's cores: decode computes the prompts, for sooner first tokens; with "
        "--conditional-prefill off or --itl-target-ms prefill does, for shorter gaps between tokens",
    )


def _front_worker(spec: WorkerSpec) -> FrontWorker:
    """A worker as the front knows it: it listens on any port, and says so."""
    seat = spec.expert_seat
    return FrontWorker(name=spec.name, role=spec.role, group=None if seat is None else seat.meeting_point)


@dataclass(frozen=True, slots=True)
class FrontText:
    """What a front makes of a model's texts."""

    sampling: SamplingDefaults
    parsers: Parsers
    """Formats of answers by name, also where auto was asked for."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the settings amount to, before anything is opened or started."""

    checkpoint: Checkpoint
    resolved: Mapping[Role, ResolvedConfig]
    text: FrontText


def prepare(settings: Settings) -> Prepared:
    """Everything that can be found wrong by reading. Raises ConfigError."""
    checkpoint = open_checkpoint(settings)
    resolved = resolve_settings(settings, checkpoint)
    text = check_front(settings, checkpoint)
    if settings.security.cluster_key_file is not None:
        read_cluster_key(Path(settings.security.cluster_key_file))
    return Prepared(checkpoint, resolved, text)


def parser_values(settings: Settings, parsers: Parsers) -> dict[str, str]:
    """Field |-> what it came to, of the formats that are "auto"."""
    found = {"tool_call_parser": parsers.calls, "reasoning_parser": parsers.reasoning}
    return {name: value for name, value in found.items() if getattr(settings.model, name) == AUTO}


def check_front(settings: Settings, checkpoint: Checkpoint) -> FrontText:
    """What the front process reads itself: here it must only be right, and told. Raises ConfigError."""
    template = settings.model.chat_template
    codec = TextCodec.load(
        checkpoint.path,
        overrides=checkpoint.overrides,
        sampling=settings.model.sampling_defaults,
        template=None if template is None else Path(template),
        parsers=Parsers(settings.model.tool_call_parser, settings.model.reasoning_parser),
    )
    if (tls := _tls_files(settings)) is not None:
        check_certificate(tls)
    if settings.security.api_key_file is not None:
        read_api_keys(Path(settings.security.api_key_file))
    names = [name_of(each) or NONE for each in (codec.answers.calls, codec.answers.reasoning)]
    return FrontText(codec.defaults, Parsers(*names))


def front_spec(settings: Settings, checkpoint: Checkpoint, secret_path: Path) -> FrontSpec:
    """The front, its workers left out."""
    return FrontSpec(
        model_path=str(checkpoint.path),
        model_overrides=checkpoint.overrides,
        tokenizer=checkpoint.tokenizer,
        kv_bytes_per_token=moved_bytes_per_token(settings, checkpoint),
        secret_path=str(secret_path),
        api_key_file=settings.security.api_key_file,
        chat_template=settings.model.chat_template,
        tool_call_parser=settings.model.tool_call_parser,
        reasoning_parser=settings.model.reasoning_parser,
        sampling_defaults=settings.model.sampling_defaults,
        log=log_spec(settings),
        conditional_prefill=settings.disaggregation.conditional_prefill == "auto",
        traces_url=settings.logging.otlp_traces_endpoint,
        server=_server_settings(settings, checkpoint),
    )


def _server_settings(settings: Settings, checkpoint: Checkpoint) -> ServerSettings:
    scheduling, network = settings.scheduling, settings.network
    name, *others = dict.fromkeys((settings.model.served_model_name or checkpoint.name).split(","))
    return ServerSettings(
        model_name=name,
        other_names=tuple(others),
        model_path=settings.model.model_path,
        host=network.host,
        port=network.port,
        uds=network.uds,
        tls=_tls_files(settings),
        admin_host=network.admin_host,
        admin_port=network.admin_port,
        metrics_names=_listed(settings.logging.metrics_names),
        shows_metrics=settings.logging.metrics_on_api_port,
        allowed_hosts=_listed(network.allowed_hosts),
        allowed_origins=_listed(network.allowed_origins),
        http=HttpLimits(max_connections_per_address=network.max_connections_per_address),
        default_max_tokens=scheduling.default_max_tokens,
        max_queue=scheduling.max_queued_requests,
        stream_interval=scheduling.stream_interval,
        stream_times=StreamTimes(stall_s=scheduling.slow_reader_timeout_s),
        default_deadline_s=scheduling.request_timeout_s,
        max_deadline_s=max(3600.0, scheduling.request_timeout_s),
        grace_s=settings.process.shutdown_grace_s,
    )


def _tls_files(settings: Settings) -> TlsFiles | None:
    network = settings.network
    return None if network.ssl_certfile is None else TlsFiles(network.ssl_certfile, network.ssl_keyfile)


def _listed(words: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (words or "").split(",")))


def moved_bytes_per_token(settings: Settings, checkpoint: Checkpoint) -> float:
    """What a token's KV is on the way: the narrower side's."""
    facts = checkpoint.facts()
    return min(kv_bytes_per_token(settings_of(settings, role), facts) for role in (Role.PREFILL, Role.DECODE))


def cluster_secret(settings: Settings, folder: Path) -> Path:
    """The file of the key that seeds every page key: the user's, or one made for this start."""
    if settings.security.cluster_key_file is not None:
        return Path(settings.security.cluster_key_file).resolve()
    path = folder / "cluster.key"
    path.touch(mode=0o600)
    path.write_text(secrets.token_urlsafe(48))
    return path


def require_free_ports(settings: Settings) -> None:
    """Check every port that fronts are to listen on. Raises ConfigError."""
    for flag, host, port in front_ports(settings):
        require_free_port(flag, host, port)


def require_free_port(flag: str, host: str, port: int) -> None:
    """Raises ConfigError, naming the flag, when nobody could listen there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(f"{flag} {port}: cannot listen on {host} ({error.strerror or error})") from None


def by_config(roles: Mapping[Role, ResolvedConfig]) -> list[tuple[str, ResolvedConfig]]:
    """Each of the configurations once, with words for whose it is where there are several."""
    configs = list(dict.fromkeys(roles.values()))
    if len(configs) == 1:
        return [("", configs[0])]
    return [(" and ".join(role.value for role in roles if roles[role] == config) + ": ", config) for config in configs]


def tell_resolved(r: ResolvedConfig, tell: Say, who: str = "") -> None:
    """What was decided, and what may not be what was wanted."""
    tell(f"{who}{describe(r)}")
    if r.shortened_from is not None:
        tell(
            f"{who}warning: context {r.context_len} instead of the model's {r.shortened_from}: {r.num_pages[0]} pages "
            f"of {r.page_size} tokens hold no more, {-(-r.shortened_from // r.page_size)} would (--num-pages, "
            "--mem-fraction-static; --context-length says how much is wanted)"
        )


def tell_native(resolved: Iterable[ResolvedConfig], tell: Say) -> None:
    """Tell that something is missing which makes a CPU several times as fast: one line for all workers."""
    for problem in sorted({config.native_problem for config in resolved if config.native_problem is not None}):
        tell(f"warning: no native kernels, torch computes in their place, more slowly: {problem}")


def tell_sampling(sampling: SamplingDefaults, tell: Say) -> None:
    """What requests get that do not ask, where that is not the model's plain probabilities."""
    values, neutral = dataclasses.asdict(sampling), dataclasses.asdict(SamplingDefaults())
    told = [f"{name} {value:g}" for name, value in values.items() if value != neutral[name]]
    if told:
        tell(
            f"requests that name no sampling get {', '.join(told)} (--sampling-defaults openai: temperature 1, no cut)"
        )


def tell_pair(settings: Settings, resolved: Mapping[Role, ResolvedConfig], tell: Say) -> None:
    """How pages move where those of the two sides are unlike."""
    if len(resolved) == 1:
        return
    prefill, decode = resolved[Role.PREFILL], resolved[Role.DECODE]
    if (prefill.page_size, prefill.kv_cache_dtype) == (decode.page_size, decode.kv_cache_dtype):
        return
    how = "they move by way of staging memory"
    if not has_staging(settings):
        how = "without --staging they move by a write for each row of each head, which is slow"
    tell(
        f"prefill's pages ({prefill.page_size} tokens, {prefill.kv_cache_dtype}) are unlike decode's "
        f"({decode.page_size} tokens, {decode.kv_cache_dtype}): {how}"
    )


def describe_groups(settings: Settings) -> Iterator[str]:
    """A line about the workers of each role that share experts."""
    counts = {Role.PREFILL: settings.disaggregation.prefill, Role.DECODE: settings.disaggregation.decode}
    for role, count in counts.items():
        members = group_size(settings, role)
        if members > 1:
            groups = f"{role.value}: {members} workers that share experts" + (f", {count} times" if count > 1 else "")
            yield f"{groups}; each step is one of all {members}, and when one ends all start again"


def describe_staging(settings: Settings) -> str:
    """A line about the staging memory of workers that have it."""
    asked = settings.disaggregation
    memory = f"{asked.staging_memory_mib} MiB on each rank"
    return f"staging memory: {memory}, half to send and half to receive ({asked.staging})"


def describe_cache_dir(settings: Settings) -> str:
    """A line about the files under the caches of workers that have them."""
    asked = settings.memory
    return f"a file under the cache: {asked.cache_dir_mib} MiB in {asked.cache_dir} for each worker"


_CODES: Mapping[Quantization, str] = {
    "none": "",
    "auto": ", quantized matrices as stored",
    "int8": ", matrices in at most 8 bits",
    "a8": ", matrices and what they are multiplied with in at most 8 bits",
}


def describe(r: ResolvedConfig) -> str:
    """What was decided for the workers of this machine, in one line."""
    per_rank = " on each rank" if r.tp_size > 1 else ""
    ranks = f"{r.tp_size} ranks per worker, " if per_rank else ""
    widened = "" if r.widened_from is None else f" (this CPU multiplies {r.widened_from} slowly)"
    return (
        f"{r.device}, weights {r.dtype}{widened}{_CODES[r.quantization]}, KV {r.kv_cache_dtype}, "
        f"pages of {r.page_size} tokens, "
        f"{ranks}{_pages(r)} per worker ({size(r.kv_bytes)}{per_rank}), context {r.context_len}, "
        f"{r.max_running_requests} running, {_threads(r)} per {'rank' if per_rank else 'worker'} "
        f"(--num-threads; {r.num_cores} cores here), {_moves(r)}"
    )


def _moves(r: ResolvedConfig) -> str:
    if not r.moves_pages:
        return "no pages move (--disaggregation-mode null)"
    over = f" over {r.transfer_tls}" if r.transfer_tls else ""
    return f"pages move by {r.transfer_backend}{over}"


def _threads(r: ResolvedConfig) -> str:
    if r.own_threads < r.num_threads:
        return f"{r.own_threads} compute thread(s), with cores that no other worker needs up to {r.num_threads},"
    fixed = r.least_threads == r.num_threads
    return f"{r.num_threads} compute thread(s)" if fixed else f"{r.least_threads} to {r.num_threads} compute threads"


def _pages(r: ResolvedConfig) -> str:
    """`1024 pages`, or of a model with windows `1024 pages (10 MiB) and 96 of the last 512 tokens (40 MiB)`."""
    if len(r.pools) == 1:
        return f"{r.num_pages[0]} pages"
    found = []
    for count, facts in zip(r.num_pages, r.pools, strict=True):
        num_bytes = size(count * facts.page_bytes)
        match facts.retention.lifetime:
            case Lifetime.FULL:
                found.append(f"{count} pages ({num_bytes})")
            case Lifetime.WINDOW:
                found.append(f"{count} of the last {facts.retention.window_len} tokens ({num_bytes})")
            case Lifetime.STATE:
                found.append(f"{count} recurrent states ({num_bytes}; a running request goes from one into another)")
    return " and ".join(found)


def teller(settings: Settings, say: Say) -> Callable[[ChildEvent], None]:
    """Prints what happens; says how to use the server, and to look at it, once it is ready."""
    is_told = False

    def tell(event: ChildEvent) -> None:
        nonlocal is_told
        say(event)
        if isinstance(event, AllReady) and not is_told:
            is_told = True
            view = view_url(settings)
            if view is not None:
                say(f"to see what it does: {view}, or `deltaserve top`")
            say(f"serving at {api_url(settings.network)}/v1  (Ctrl-C ends it)")

    return tell
