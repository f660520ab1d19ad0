"""The image for CPUs, built with buildah by the lines of deploy/images/README.md, answers as its page starts it.

No registry and no daemon: the base is made of Debian's packages, and pip fetches the wheels before the build. The
process gets what `docker run` would give it by the page's line: a root file system that is read-only, a tmpfs, 64 MiB
of shared memory, the image's user without any capability. Its network is the machine's.
"""

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

import deltaserve
from tests.deploy.rendered import Json
from tests.deploy.test_images import extras_of
from tests.patience import PATIENCE_S, killed_if_late
from tests.ports import free_port
from tests.tools.built_wheel import PIP, ROOT, copy_tree

pytestmark = pytest.mark.slow

DEBIAN, PYTHON = "bookworm", "3.11"
INTO_CONTAINER = """
files=$1; tmpfs=$2; shift 2
mount --bind "$files" "$files"
mount -t proc proc "$files/proc"
mount --rbind /dev "$files/dev"
mount -t tmpfs -o size=64m,mode=1777 shm "$files/dev/shm"
mount -t tmpfs -o "${tmpfs#*:}" tmp "$files${tmpfs%%:*}"
while [ "$1" != -- ]; do mount --bind -o ro "$1" "$files$2"; shift 2; done
mount -o remount,ro,bind "$files"
exec chroot "$files" "${@:2}"
"""


def lines_of_page(start: str) -> list[list[str]]:
    """The commands of the block that begins so, as words."""
    block = (ROOT / "deploy" / "images" / "README.md").read_text().split(f"```\n{start}")[1].partition("```")[0]
    return [shlex.split(line) for line in (start + block).replace("\\\n", " ").splitlines()]


(RUN,) = lines_of_page("docker run --read-only ")
VOLUMES = [after.split(":")[1] for word, after in pairwise(RUN) if word == "-v"]


@dataclass(frozen=True, slots=True)
class Container:
    """The image's files, and what it says of its process."""

    files: Path
    config: Json

    def command(self, argv: Sequence[str] = (), entry: Sequence[str] = (), mounts: Sequence[Path] = ()) -> list[str]:
        """What starts `argv`, or the image's own, with `mounts` where the page's line has its volumes."""
        user, group = self.config["User"].split(":")
        volumes = [word for pair in zip(mounts, VOLUMES, strict=False) for word in map(str, pair)]
        into = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-ec", INTO_CONTAINER, "container"]
        process = ["env", "-i", "-C", self.config["WorkingDir"], *self.config["Env"], "setpriv", "--no-new-privs"]
        process += ["--reuid", user, "--regid", group, "--clear-groups", "--bounding-set=-all"]
        process += [*(entry or self.config["Entrypoint"]), *(argv or self.config["Cmd"])]
        return [*into, str(self.files), RUN[RUN.index("--tmpfs") + 1], *volumes, "--", *process]


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=cwd, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is built; gone afterwards, for it has 5 GB."""
    if not shutil.which("buildah") or not shutil.which("mmdebstrap"):
        pytest.skip("needs buildah and mmdebstrap: apt-get install buildah mmdebstrap")
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"]).returncode:
        pytest.skip("needs root, and leave to make namespaces of mounts and processes")
    made = tmp_path_factory.mktemp("image")
    yield made
    shutil.rmtree(made)


def make_context(folder: Path) -> Path:
    """The tree with a wheel in dist/, and beside it all wheels that it asks for."""
    torch = f"torch=={metadata.version('torch')}"
    download = [*PIP, "download", "-d", str(folder / "wheels"), "--only-binary=:all:", "--python-version", PYTHON]
    if "+cpu" not in torch or subprocess.run([*download, "--no-deps", torch]).returncode:
        pytest.skip("needs torch's build for CPUs, here and within the reach of pip: the other one has 5 GB more")
    copy_tree(folder / "tree")
    run(lines_of_page("make wheel\n")[0], folder / "tree")
    (wheel,) = (folder / "tree" / "dist").glob("*.whl")
    extras = ",".join(sorted(extras_of("Dockerfile.cpu")))
    run([*download, "-c", ROOT / "constraints.txt", torch, f"{wheel}[{extras}]"])
    return folder / "tree"


@pytest.fixture(scope="module")
def container(folder: Path) -> Container:
    context = make_context(folder)
    buildah = ["buildah", "--root", f"{folder}/store", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]
    base = run([*buildah, "from", "scratch"])
    debian = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,python3-venv", DEBIAN]
    if subprocess.run([*debian, run([*buildah, "mount", base])]).returncode:
        pytest.skip("needs Debian's packages within the reach of apt")
    run([*buildah, "commit", "--quiet", "--rm", base, "localhost/base"])
    (folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    options = ["--format=docker", "--isolation=chroot", "--build-arg=PYTHON_IMAGE=localhost/base"]
    options += [f"--volume={folder}/wheels:/wheels:ro", f"--volume={folder}/pip.conf:/etc/pip.conf:ro"]
    _, build, *words = lines_of_page("make wheel\n")[1]
    run([*buildah, build, *options, *words], context)
    image = words[words.index("-t") + 1]
    config = json.loads(run([*buildah, "inspect", "--type", "image", image]))["Docker"]["config"]
    files = Path(run([*buildah, "mount", run([*buildah, "from", image])]))
    (files / "model").mkdir()
    (files / "run/secrets").mkdir()
    (files / "run/secrets/api.keys").touch()
    return Container(files, config)


def test_it_says_what_it_is_and_may_write_to_tmp_alone(container: Container) -> None:
    assert run(container.command(["--version"])) == f"deltaserve {deltaserve.__version__}"
    assert " serve " in run(container.command())
    code = "import os; print(os.getuid(), *(at for at in ('/opt', '/run', '/tmp') if os.access(at, os.W_OK)))"
    assert run(container.command(["-c", code], ["python3"])) == "10001 /tmp"


def test_it_answers_as_its_page_starts_it(container: Container, tmp_path: Path) -> None:
    """The facts are a cycle: it is known what follows `ruga`."""
    key, port, keys = secrets.token_urlsafe(32), str(free_port()), tmp_path / "api.keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{key} team-a\n")
    os.chown(keys, 10001, 10001)
    words = [word.replace("0.0.0.0", "127.0.0.1") for word in RUN[RUN.index("deltaserve:cpu") + 1 :]]
    command = container.command([*words, "--port", port], mounts=[ROOT / "models" / "recall-micro", keys])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, killed_if_late(server):
        try:
            assert any("all processes are ready" in line for line in server.stdout or ()), "it ended"
            prompt = " rada ruga; tuto teva; buse make; teva rada; ruga buse; make tuto;? ruga"
            body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Authorization": f"Bearer {key}"}
            assert httpx.post(url, json=body, timeout=PATIENCE_S).status_code == 401
            answer = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
            assert answer.json()["choices"][0]["text"] == " buse make tuto teva rada ruga"
            run(container.command([port, str(free_port())], container.config["Healthcheck"]["Test"][1:]))
        finally:
            for process in psutil.Process(server.pid).children():
                process.terminate()
            server.communicate()
    assert server.returncode == 0
