"""How each server is started on given cores of this machine, waited for, and ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.peers.environments import (
    LLAMA_CPP,
    NIXL_SLEEP_US,
    OPENVINO,
    VLLM,
    CannotInstall,
    Environment,
)
from deltaserve.launch.compose import free_ports

HERE = Path(__file__).resolve().parent
READY_S = 600.0
"""vLLM compiles on its first start."""
END_S = 30.0
LOOPBACK = "127.0.0.1"
KV_GIB = 2
NOT_FOR_PEERS = ("PYTHONPATH", "OMP_NUM_THREADS")
"""Variables that this process may have for itself."""


class CannotServe(Exception):
    """What went wrong, and where the log is."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a server is to serve, and with what."""

    model: Path
    """A Hugging Face folder, or a GGUF file."""
    dtype: str
    """float32 or bfloat16; a GGUF file says itself of what type its weights are."""
    context_len: int
    concurrency: int
    cores: tuple[int, ...]
    serve_args: tuple[str, ...] = ()
    """More arguments for deltaserve."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process (with its children) that listens on a port of its own."""

    name: str
    """Name of its log."""
    argv: tuple[str | Path, ...]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside what it inherits."""
    ready_path: str = "/health"
    worker_core: int | None = None
    """Where the main thread of vLLM's worker belongs: its NIXL connector moves it to the last core of the NUMA node, on
    which both sides would end."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


Launch = Callable[[Job, Environment], tuple[Command, ...]]
"""Commands are started together, one after the other is waited for; the last one is asked."""


def deltaserve(job: Job, **settings: object) -> tuple[Command, ...]:
    """`settings`: flags, unless the job's own arguments name them."""
    (port,) = free_ports(1)
    settings |= {"port": port, "device": "cpu", "context_length": job.context_len}
    settings |= {} if job.model.is_file() else {"dtype": job.dtype}
    named = {argument.partition("=")[0] for argument in job.serve_args}
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}
    defaults = [part for flag, value in flags.items() if flag not in named for part in (flag, value)]
    program = (sys.executable, "-m", "deltaserve.cli.main", "serve", str(job.model))
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    return (Command("deltaserve", (*program, *defaults, *job.serve_args), port, env, "/readyz"),)


def deltaserve_unified(job: Job, env: Environment) -> tuple[Command, ...]:
    return deltaserve(job, disaggregation_mode="null")


def deltaserve_threads(job: Job, env: Environment) -> tuple[Command, ...]:
    """A compute thread on each core, as its peers have."""
    return deltaserve(job, disaggregation_mode="null", num_threads=len(job.cores))


def deltaserve_apart(job: Job, env: Environment) -> tuple[Command, ...]:
    return deltaserve(job)


def vllm_command(
    name: str, job: Job, env: Environment, cores: Sequence[int], port: int, *flags: str, **variables: str
) -> Command:
    """`cores`: one thread on each. Prefix caching is on."""
    argv: tuple[str | Path, ...] = (
        *(env.venv / "bin" / "vllm", "serve", job.model, "--served-model-name", "m"),
        *("--host", LOOPBACK, "--port", str(port), "--dtype", job.dtype, "--max-model-len", str(job.context_len)),
        *("--max-num-seqs", "32", "--max-num-batched-tokens", "4096", "--block-size", "32", "--enable-prefix-caching"),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *flags),
    )
    libraries = [env.venv / "lib" / "libiomp5.so", *env.folder.glob("allocator/**/libtcmalloc_minimal.so.4")]
    own = {
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CACHE_ROOT": str(env.folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    return Command(name, argv, port, {**own, **variables})


def vllm_unified(job: Job, env: Environment) -> tuple[Command, ...]:
    (port,) = free_ports(1)
    return (vllm_command("vllm", job, env, job.cores, port),)


def vllm_apart(job: Job, env: Environment) -> tuple[Command, ...]:
    """NIXL between two engines of half the cores each, and a proxy that asks one, then the other."""
    half = max(1, len(job.cores) // 2)
    ports = free_ports(5)
    connector = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})
    engines = []
    for name, cores, at in (("prefill", job.cores[:half], 0), ("decode", job.cores[half:] or job.cores[:half], 1)):
        variables = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[2 + at]),
            "UCX_TLS": "sm,tcp,self",
            "UCX_NET_DEVICES": "lo",
            NIXL_SLEEP_US: "100",
        }
        flags = ("--kv-transfer-config", connector)
        made = vllm_command(f"vllm-{name}", job, env, cores, ports[at], *flags, **variables)
        engines.append(Command(made.name, made.argv, made.port, made.env, worker_core=cores[0]))
    prefill, decode = engines
    program = (env.python, HERE / "vllm_proxy.py", "--port", str(ports[4]))
    argv = (*program, "--prefill", prefill.url, "--decode", decode.url)
    return (prefill, decode, Command("vllm-proxy", argv, ports[4]))


