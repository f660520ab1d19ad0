"""NEXTN: the head that the model brings among its own weights (multi-token prediction, DeepSeek-V3)."""

from dataclasses import replace
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.model.drafts.draft_algorithm import DraftAlgorithm
from deltaserve.model.known_families import family_named
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.model_spec import DraftSpec, HeadForm, ModelSpec
from deltaserve.model.open_source import open_source


def nextn_head(spec: ModelSpec, model_path: Path, folder: Path | None) -> DraftSpec:
    """A layer of full attention, otherwise like the model's last. Raises ConfigError where its family brings none."""
    family = family_named(spec.family)
    if family.draft is None:
        where = open_source(model_path).config().where
        raise ConfigError(f"{where}: models of {family.model_type} bring no head that drafts tokens (MTP)")
    layer = LayerSpec(replace(spec.attention, window_len=None), spec.layers[-1].mlp)
    body = replace(spec, layers=(layer,), num_draft_layers=0)
    return DraftSpec("NEXTN", HeadForm.MERGED, body, family.draft(spec))


ALGORITHM = DraftAlgorithm(head=nextn_head)
