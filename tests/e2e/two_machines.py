"""Workers of which each is on two machines, or two of a kind on one each, started by lines of docs/operations.md."""

from collections.abc import Sequence
from pathlib import Path

from tests.e2e.machines import Network, commands_of
from tests.e2e.server import wait_until
from tests.e2e.test_namespaces import CHECKED, DOCUMENT, ROLES, Cluster

SECOND = {"prefill": "10.0.0.5", "decode": "10.0.0.6"}
"""Role |-> address of its other machine."""


def second_of(role: str) -> str:
    """Name of that machine."""
    return f"{role}-1"


class TwoMachines(Cluster):
    """The lines of one section, which has them for one role, serve others as well."""

    def __init__(
        self, network: Network, model: Path, folder: Path, section: tuple[str, str], roles: Sequence[str]
    ) -> None:
        """`section`: its heading, and the role of its lines. `roles`: those that have two machines."""
        super().__init__(network, model, folder, {}, {second_of(role): SECOND[role] for role in roles})
        heading, self._written_for = section
        self._lines = commands_of(DOCUMENT, heading)
        self.roles = roles

    def argv(self, name: str) -> list[str]:
        role, _, second = name.partition("-")
        if role not in self.roles:
            return super().argv(role)
        of = self._written_for
        words = self._lines[f"{of} {SECOND[of] if second else ROLES[of]}"]
        own = {"MODEL": str(self.model_path), SECOND[of]: SECOND[role], ROLES[of]: ROLES[role]}
        own[f"{ROLES[of]}:5000"] = f"{ROLES[role]}:5000"
        return [role, *(own.get(word, word) for word in words), *CHECKED]

    def start_all(self) -> None:
        for name in (*ROLES, *map(second_of, self.roles)):
            self.start(name)
        wait_until(self.are_all_ready, "readiness", self.processes["router"])

    def are_all_ready(self) -> bool:
        """Whether every worker that the router knows takes requests."""
        return self.is_ready() and all(worker["state"] == "ready" for worker in self.workers().values())

    def check_listening(self) -> None:
        """Nothing listens but on the address of its machine."""
        for role in self.roles:
            assert self.machines[role].listening() == {ROLES[role]}
            assert self.machines[second_of(role)].listening() == {SECOND[role]}
