"""One call from the driver while it is dealt with: what it leads to is collected here, and handed back by it."""

from dataclasses import dataclass

from deltaserve.control.engine.api import Action


@dataclass(slots=True)
class EngineTurn:
    """An event, a tick, a step's result or a turn: when it came, and what it leads to."""

    now: float
    is_draining: bool
    """Nothing new is taken: the worker is to end, or to take up another role."""
    actions: list[Action]
    """To be performed, in order."""

    def do(self, action: Action) -> None:
        self.actions.append(action)
