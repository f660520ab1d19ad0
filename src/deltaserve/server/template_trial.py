"""A chat template tried in a process of its own: whatever it needs of time and memory, it does not take from a server.

The sandbox stops what it foresees, this what it does not: a step without an end, a compiler that runs out of stack.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from deltaserve.base.errors import ConfigError
from deltaserve.server.template import ChatTemplate

_MAX_WALL_S = 60.0
"""A template waits for nothing; only a machine under load needs more of the clock than of the CPU."""
_REFUSED = 2


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a template gets for one plain message."""

    cpu_s: int = 5
    num_bytes: int = 512 * 1024 * 1024
    """Of address space, more than the interpreter has before it begins."""


def try_template(
    source: str, control_tokens: Iterable[str], names: Mapping[str, str], allowance: Allowance | None = None
) -> None:
    """Raises ConfigError as ChatTemplate does, and for a template that hangs, or fills memory, or ends the process."""
    allowance = allowance or Allowance()
    texts = {"source": source, "control_tokens": list(control_tokens), "names": dict(names)}
    given = json.dumps({**texts, **asdict(allowance)})
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_MAX_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"chat template is not done after {_MAX_WALL_S:.0f} s with one plain message") from None
    if done.returncode == _REFUSED:
        raise ConfigError(str(json.loads(done.stdout)))
    if done.returncode == -signal.SIGXCPU:
        raise ConfigError(f"chat template needs more than {allowance.cpu_s} s for one plain message")
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise ConfigError(f"chat template ends the process that tries it: {said[:100]}")


def main() -> int:
    """The process: a template as JSON on stdin; the exit code, and on stdout what is wrong."""
    given = json.load(sys.stdin)
    _limit(resource.RLIMIT_AS, _address_bytes() + given["num_bytes"])
    _limit(resource.RLIMIT_CPU, given["cpu_s"])
    _limit(resource.RLIMIT_CORE, 0)
    try:
        ChatTemplate(given["source"], given["control_tokens"], given["names"])
    except ConfigError as error:
        print(json.dumps(str(error)[:500]))
        return _REFUSED
    return 0


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (soft, hard))


def _address_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
