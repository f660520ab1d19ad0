"""The import law and the sizes, read from the sources with `ast`.

A package imports lower floors only, never a sibling; imports stand at the top of a file, so every arrow is seen.
Pure packages hold decisions and accounting: no torch, I/O, threads, clocks, environment or randomness.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PACKAGE = "deltaserve"

FLOORS = {
    0: ("core",),
    1: ("control", "model", "settings", "transports"),
    2: ("compute", "server", "sim"),
    3: ("process",),
    4: ("launch",),
    5: ("cli", "commands"),
    6: ("__main__",),  # `python -m deltaserve`
}
FLOOR_OF = {package: floor for floor, packages in FLOORS.items() for package in packages}
MAX_PACKAGES = 12

ROOMS = {
    "core": (("",), ("layout", "wire", "files")),
    "control": (("cache",), ("sched", "peer", "transfer"), ("engine", "front")),
    "settings": (("",), ("flags",)),
    "process": (("children",), ("links",), ("worker", "front")),
}
"""package -> its folders, floor above floor as the packages are; "" is the package's own files. In the other packages a
folder is a branch, and the package's own files name their branches: there only cycles of files are forbidden."""

BRANCHES = ("transports/", "commands/", "compute/attention", "server/text.answers", "launch/clusters.")
"""Packages, and rooms, whose folders are branches of one kind: their files may bear the same names, which the folder
explains."""

HALVES = "layers"
"""Folder of model and of compute: a kind of layers has a file of one name in each, without torch and with it."""

PURE_PACKAGES = {"core", "control", "settings", "sim"}
IMPURE_ROOMS = {"core.files", "settings.flags"}
"""Below a pure package: what opens files, or reads the command line."""
PURE_STDLIB = (
    "__future__ abc array bisect collections copy dataclasses difflib enum fractions functools hashlib heapq "
    "ipaddress itertools json math numbers operator re statistics string struct sys textwrap types typing zlib"
)
PURE_MAY_IMPORT = {*PURE_STDLIB.split(), "msgspec", "numpy", "pydantic", "xxhash"}
PURE_MAY_USE_OF_SYS = {"byteorder", "maxsize", "float_info"}
IMPURE_BUILTINS = {"open", "print", "input", "breakpoint"}
DUCK_TYPING = {"getattr", "hasattr", "setattr", "delattr", "vars"}

VENDOR_FILES = {
    "nixl": "nixl",
    "nixl_cu12": "nixl",
    "mooncake": "mooncake",
    "triton": "triton",
    "flashinfer": "flashinfer",
    "zmq": "link",
    "ray": "ray",
    "dynamo": "dynamo",
}
"""Vendor library -> word that must occur in the module name that imports it."""
RUN_TIME_IMPORTS = {"__import__", "import_module", "importlib.import_module"}
LAZY_IMPORTS: dict[str, str] = {
    "deltaserve.core.files.branch_code": "a branch is imported by the name in its line when it is asked for",
    "deltaserve.compute.attention.attention_choice": "what a backend computes with is optional, and asks once imported",
    "deltaserve.compute.layers.ops_choice": "Triton is optional, and only a GPU's operators need it",
    "deltaserve.compute.executor.draws_choice": "Triton is optional, and draws on GPUs only",
    "deltaserve.commands.dynamo.command": "Dynamo is optional, and the server is asked first",
    "deltaserve.commands.bench.sweep_chart": "matplotlib is optional, and only a sweep that draws needs it",
    "deltaserve.transports.local.kind": "torch and Triton are loaded where pages of a GPU move: nobody else needs them",
    "deltaserve.transports.nixl.library": "which of NIXL's builds fits depends on torch's",
    "deltaserve.transports.nixl.kind": "NIXL is loaded where pages move by it: nobody else needs that library",
    "deltaserve.cli.dispatch": "the command named on the command line is imported alone: --help must not load torch",
    "deltaserve.commands.verify.verify": "transformers is optional and slow to import: the server is asked first",
    "deltaserve.cli.main": "Ctrl-C must be handled before pydantic is imported",
    "deltaserve.process.worker.worker": "Ctrl-C must be handled before torch is imported",
    "deltaserve.process.worker.worker_forks": "Ctrl-C must be handled before torch is imported",
    "deltaserve.process.front.front_process": "OpenTelemetry is imported only by those who send traces",
    "deltaserve.process.worker.rank": "Ctrl-C must be handled before torch is imported",
    "deltaserve.process.worker.node": "Ctrl-C must be handled before the rest is imported",
}
"""Modules that may import by name at run time, with the reason. In-function import statements: none."""

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7


