"""Which models have decode steps that can be recorded and replayed (step_graphs.py). No torch: the launcher asks."""

from deltaserve.model.model_spec import ModelSpec


def why_not_recordable(spec: ModelSpec) -> str | None:
    """The reason in words for an operator; None: its decode steps have no size that depends on what it computes."""
    reasons = [*(layer.mlp.unrecordable for layer in spec.layers), *(layer.mixer.unrecordable for layer in spec.layers)]
    return next((reason for reason in reasons if reason is not None), None)


def why_no_guesses(spec: ModelSpec) -> str | None:
    """Why steps that verify guesses are not recorded of a model whose decode steps are; None: they are."""
    return "its recurrent states wait for the guesses that prove right" if spec.recurrent else None
