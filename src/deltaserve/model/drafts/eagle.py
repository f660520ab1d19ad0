"""EAGLE: as SGLang's flag of this name, the head of a folder where one is given, and the model's own where none is."""

from pathlib import Path

from deltaserve.core.branches import DRAFTS
from deltaserve.core.errors import ConfigError
from deltaserve.model.drafts.draft_algorithm import DraftAlgorithm, HeadFolder, draft_algorithm
from deltaserve.model.model_spec import DraftSpec, ModelSpec


def either_head(spec: ModelSpec, model_path: Path, folder: Path | None) -> DraftSpec:
    """Raises ConfigError where there is none, or one that is not for this model."""
    wanted = HeadFolder.NONE if folder is None else HeadFolder.REQUIRED
    for algorithm in map(draft_algorithm, DRAFTS):
        if algorithm.head is not None and algorithm.folder is wanted:
            return algorithm.head(spec, model_path, folder)
    raise ConfigError(f"draft heads: none that {wanted.value} is known; {spec.family} is served without guesses")


ALGORITHM = DraftAlgorithm(folder=HeadFolder.OPTIONAL, head=either_head)