@dataclass(frozen=True, slots=True)
class Module:
    """One source file, parsed."""

    name: str
    """Dotted; a package's `__init__` bears the package's name."""
    tree: ast.Module
    is_init: bool = False

    @property
    def package(self) -> str | None:
        """`sched` for `deltaserve.control.sched.plan`; None for the root package itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else None

    @property
    def room(self) -> str:
        """The folder below its package: `sched` for `deltaserve.control.sched.plan`; empty: the package's own files."""
        parts = self.name.split(".")
        return ".".join(parts[2:] if self.is_init else parts[2:-1])

    @property
    def is_pure(self) -> bool:
        return self.package in PURE_PACKAGES and f"{self.package}.{self.room}" not in IMPURE_ROOMS


def read_modules() -> list[Module]:
    modules = []
    for path in sorted((SRC / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        is_init = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_init else parts)
        modules.append(Module(name, ast.parse(path.read_text(), str(path)), is_init))
    return modules


MODULES = read_modules()
NAMES = {module.name for module in MODULES}


def module_of(source: str, name: str = "deltaserve.control.sched.sample") -> Module:
    """A module that is not on disk: the laws are tried on it."""
    return Module(name, ast.parse(source))


# ---------------------------------------------------------------- what a module imports


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported anywhere in the file; `from a import b` gives a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + (1 if module.is_init else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def internal_imports(module: Module) -> Iterator[tuple[str, int]]:
    """Modules of this project that it imports: the longest known prefix of each imported name."""
    for name, line in imports(module):
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        if len(parts) == 1 or (parts[1] not in FLOOR_OF and f"{PACKAGE}.{parts[1]}" not in NAMES):
            yield PACKAGE, line
            continue
        known = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
        yield next((candidate for candidate in known if candidate in NAMES), name), line


# ---------------------------------------------------------------- the laws: each returns its breaches, in words


def floor_breaches(module: Module) -> list[str]:
    package = module.package
    if package is not None and package not in FLOOR_OF:
        return [f"{module.name}: package {package!r} stands on no floor; add it to FLOORS"]
    breaches = []
    for target, line in internal_imports(module):
        other = target.split(".")[1] if "." in target else None
        if other is None or other == package:
            continue
        where = f"{module.name}:{line} imports {target}"
        if package is None:
            breaches.append(f"{where}: the root package imports nothing")
        elif FLOOR_OF.get(other, 99) >= FLOOR_OF[package]:
            breaches.append(f"{where}: floor {FLOOR_OF.get(other)} from floor {FLOOR_OF[package]}")
    return breaches


def room_breaches(module: Module) -> list[str]:
    """Within a package whose folders stand on floors of their own."""
    floors = ROOMS.get(module.package or "")
    if floors is None or (module.is_init and not module.room):
        return []
    floor_of = {room: floor for floor, rooms in enumerate(floors) for room in rooms}
    if module.room not in floor_of:
        return [f"{module.name}: folder {module.room!r} stands on no floor; add it to ROOMS"]
    breaches = []
    for target, line in internal_imports(module):
        parts = target.split(".")
        if len(parts) < 3 or parts[1] != module.package:
            continue
        other = parts[2] if parts[2] in floor_of else ""
        if other != module.room and floor_of[other] >= floor_of[module.room]:
            breaches.append(f"{module.name}:{line} imports {target}: a lower folder's business only")
    return breaches


def hidden_import_breaches(module: Module) -> list[str]:
    breaches = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom))
            breaches += [f"{module.name}:{child.lineno} import inside {node.name}()" for child in inner]
        elif isinstance(node, ast.Name | ast.Attribute) and name_of(node).endswith("TYPE_CHECKING"):
            breaches.append(f"{module.name}:{node.lineno} TYPE_CHECKING hides an arrow")
        elif isinstance(node, ast.Call) and name_of(node.func) in RUN_TIME_IMPORTS and module.name not in LAZY_IMPORTS:
            breaches.append(f"{module.name}:{node.lineno} import by name at run time")
    return breaches


def vendor_breaches(module: Module) -> list[str]:
    return [
        f"{module.name}:{line} imports {name}: only a module named *{VENDOR_FILES[name.split('.')[0]]}* may"
        for name, line in imports(module)
        if name.split(".")[0] in VENDOR_FILES and VENDOR_FILES[name.split(".")[0]] not in module.name
    ]


def socket_breaches(module: Module) -> list[str]:
    """ZeroMQ's sockets are made by `new_socket`: one without its linger time may never let its context end."""
    if module.name == f"{PACKAGE}.process.links.ends":
        return []
    calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    names = ((name_of(call.func), call.lineno) for call in calls)
    return [
        f"{module.name}:{line} calls {name}: new_socket makes them"
        for name, line in names
        if name.endswith(".socket") and name != "socket.socket"
    ]


