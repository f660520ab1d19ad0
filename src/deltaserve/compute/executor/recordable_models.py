"""Which models have decode steps that can be recorded and replayed (step_graphs.py). No torch: the launcher asks."""

from deltaserve.model.model_spec import ModelSpec


def why_not_recordable(spec: ModelSpec) -> str | None:
    """The reason in words for an operator; None: its decode steps have no size that depends on what it computes."""
    draft = None if spec.draft is None else "a draft head takes part in its steps"
    reasons = [*(layer.mlp.unrecordable for layer in spec.layers), *(layer.mixer.unrecordable for layer in spec.layers)]
    return next((reason for reason in reasons if reason is not None), draft)
