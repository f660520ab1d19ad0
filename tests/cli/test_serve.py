"""What `serve` writes for the processes it starts."""

from pathlib import Path

import msgspec

from deltaserve.base.config import Settings
from deltaserve.cli.front_process import FrontSpec
from deltaserve.cli.serve import compose, prepare, tell_resolved
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


def test_a_pool_that_shortens_the_context_is_warned_of_with_both_lengths(tiny_models: Path) -> None:
    said: list[str] = []
    settings = Settings.model_validate(
        {
            "model": {"model_path": str(tiny_models / "llama"), "device": "cpu"},
            "memory": {"num_pages": 4, "page_size": 16},
        }
    )
    resolved = prepare(settings).resolved
    tell_resolved(resolved, lambda line: said.append(str(line)))
    assert said[-1].startswith(f"warning: context 64 instead of the model's {resolved.shortened_from}: 4 pages of 16")
    said.clear()
    enough = settings.model_copy(update={"memory": settings.memory.model_copy(update={"num_pages": 4096})})
    tell_resolved(prepare(enough).resolved, lambda line: said.append(str(line)))
    assert len(said) == 1