def purity_breaches(module: Module) -> list[str]:
    if not module.is_pure:
        return []
    breaches = [
        f"{module.name}:{line} imports {name}: not on the list of a pure package"
        for name, line in imports(module)
        if name.split(".")[0] not in PURE_MAY_IMPORT | {PACKAGE}
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and name_of(node.func) in IMPURE_BUILTINS:
            breaches.append(f"{module.name}:{node.lineno} calls {name_of(node.func)}()")
        if isinstance(node, ast.Attribute) and name_of(node.value) == "sys" and node.attr not in PURE_MAY_USE_OF_SYS:
            breaches.append(f"{module.name}:{node.lineno} uses sys.{node.attr}")
    return breaches


def duck_typing_breaches(module: Module) -> list[str]:
    if not module.is_pure:
        return []
    calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return [
        f"{module.name}:{call.lineno} calls {name_of(call.func)}()"
        for call in calls
        if name_of(call.func) in DUCK_TYPING or name_of(call.func).endswith("__setattr__")
    ]


def global_state_breaches(module: Module) -> list[str]:
    nodes = (node for node in ast.walk(module.tree) if isinstance(node, ast.Global))
    return [f"{module.name}:{node.lineno} global {', '.join(node.names)}" for node in nodes]


def planting_breaches(module: Module) -> list[str]:
    """Fields that an object of `control` sets on another one: calls upward that no import shows.

    A constructor sets fields of `self` only. Elsewhere a record that was handed in may be changed, but not what `self`
    is made of (each part changes its own fields), and nobody is given `self` or one of its methods.
    """
    if module.package != "control":
        return []
    classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef)]
    return [
        f"{module.name}:{target.lineno} {method.name}() sets {ast.unparse(target)}"
        for owner in classes
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
        for target, value in assigned_fields(method)
        if is_planted(target, value, method.name, {m.name for m in owner.body if isinstance(m, ast.FunctionDef)})
    ]


def assigned_fields(function: ast.FunctionDef) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """(`a.b` that is assigned to, the value; None where several are assigned at once)."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute):
                yield target, node.value
            elif isinstance(target, ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
                pairs = zip(target.elts, values, strict=False)
                yield from ((each, value) for each, value in pairs if isinstance(each, ast.Attribute))


def is_planted(target: ast.Attribute, value: ast.expr | None, method: str, methods: set[str]) -> bool:
    base = ast.unparse(target.value)
    if base == "self":
        return False
    is_self = isinstance(value, ast.Name) and value.id == "self"
    is_method = isinstance(value, ast.Attribute) and name_of(value.value) == "self" and value.attr in methods
    is_part = name_of(target.value).startswith("self.")  # not a record of a collection that it keeps
    return method in ("__init__", "__post_init__") or is_part or is_self or is_method


def shared_names(modules: Sequence[Module]) -> set[str]:
    """Names of classes and files of more than one folder: whoever reads one must first find out which is meant."""
    owners: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        folder = f"{module.package}/{module.room}"
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].add(folder)
        if not module.is_init and not folder.startswith(BRANCHES) and module.room != HALVES:
            owners[module.name.rpartition(".")[2] + ".py"].add(folder)
    return {name for name, packages in owners.items() if len(packages) > 1}


def size_breaches(name: str, tree: ast.Module) -> list[str]:
    breaches: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{name}:{node.lineno} {node.name}()"
        first = node.body[0].lineno if is_kernel(node) else node.lineno  # a kernel's arguments are a list of its own
        length = (node.end_lineno or first) - first + 1
        if length > MAX_FUNCTION_LINES:
            breaches.append(f"{where}: {length} lines, at most {MAX_FUNCTION_LINES}")
        if num_parameters(node) > MAX_PARAMETERS and not is_kernel(node):
            breaches.append(f"{where}: {num_parameters(node)} parameters, at most {MAX_PARAMETERS}")
    return breaches


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    positional = [*node.args.posonlyargs, *node.args.args]
    own = positional[1:] if positional and positional[0].arg in ("self", "cls") else positional
    return len(own) + len(node.args.kwonlyargs)


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


def name_of(node: ast.expr) -> str:
    """`a.b.c` of a chain of names; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = name_of(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Some cycle of the graph as a path that ends where it starts, or None."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for target in sorted(graph.get(name, ())):
            if cycle := visit(target, [*path, name]):
                return cycle
        done.add(name)
        return None

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), None)