def openvino(job: Job, env: Environment) -> tuple[Command, ...]:
    """Weights, KV and arithmetic of the job's type."""
    (port,) = free_ports(1)
    argv = (
        *(env.python, HERE / "openvino_server.py", export_for_openvino(job, env), "--port", str(port)),
        *("--dtype", {"float32": "f32", "bfloat16": "bf16"}[job.dtype], "--threads", str(len(job.cores))),
        *("--max-running", "32", "--cache-gib", str(KV_GIB)),
    )
    return (Command("openvino", argv, port),)


def export_for_openvino(job: Job, env: Environment) -> Path:
    """OpenVINO's form of the model, made once. Raises CannotInstall."""
    target = env.folder / "models" / job.model.name
    if not (target / "openvino_detokenizer.bin").exists():
        env.run(env.python, HERE / "openvino_export.py", job.model, target)
        env.run(env.venv / "bin" / "convert_tokenizer", job.model, "--with-detokenizer", "-o", target)
    return target


def llama_cpp(job: Job, env: Environment) -> tuple[Command, ...]:
    (port,) = free_ports(1)
    threads = str(len(job.cores))
    argv = (
        *(env.folder / "build" / "bin" / "llama-server", "-m", job.model, "--alias", "m"),
        *("--host", LOOPBACK, "--port", str(port), "-t", threads, "-tb", threads),
        *("-np", str(job.concurrency), "-c", str(job.concurrency * min(job.context_len, 2048)), "-cb"),
    )
    return (Command("llama.cpp", argv, port),)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """One way to serve."""

    name: str
    launch: Launch
    peer: str | None = None
    """The environment it needs."""


SERVERS = (
    ServerKind("deltaserve", deltaserve_unified),
    ServerKind("deltaserve-threads", deltaserve_threads),
    ServerKind("deltaserve-pd", deltaserve_apart),
    ServerKind("vllm", vllm_unified, VLLM),
    ServerKind("vllm-pd", vllm_apart, VLLM),
    ServerKind("openvino", openvino, OPENVINO),
    ServerKind("llama.cpp", llama_cpp, LLAMA_CPP),
)


class RunningServer:
    """All processes of a server that is ready."""

    def __init__(self, url: str, ready_s: float, roots: Sequence[psutil.Process]) -> None:
        self.url = url
        self.ready_s = ready_s
        self._roots = roots

    def peak_rss_mib(self) -> float:
        """Sum over all its processes of the most that each had resident; what they share counts in each."""
        peaks = []
        for process in family(self._roots):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            peaks += [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
        return sum(peaks)


def family(roots: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for root in roots for process in (root, *root.children(recursive=True))]


@contextmanager
def running(kind: ServerKind, job: Job, env: Environment, logs: Path) -> Iterator[RunningServer]:
    """Ready when entered, ended afterwards. Raises CannotServe."""
    began = time.monotonic()
    try:
        commands = kind.launch(job, env)
    except CannotInstall as error:
        raise CannotServe(str(error)) from error
    with ExitStack() as stack:
        started = [stack.enter_context(started_process(command, job.cores, logs)) for command in commands]
        for command, process in zip(commands, started, strict=True):
            wait_ready(command, process, logs)
        roots = [psutil.Process(process.pid) for process in started]
        for command, root in zip(commands, roots, strict=True):
            if command.worker_core is not None:
                place_worker(root, command.worker_core)
        yield RunningServer(commands[-1].url, time.monotonic() - began, roots)


@contextmanager
def started_process(command: Command, cores: Sequence[int], logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """On these cores, in a session of its own, which is ended afterwards."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_PEERS}
    argv = ("taskset", "-c", ",".join(map(str, cores)), *map(str, command.argv))
    with log_of(command, logs).open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**inherited, **command.env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def log_of(command: Command, logs: Path) -> Path:
    return logs / f"{command.name}.log"


def end(process: subprocess.Popen[bytes]) -> None:
    """Asked to end, then whatever is left of its session is killed: compilers that it has started, too."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_ready(command: Command, process: subprocess.Popen[bytes], logs: Path) -> None:
    """Raises CannotServe."""
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(command.url + command.ready_path, timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    why = "is not ready" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise CannotServe(f"{command.name} {why}: {log_of(command, logs)}")


def place_worker(root: psutil.Process, core: int) -> None:
    """The main thread of vLLM's worker, where there is one of that title."""
    for process in family([root]):
        if any("VLLM::" in part and "Worker" in part for part in process.cmdline()):
            os.sched_setaffinity(process.pid, {core})
