"""What a worker of Dynamo is told on the command line, checked without Dynamo."""

from dataclasses import dataclass
from pathlib import Path

from deltaserve.core.errors import ConfigError, DeltaserveError

_NEEDED = ("config.json", "tokenizer.json")


class WorkerEnded(DeltaserveError):
    """Dynamo's runtime gave the worker up; the message is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How the worker registers."""

    model_path: Path
    """Folder from which Dynamo's frontend gets tokenizer and chat template."""
    namespace: str
    component: str
    discovery_backend: str
    request_plane: str
    event_plane: str | None
    chat_template: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    kv_events: tuple[str, ...]
    """Where a cache publishes what it holds."""
    kv_block_size: int | None
    grace_s: float
    """How long a stop waits for answers, at most."""


def model_folder(given: Path | None, of_server: str) -> Path:
    """The folder that is registered. Raises ConfigError where it is not one that Dynamo can read."""
    folder = Path(of_server) if given is None else given
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if not missing:
        return folder.absolute()
    whose = "" if given else ", which the server names"
    raise ConfigError(
        f"--model-path {str(folder)[:200]}{whose}: Dynamo makes tokens and text from a folder with "
        f"{' and '.join(_NEEDED)}; {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there"
    )
