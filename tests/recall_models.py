"""The micro-models whose every answer can be checked."""

from collections.abc import Sequence
from pathlib import Path

from deltaserve.commands.load.recall import RecallTraffic
from deltaserve.commands.load.traffic import ChatTurn, Conversation
from tests.compute.executor.world import reference_logprobs

STATE_MODEL = Path(__file__).resolve().parents[1] / "models" / "recall-state"


def known_conversations(folder: Path, traffic: RecallTraffic, seed: int) -> list[Conversation]:
    """Those in which the model by itself, in transformers, gives every answer rightly."""
    return [one for one in traffic.generate(seed) if _is_known(folder, one.turns)]


def _is_known(folder: Path, turns: Sequence[ChatTurn]) -> bool:
    tokens: list[int] = []
    answered: dict[int, int] = {}
    for turn in turns:
        tokens += turn.tokens
        answered |= dict(enumerate(turn.stand_in, len(tokens)))
        tokens += turn.stand_in
    best = reference_logprobs(folder, tokens).argmax(-1).tolist()  # [T]: what follows token i
    return all(best[at - 1] == token for at, token in answered.items())
