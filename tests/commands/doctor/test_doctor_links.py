"""What `doctor` says of workers elsewhere, and of the command line of one that would run here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaserve.cli.main import main
from deltaserve.commands.doctor.links import link_fault
from deltaserve.process.links.links import Links
from deltaserve.process.links.security import LinkSecurity
from tests.ports import free_port

SECURITY = LinkSecurity.from_cluster_key(b"k" * 40)


@pytest.fixture
def member() -> Iterator[str]:
    """Where a worker of the cluster listens."""
    links = Links(SECURITY)
    yield f"127.0.0.1:{links.listen('127.0.0.1', 0)}"
    links.close()


def test_a_member_of_the_cluster_is_known_by_its_key(member: str) -> None:
    assert link_fault(member, SECURITY) is None
    fault = link_fault(member, LinkSecurity.from_cluster_key(b"x" * 40))
    assert fault is not None
    assert "another cluster key" in fault


def test_nobody_is_there() -> None:
    assert "nobody listens there" in (link_fault(f"127.0.0.1:{free_port()}", SECURITY) or "")


def key_file(folder: Path) -> str:
    path = folder / "cluster.key"
    path.touch(mode=0o600)
    path.write_text("k" * 40)
    return str(path)


def test_the_line_of_a_worker(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    line = [str(tiny_models / "llama"), "--cluster-key-file", key_file(tmp_path), "--num-pages", "100"]
    assert main(["doctor", "prefill", *line, "--disaggregation-bootstrap-port", port]) == 0
    out = capsys.readouterr().out
    for text in ("settings      cpu, weights float32", f"listener      127.0.0.1:{port}: links", "transfer      nixl"):
        assert f"ok    {text}" in out
    assert main(["doctor", "decode", *line, "--host", "0.0.0.0"]) == 1
    assert "fail  settings      --host 0.0.0.0: nobody can dial that" in capsys.readouterr().out


def test_the_lines_of_a_worker_on_two_machines(
    tiny_models: Path, tmp_path: Path, member: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(tiny_models / "llama"), "--cluster-key-file", key_file(tmp_path), "--num-pages", "100"]
    line += ["--tp-size", "2", "--nnodes", "2", "--disaggregation-bootstrap-port", str(free_port())]
    at = f"127.0.0.1:{free_port()}"
    assert main(["doctor", "decode", *line, "--dist-init-addr", at]) == 0
    out = capsys.readouterr().out
    assert f"ok    listener      {at}: 1 other machine of this worker" in out
    assert "ok    listener      any free port of 127.0.0.1: ranks on other machines of this worker" in out
    assert main(["doctor", "decode", *line, "--dist-init-addr", at, "--node-rank", "1"]) == 0
    out = capsys.readouterr().out
    assert f"warn  link          node 0 at {at}: nobody listens there" in out
    assert "links of this worker" not in out
    assert main(["doctor", "decode", *line, "--dist-init-addr", member, "--node-rank", "1"]) == 0
    assert f"ok    link          node 0 at {member}: listens, and has this cluster key" in capsys.readouterr().out


def test_the_lines_of_the_members_of_an_expert_group(
    tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = f"127.0.0.1:{free_port()}"
    line = [str(tiny_models / "qwen3_moe"), "--cluster-key-file", key_file(tmp_path), "--num-pages", "100"]
    line += ["--dp-size", "2", "--enable-dp-attention", "--nnodes", "2", "--dist-init-addr", at]
    for role in ("prefill", "decode"):
        port = ["--disaggregation-bootstrap-port", str(free_port())]
        assert main(["doctor", role, *line, *port]) == 0
        assert f"ok    listener      {at}: 1 other member of its expert group" in capsys.readouterr().out
        assert main(["doctor", role, *line, *port, "--node-rank", "1"]) == 0
        out = capsys.readouterr().out
        assert "listener      any free port of 127.0.0.1: other members of its expert group" in out
        assert f"listener      127.0.0.1:{port[1]}: links of this worker" in out


def test_the_line_of_a_router(
    tiny_models: Path, tmp_path: Path, member: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(tiny_models / "llama"), "--cluster-key-file", key_file(tmp_path), "--port", str(free_port())]
    gone = f"127.0.0.1:{free_port()}"
    assert main(["doctor", "router", *line, "--workers", f"decode@{member}"]) == 0
    assert f"ok    link          decode-{member}: listens, and has this cluster key" in capsys.readouterr().out
    assert main(["doctor", "router", *line, "--workers", f"decode@{member},prefill@{gone}"]) == 1
    assert f"fail  link          prefill-{gone}: nobody listens there" in capsys.readouterr().out


def test_the_lists_of_a_router(
    tiny_models: Path, tmp_path: Path, member: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is listed now is dialled as well; a list that cannot be read is told."""
    line = [str(tiny_models / "llama"), "--cluster-key-file", key_file(tmp_path), "--port", str(free_port())]
    listed = tmp_path / "workers"
    listed.write_text(f"d0=decode@{member}  # the first\n")
    by_name = f"decode@{member.replace('127.0.0.1', 'localhost')}"
    assert main(["doctor", "router", *line, "--workers-file", str(listed), "--workers-dns", by_name]) == 0
    out = capsys.readouterr().out
    assert f"--workers-file {listed}: workers: d0" in out
    for name in ("d0", f"decode-{member}"):
        assert f"ok    link          {name}: listens, and has this cluster key" in out
    listed.write_text(f"decode@{member},")
    (tmp_path / "wrong").write_text("somebody")
    assert main(["doctor", "router", *line, "--workers-file", str(tmp_path / "wrong")]) == 1
    assert (
        f"fail  settings      --workers-file {tmp_path / 'wrong'}: 'somebody' is no worker" in capsys.readouterr().out
    )
    assert main(["doctor", "router", *line, "--workers-file", str(tmp_path / "nothing")]) == 1
    assert "nothing: No such file or directory" in capsys.readouterr().out
