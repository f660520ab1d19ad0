"""The exchanges of an expert group: every row arrives, of any number and size; whoever ends is missed at once."""

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.compute.collective.expert_group import ExpertMesh
from deltaserve.compute.collective.net_experts import NetExpertMesh
from deltaserve.compute.collective.net_meeting import NetMeeting
from deltaserve.compute.collective.rank_mesh import SLOT_BYTES
from deltaserve.core.layout.shard import Shard
from tests.compute.thread_ranks import expert_members, net_expert_members
from tests.patience import PATIENCE_S
from tests.ports import free_port

Mesh = ExpertMesh | NetExpertMesh
Kind = Callable[[int, float], Sequence[Mesh]]


@pytest.fixture(params=[expert_members, net_expert_members])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Over memory that all have mapped, or over TCP."""
    found: Kind = request.param
    return found


def together(meshes: Sequence[Mesh], work: Callable[[Mesh], object]) -> list[object]:
    with ThreadPoolExecutor(len(meshes)) as threads:
        return list(threads.map(work, meshes))


def part(source: int, target: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(10 * source + target)).to(torch.bfloat16)


SIZES = {
    "some": [[1, 2, 3], [4, 0, 5], [6, 7, 0]],
    "none": [[0, 0, 0]] * 3,
    "of one": [[0, 0, 0], [2, 1, 9], [0, 0, 0]],
    "large": [[9000, 40_000, 1], [1, 0, 90_000], [0, 3, 2]],
}
"""Rows that each sends to each; of 33 numbers of 2 bytes."""


@pytest.mark.parametrize("rows", SIZES.values(), ids=SIZES)
def test_every_row_arrives(kind: Kind, rows: list[list[int]]) -> None:
    def work(mesh: Mesh) -> bool:
        me = mesh.member.rank
        for _ in range(3):
            found = mesh.all_to_all([part(me, target, count, 33) for target, count in enumerate(rows[me])])
            if not all(torch.equal(got, part(src, me, rows[src][me], 33)) for src, got in enumerate(found)):
                return False
        return True

    assert max(map(sum, SIZES["large"])) * 66 > 5 * SLOT_BYTES
    assert together(kind(3, PATIENCE_S), work) == [True] * 3


def test_processes_meet_where_a_former_group_has_met(tmp_path: Path) -> None:
    def work(rank: int) -> list[Tensor]:
        mesh = ExpertMesh.join(Shard(rank, 3), tmp_path / "experts", PATIENCE_S)
        return mesh.all_to_all([part(rank, target, 2, 4) for target in range(3)])

    for _ in range(2):
        with ThreadPoolExecutor(3) as threads:
            for rank, found in enumerate(threads.map(work, range(3))):
                assert all(torch.equal(got, part(source, rank, 2, 4)) for source, got in enumerate(found))
        gc.collect()  # the sockets of that group are closed


def test_members_on_several_machines_meet() -> None:
    key, port = b"k" * 32, free_port()

    def work(rank: int) -> list[Tensor]:
        meeting = NetMeeting("127.0.0.1", port, "127.0.0.1", key)
        mesh = NetExpertMesh.join(Shard(rank, 3), meeting, PATIENCE_S)
        return mesh.all_to_all([part(rank, target, 2, 4) for target in range(3)])

    for _ in range(2):
        with ThreadPoolExecutor(3) as threads:
            for rank, found in enumerate(threads.map(work, range(3))):
                assert all(torch.equal(got, part(source, rank, 2, 4)) for source, got in enumerate(found))
        gc.collect()  # the sockets of that group are closed


def test_a_member_sees_that_a_round_has_begun(kind: Kind) -> None:
    first, second = kind(2, PATIENCE_S)
    assert not second.has_begun()
    with ThreadPoolExecutor(1) as thread:
        going_on = thread.submit(first.all_to_all, [part(0, target, 2, 4) for target in range(2)])
        while not second.has_begun():
            pass
        second.all_to_all([part(1, target, 1, 4) for target in range(2)])
        assert torch.equal(going_on.result()[1], part(1, 0, 1, 4))
    assert not second.has_begun()


def test_members_end_when_all_are_done(kind: Kind) -> None:
    """Until then one that is done takes part in what the others compute."""
    first, second = kind(2, PATIENCE_S)
    first.say_done()
    assert not second.has_begun()
    assert not first.is_over
    rows = [part(0, target, 2, 4) for target in range(2)]
    together((first, second), lambda mesh: mesh.all_to_all(rows))
    second.say_done()
    assert second.is_over
    assert not first.has_begun()
    assert first.is_over
    del second
    gc.collect()
    assert not first.has_begun()


def test_one_that_is_done_in_the_middle_of_an_exchange(kind: Kind) -> None:
    first, second = kind(2, PATIENCE_S)
    first.say_done()
    rows = [part(0, target, 2, 4) for target in range(2)]
    together((first, second), lambda mesh: mesh.all_to_all(rows))
    assert not second.is_over
    second.say_done()
    assert second.is_over


@pytest.mark.parametrize("is_done", [False, True])
def test_one_that_ends_is_missed_at_once(kind: Kind, is_done: bool) -> None:
    """One that is done still holds experts."""
    first, second, third = kind(3, PATIENCE_S)
    if is_done:
        third.say_done()
    del third
    gc.collect()
    for mesh in (first, second):
        with pytest.raises(CollectiveError, match="member 2 of the expert group has ended"):
            mesh.has_begun()
        with pytest.raises(CollectiveError, match="member 2 of the expert group has ended"):
            mesh.all_to_all([part(0, target, 2, 4) for target in range(3)])


def test_one_that_does_not_come_is_not_waited_for_for_ever(kind: Kind) -> None:
    first, second = kind(2, 0.2)
    with pytest.raises(CollectiveError, match="member 1 of the expert group did not come in time"):
        first.all_to_all([part(0, target, 2, 4) for target in range(2)])
    with pytest.raises(CollectiveError, match="not all of them met within 0"):
        ExpertMesh.join(Shard(1, 2), Path("/nowhere/experts"), 0.2)
    assert second.member == Shard(1, 2)


def test_members_that_compute_other_layers_are_found_out(kind: Kind) -> None:
    first, second = kind(2, PATIENCE_S)
    rows = [part(0, target, 2, 4) for target in range(2)]
    together((first, second), lambda mesh: mesh.all_to_all(rows))
    second._number += 1

    def work(mesh: Mesh) -> str:
        try:
            mesh.all_to_all(rows)
        except CollectiveError as error:
            return str(error)
        return ""

    for of_peer, said in enumerate(reversed(together((first, second), work))):
        assert said == f"member {of_peer} of the expert group does not compute the same layers"


def test_members_that_load_are_waited_for_longer_than_a_step(kind: Kind) -> None:
    first, second = kind(2, 0.2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.wait_for_all)
        time.sleep(0.5)
        assert not waiting.done()
        second.wait_for_all()
        waiting.result()
    with pytest.raises(CollectiveError, match="did not come in time"):
        first.all_to_all([part(0, target, 2, 4) for target in range(2)])