# ---------------------------------------------------------------- the laws hold

LAWS = (
    floor_breaches,
    room_breaches,
    hidden_import_breaches,
    vendor_breaches,
    socket_breaches,
    purity_breaches,
    duck_typing_breaches,
    global_state_breaches,
    planting_breaches,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removesuffix("_breaches"))
def test_law(law: Callable[[Module], list[str]]) -> None:
    breaches = [breach for module in MODULES for breach in law(module)]
    assert not breaches, "\n" + "\n".join(breaches)


def test_few_packages() -> None:
    packages = {module.package for module in MODULES if module.is_init} - {None}
    assert len(packages) <= MAX_PACKAGES, sorted(map(str, packages))


def test_no_import_cycles() -> None:
    graph = {module.name: {target for target, _ in internal_imports(module)} - {module.name} for module in MODULES}
    cycle = find_cycle(graph)
    assert cycle is None, " -> ".join(cycle or [])


def test_names_are_unique_across_folders() -> None:
    assert shared_names(MODULES) == set()


def test_sizes() -> None:
    breaches = []
    for folder in ("src", "tests", "scripts", "benchmarks", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            breaches += size_breaches(str(path.relative_to(ROOT)), ast.parse(text))
    assert not breaches, "\n" + "\n".join(breaches)


def test_every_package_says_its_one_job() -> None:
    silent = [m.name for m in MODULES if m.is_init and not (ast.get_docstring(m.tree) or "").strip()]
    without_init = [
        str(folder.relative_to(ROOT))
        for folder in {path.parent for path in (SRC / PACKAGE).rglob("*.py")}
        if not (folder / "__init__.py").exists()
    ]
    assert not silent + without_init


# ---------------------------------------------------------------- the laws bite


@pytest.mark.parametrize(
    ("law", "source"),
    [
        (floor_breaches, "from deltaserve.process.worker import rank"),
        (floor_breaches, "from deltaserve.transports.local.transport import LocalTransport"),
        (room_breaches, "from deltaserve.control.transfer.sender import Sender"),
        (room_breaches, "from deltaserve.control.engine.api import Report"),
        (floor_breaches, "if X:\n    import deltaserve.cli.main"),
        (hidden_import_breaches, "def f():\n    import json"),
        (hidden_import_breaches, "import typing\nif typing.TYPE_CHECKING:\n    import json"),
        (hidden_import_breaches, "import importlib\nimportlib.import_module('torch')"),
        (vendor_breaches, "import nixl._api"),
        (socket_breaches, "class A:\n    def f(self):\n        self._context.socket(zmq.DEALER)"),
        (purity_breaches, "import torch.nn"),
        (purity_breaches, "from time import monotonic"),
        (purity_breaches, "import sys\nsys.exit(1)"),
        (purity_breaches, "print(1)"),
        (duck_typing_breaches, "getattr(x, 'y')"),
        (duck_typing_breaches, "object.__setattr__(x, 'y', 1)"),
        (global_state_breaches, "def f():\n    global X\n    X = 1"),
        (planting_breaches, "class A:\n    def __init__(self, b):\n        b.waiting.owner = None"),
        (planting_breaches, "class A:\n    def __init__(self, b):\n        self.b, b.x = b, 1"),
        (planting_breaches, "class A:\n    def f(self):\n        self.b.x += 1"),
        (planting_breaches, "class A:\n    def f(self, b):\n        b.on_over = self.f"),
        (planting_breaches, "class A:\n    def f(self, b):\n        b.c.owner, b.x = self, 1"),
    ],
)
def test_law_bites(law: Callable[[Module], list[str]], source: str) -> None:
    assert law(module_of(source))


def test_own_fields_and_records_may_be_set() -> None:
    source = (
        "class A:\n    def __init__(self, b):\n        self.b = b\n    def f(self, room):\n        room.end = self.b"
    )
    assert planting_breaches(module_of(source)) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_shared_names_are_found() -> None:
    here = module_of("class Row: ...", "deltaserve.control.sched.sample")
    assert shared_names([here, module_of("class Row: ...", "deltaserve.control.sched.other")]) == set()
    assert shared_names([here, module_of("class Row: ...", "deltaserve.cli.sample")]) == {"Row", "sample.py"}
    branch = module_of("class Grid: ...", "deltaserve.transports.tin.sample")
    assert shared_names([here, branch]) == set(), "in a folder of branches"


def test_sizes_bite() -> None:
    long_function = "def f(a, b, c, d, e, f, g, h):\n" + "    x = 1\n" * 60
    assert len(size_breaches("x.py", ast.parse(long_function))) == 2
