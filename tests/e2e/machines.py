"""Machines of a network of their own, as network namespaces of this one: addresses, a switch, and links that can fail.

Namespaces are named by the process that made them. Whoever makes a network first removes those of processes that are
gone, with whatever still runs in them; what is started here ends with this process in any case.
"""

import ctypes
import itertools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import httpx

from tests.e2e.server import Process
from tests.patience import PATIENCE_S

_PREFIX = "dsnet"
_OURS = re.compile(rf"{_PREFIX}(\d+)-\w+")
_FOLDER = Path("/run/netns")
_DEVICE = "eth0"
_RANDOM = 0xFFFFF000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM, where classic BPF reads a random number."""
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NotPermittedError(Exception):
    """This machine lets nobody, or not this user, make network namespaces."""


def _ip(*argv: str, tool: str = "ip") -> str:
    done = subprocess.run([tool, *argv], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise OSError(f"{tool} {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ended."""

    code: int
    text: str
    """All it said."""


class Machine:
    """A namespace with one device besides `lo`: `eth0`, with one address."""

    def __init__(self, network: "Network", name: str, address: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self.namespace = f"{network.prefix}-{name}"
        self._hub = network.hub
        self._runs = itertools.count()
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        link = ("link", "add", "name", name, "type", "veth", "peer", "name", _DEVICE, "netns", self.namespace)
        _ip("-n", self._hub, *link)
        _ip("-n", self._hub, "link", "set", "dev", name, "master", "switch", "up")
        _ip("-n", self.namespace, "address", "add", f"{address}/24", "dev", _DEVICE)
        _ip("-n", self.namespace, "link", "set", _DEVICE, "up")

    def start(self, *argv: str, name: str) -> Process:
        """`deltaserve ARGV` there, in a folder of its own within the machine's."""
        return Process(self.folder / name, *argv, wrap=self.wrap(), cwd=self.folder)

    def wrap(self) -> Sequence[str]:
        """A program that becomes the command there, which ends with this thread."""
        return ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace)

    def run(self, *argv: str) -> "Ended":
        """`deltaserve ARGV` there, until it ends."""
        process = self.start(*argv, name=f"run-{next(self._runs)}")
        try:
            return Ended(process.popen.wait(PATIENCE_S), process.log())
        finally:
            process.kill()

    def listening(self) -> set[str]:
        """Addresses on which anything listens there."""
        return {line.split()[3].rpartition(":")[0] for line in self.do("ss", "-Hltn").splitlines()}

    def route_out(self) -> None:
        """Addresses elsewhere are asked for on the device; nobody answers."""
        _ip("-n", self.namespace, "route", "add", "default", "dev", _DEVICE)

    def do(self, *argv: str) -> str:
        """A command there, until it ends; what it says. What it starts stays. Raises OSError when it fails."""
        return _ip("netns", "exec", self.namespace, *argv)

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Both ends see at once that there is no link."""
        _ip("-n", self._hub, "link", "set", "dev", self.name, "down")
        try:
            yield
        finally:
            _ip("-n", self._hub, "link", "set", "dev", self.name, "up")

    @contextmanager
    def swallowed(self) -> Iterator[None]:
        """The switch forwards nothing from or to this machine, and nobody is told."""
        port = ("link", "set", "dev", self.name, "state")
        _ip("-n", self._hub, *port, "disabled", tool="bridge")
        try:
            yield
        finally:
            _ip("-n", self._hub, *port, "forwarding", tool="bridge")

    @contextmanager
    def far_away(self, delay: str, loss: str) -> Iterator[None]:
        """What it sends takes so long, and so much of it is lost. Raises NotPermittedError where the kernel cannot."""
        where = ("dev", _DEVICE, "root")
        try:
            _ip("-n", self.namespace, "qdisc", "add", *where, "netem", "delay", delay, "loss", loss, tool="tc")
        except OSError as error:
            raise NotPermittedError(str(error)) from None
        try:
            yield
        finally:
            _ip("-n", self.namespace, "qdisc", "del", *where, tool="tc")

    @contextmanager
    def dropping(self, what: "Unwanted | Unlucky") -> Iterator[None]:
        """Silently, of what arrives, as a firewall or a bad cable does."""
        where = ("dev", _DEVICE)
        _ip("-n", self.namespace, "qdisc", "add", *where, "clsact", tool="tc")
        try:
            program = ("protocol", "ip", "bpf", "bytecode", what.bytecode(), "da")
            _ip("-n", self.namespace, "filter", "add", *where, "ingress", *program, tool="tc")
            yield
        finally:
            _ip("-n", self.namespace, "qdisc", "del", *where, "clsact", tool="tc")


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Connections that one address begins, to some ports; those that begin here stand."""

    source: str
    first: int = 1
    last: int = 65535

    def bytecode(self) -> str:
        """Classic BPF for tc; offsets are those of an Ethernet frame."""
        source = int(ip_address(self.source))
        code = [
            "48 0 0 23",  # A = protocol
            "21 0 10 6",  # not TCP: last line
            "32 0 0 26",  # A = source
            f"21 0 8 {source}",
            "177 0 0 14",  # X = length of the IP header
            "80 0 0 27",  # A = flags
            "84 0 0 18",  # of which SYN and ACK
            "21 0 4 2",  # not SYN alone: last line
            "72 0 0 16",  # A = destination port
            f"53 0 2 {self.first}",  # below: last line
            f"37 1 0 {self.last}",  # above: last line
            "6 0 0 2",  # TC_ACT_SHOT
            "6 0 0 0",  # TC_ACT_OK
        ]
        return f"{len(code)}," + ",".join(code)


