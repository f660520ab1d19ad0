"""What `serve` writes for the processes it starts."""

from pathlib import Path

import msgspec

from deltaserve.base.config import Settings
from deltaserve.cli.front_process import FrontSpec
from deltaserve.cli.serve import compose
from deltaserve.engine.worker_spec import read_spec
from tests.ports import free_port


def test_no_worker_is_told_where_to_listen_and_the_front_not_where_to_look(tiny_models: Path, tmp_path: Path) -> None:
    """A port chosen before its owner listens there may be given to somebody else meanwhile."""
    settings = {
        "model": {"model_path": str(tiny_models / "llama"), "device": "cpu"},
        "network": {"port": free_port()},
        "disaggregation": {"prefill": 2},
    }
    cluster = compose(Settings.model_validate(settings), tmp_path)
    front = msgspec.json.decode((tmp_path / "front.json").read_bytes(), type=FrontSpec)
    names = ["prefill-0", "prefill-1", "decode-0"]
    assert [child.name for child in cluster.children] == [*names, "front"]
    assert [(worker.name, worker.url) for worker in front.workers] == [(name, None) for name in names]
    assert {read_spec(tmp_path / f"{name}.json").port for name in names} == {0}
