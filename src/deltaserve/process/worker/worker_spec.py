"""What a worker process is told: one JSON file of plain, resolved values."""

from pathlib import Path

import msgspec

from deltaserve.compute.native.core_share import CoreShare
from deltaserve.control.engine.api import InstanceOptions
from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.branches import ATTENTION, DRAFTS, TRANSPORTS
from deltaserve.core.errors import ConfigError
from deltaserve.core.files.private_file import read_key
from deltaserve.core.ids import Role
from deltaserve.core.layout.dtype import DType
from deltaserve.core.quantization import Quantization
from deltaserve.core.rounding import Rounding
from deltaserve.model.drafts.draft_algorithm import OFF
from deltaserve.process.children.terminal import LogSpec
from deltaserve.settings.kv_events import KvEventsConfig
from deltaserve.transports.registry import TransportOptions, transport_kind


class RankNodes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines that share out the ranks of a worker, equally many on each, in order; or the members of an expert group,
    of which each is a node."""

    size: int
    node: int
    """This machine, 0 .. size - 1. Rank 0 is on that of node 0."""
    host: str
    port: int
    """Where the others find node 0."""
    own_host: str
    """IPv4 address of this machine at which its ranks meet those of the others."""


class ExpertSeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place of a worker in its expert group."""

    member: int
    size: int
    """Members 0 .. size - 1."""
    meeting_point: str = ""
    """A path that all of them have, in a folder of this user alone. Empty: they meet over the network."""
    nodes: RankNodes | None = None
    """Where members on several machines meet; None: all are on this one."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker. Written by the command line, which resolved and checked every value."""

    name: str
    """Unique in the cluster: `prefill-0`."""
    role: Role
    model_path: str
    device: str
    """`cpu` or `cuda:N`, of the first rank here; each further rank has the next GPU."""
    dtype: DType
    """Type of weights and activations."""
    quantization: Quantization = "none"
    """Which matrices are codes."""
    kv_dtype: DType
    state_dtype: DType = DType.FLOAT32
    """Type of recurrent states."""
    page_size: int
    """Tokens per page."""
    num_pages: tuple[int, ...]
    """Pages of each pool."""
    max_running_requests: int
    max_context_len: int
    """Most tokens of a request, prompt and output."""
    secret_path: str
    """File of the cluster secret: at least 32 bytes without surrounding white space."""
    model_overrides: str | None = None
    """JSON object that replaces keys of config.json."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port of worker links; 0 takes any."""
    curve: bool = False
    """Encrypt and authenticate worker links with keys derived from the cluster secret."""
    transport: str
    """What moves the pages. For the meaning of what follows see `TransportOptions`."""
    transport_folder: str = ""
    transport_tls: str = ""
    transport_devices: str = "lo"
    transport_host: str = "127.0.0.1"
    transport_fenced: str | None = None
    """Transports of which this site says that a destroyed endpoint is a fence, beside those known to be."""
    staging: StagingMode | None = None
    """Which transfers between unequal numbers of ranks go through staging memory. None: there is no such memory."""
    staging_bytes: int = 0
    """Staging memory of each rank."""
    cache_dir: str | None = None
    """Folder of the files under the tree, of which each rank has one; None: there are none."""
    cache_slots: tuple[int, ...] = ()
    """Pages of each pool in such a file. Empty beside a folder: it cannot be had any more."""
    cache_bytes: int = 0
    """Most that the files of all ranks take."""
    options: InstanceOptions = InstanceOptions()
    drain_grace_s: float = 30.0
    """After SIGTERM the worker ends at the latest then."""
    stuck_after_s: int = 10
    """Seconds without a turn of its loop after which the worker ends itself."""
    step_stuck_after_s: float = 600.0
    """When one step takes so long the worker ends itself."""
    tp_size: int = 1
    """Ranks: processes that hold the model and every page together."""
    nodes: RankNodes | None = None
    """Machines that they are on; None: all are on this one."""
    ep_size: int | None = None
    """Groups of ranks that hold their experts whole: see ExpertPlacement."""
    expert_seat: ExpertSeat | None = None
    """Place in an expert group; None: the worker has all experts."""
    num_threads: int = 1
    """Compute threads of a rank."""
    least_threads: int = 1
    """Threads of a rank that compute even where more would wait for cores."""
    core_share: CoreShare | None = None
    """Cores that the workers of this server divide, and lend each other. None: it has its own."""
    attention_backend: str = "auto"
    rounding: Rounding = Rounding.OF_QUERY
    graph_rows: int | None = None
    """Rows of the largest decode step that is recorded and replayed on a GPU, and tokens of one that the host draws
    for; None: none is."""
    drafts: str = OFF
    """Who guesses at the next tokens: `off`, or one of core/branches.py."""
    draft_path: str | None = None
    """Folder of a draft head; None: it is among the model's weights."""
    state_dir: str | None = None
    """Folder for what ranks need to meet while they run; None: where temporary files go."""
    kv_events: KvEventsConfig | None = None
    """Where others are told what enters and leaves the cache; None: nowhere."""
    log: LogSpec = LogSpec()

    def __post_init__(self) -> None:
        for name, value, words in (
            ("transport", self.transport, tuple(TRANSPORTS)),
            ("drafts", self.drafts, (OFF, *DRAFTS)),
            ("attention_backend", self.attention_backend, ("auto", *ATTENTION)),
        ):
            if value not in words:
                raise ValueError(f"{name} {value[:80]!r}: must be {', '.join(words)}")


def ranks_here(spec: WorkerSpec) -> range:
    """Ranks of the worker that are on this machine."""
    nodes = spec.nodes
    if nodes is None:
        return range(spec.tp_size)
    count = spec.tp_size // nodes.size
    return range(nodes.node * count, (nodes.node + 1) * count)


def transport_options(spec: WorkerSpec) -> TransportOptions:
    """How this worker's page transfers are set up."""
    fenced = frozenset(filter(None, (spec.transport_fenced or "").split(",")))
    devices, host = spec.transport_devices, spec.transport_host
    return TransportOptions(spec.transport_folder, spec.transport_tls, devices, host, fenced)


def worker_environment(spec: WorkerSpec) -> dict[str, str]:
    """What the environment of the process must hold before it starts: the libraries read it when they are loaded."""
    threads = str(spec.num_threads)
    return {
        **transport_kind(spec.transport).environment(transport_options(spec)),
        "NCCL_SOCKET_IFNAME": "lo",  # ranks of a worker are on one machine
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi, which told the free memory, counts so too
        # Where a process has no more threads than cores, torch's would spin after a product on cores that the native
        # library's need next.
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }


def encode_spec(spec: WorkerSpec) -> bytes:
    """The spec as `read_spec` reads it."""
    return msgspec.json.format(msgspec.json.encode(spec), indent=2)


def write_spec(spec: WorkerSpec, path: Path) -> None:
    """Write the spec as JSON, mode 0600."""
    path.touch(mode=0o600)
    path.write_bytes(encode_spec(spec))


def read_spec(path: Path) -> WorkerSpec:
    """Raises ConfigError naming the field that is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkerSpec)
    except OSError as error:
        raise ConfigError(f"worker spec {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"worker spec {path}: {error}") from None


def read_secret(spec: WorkerSpec) -> bytes:
    """The cluster secret. Raises ConfigError, which never shows it."""
    return read_key(Path(spec.secret_path), f"cluster secret {spec.secret_path}")