@dataclass(frozen=True, slots=True)
class Unlucky:
    """Any packet, with this probability."""

    share: float

    def bytecode(self) -> str:
        code = [
            f"32 0 0 {_RANDOM}",  # A = 32 random bits
            f"53 1 0 {int(self.share * 2**32)}",  # not below: last line
            "6 0 0 2",  # TC_ACT_SHOT
            "6 0 0 0",  # TC_ACT_OK
        ]
        return f"{len(code)}," + ",".join(code)


class Network:
    """A switch and the machines on it."""

    def __init__(self, folder: Path) -> None:
        """Raises NotPermittedError."""
        self.prefix = f"{_PREFIX}{os.getpid()}"
        self.hub = f"{self.prefix}-hub"
        self._folder = folder
        self._machines: list[Machine] = []
        try:
            remove_leftovers()
            _ip("netns", "add", self.hub)
            _ip("-n", self.hub, "link", "add", "name", "switch", "type", "bridge")
            _ip("-n", self.hub, "link", "set", "dev", "switch", "up")
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise NotPermittedError(str(error)) from None

    def add(self, name: str, address: str) -> Machine:
        machine = Machine(self, name, address, self._folder / name)
        machine.folder.mkdir()
        self._machines.append(machine)
        return machine

    def close(self) -> None:
        """Links go with their namespaces; an interface, an address or a process elsewhere was never there."""
        _remove(name for name in _names() if name.startswith(f"{self.prefix}-"))


def _names() -> list[str]:
    return sorted(path.name for path in _FOLDER.glob(f"{_PREFIX}*"))


def remove_leftovers() -> None:
    """Remove what processes left that are gone."""
    matches = filter(None, map(_OURS.fullmatch, _names()))
    _remove(match[0] for match in matches if not Path(f"/proc/{match[1]}").exists())


def _remove(names: Iterator[str]) -> None:
    for name in names:
        with suppress(OSError):  # another process may remove them at the same time
            for pid in _ip("netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name)


# ---------------------------------------------------------------- a client on one of the machines


class ClientOn(httpx.HTTPTransport):
    """Connections begin on that machine: a socket belongs for good to the namespace it was made in."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with _being_on(self._machine.namespace):
            return super().handle_request(request)


@contextmanager
def _being_on(namespace: str) -> Iterator[None]:
    """This thread, for as long as it lasts."""
    own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    there = os.open(_FOLDER / namespace, os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(own)
        os.close(own)
        os.close(there)


def _enter(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def commands_of(document: Path, heading: str) -> dict[str, Sequence[str]]:
    """The command lines of the section, without its subsections, that end with `# on ADDRESS`, or `# on ADDRESS:PORT`
    for a second one there: without comment and continuation, by `COMMAND ADDRESS`."""
    section = re.split(r"\n###? ", document.read_text().split(f"\n{heading}\n")[1])[0].replace("\\\n", " ")
    lines = re.findall(r"^(?:\.venv/bin/)?deltaserve (\w+) (.+?) +# on (\S+)$", section, re.MULTILINE)
    return {f"{command} {address}": rest.split() for command, rest, address in lines}
