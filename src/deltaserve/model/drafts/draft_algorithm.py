"""What a draft algorithm is known by: each has an entry (`DraftAlgorithm`) in its file, imported when it is asked for.

Guesses come from a head (a layer whose keys and values are pages beside the model's) or from the host.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from deltaserve.core.branches import DRAFTS
from deltaserve.core.files.branch_code import load_branch
from deltaserve.model.model_spec import DraftSpec, ModelSpec
from deltaserve.model.tensors import Inventory

OFF = "off"
"""Nobody guesses."""


class HeadFolder(Enum):
    """Whether the head has a folder of its own (--speculative-draft-model-path)."""

    NONE = "reads none"
    OPTIONAL = "may have one"
    REQUIRED = "needs one"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAlgorithm:
    """Who guesses, and all that the rest of the server must know of it before it is there."""

    folder: HeadFolder = HeadFolder.NONE
    head: Callable[[ModelSpec, Path, Path | None], DraftSpec] | None = None
    """The head for this model in this folder or file; the last: the head's own folder. Raises ConfigError where there
    is none, or one that is not for this model."""
    inventory: Callable[[DraftSpec, Mapping[str, str]], Inventory] | None = None
    """Tensors of a head in a folder of its own; the last: what that folder's index says."""
    make_drafter: Callable[[], Any] | None = None
    """Makes the Drafter that guesses on the host (drafter.py: this file is imported at every start, numpy is not)."""


def draft_algorithm(name: str) -> DraftAlgorithm:
    """The algorithm of this name: `off`, or one of core/branches.py."""
    if name == OFF:
        return DraftAlgorithm()
    algorithm: DraftAlgorithm = load_branch(DRAFTS[name]).ALGORITHM
    return algorithm


def with_head(spec: ModelSpec, model_path: Path, algorithm: str, folder: Path | None) -> ModelSpec:
    """The model with the head that guesses by this algorithm. Its tensors are asked for when weights are.

    Raises ConfigError where there is none, or it is not one for this model.
    """
    head = draft_algorithm(algorithm).head
    return spec if head is None else replace(spec, draft=head(spec, model_path, folder))


def own_inventory(draft: DraftSpec, index: Mapping[str, str]) -> Inventory:
    """Inventory of a head that has a folder of its own, with nothing found yet."""
    inventory = draft_algorithm(draft.algorithm).inventory
    assert inventory is not None
    return inventory(draft, index)
