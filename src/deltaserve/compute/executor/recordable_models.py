"""Which models have decode steps that can be recorded and replayed (step_graphs.py). No torch: the launcher asks."""

from collections.abc import Callable

from deltaserve.model.model_spec import ModelSpec

_NOT_RECORDED: tuple[tuple[str, Callable[[ModelSpec], bool]], ...] = (
    ("the rows of its experts are counted on the host", lambda spec: any(layer.has_experts for layer in spec.layers)),
    ("its recurrent layers cut steps on the host", lambda spec: spec.num_recurrent > 0),
    ("a draft head takes part in its steps", lambda spec: spec.draft is not None),
)
"""A reason, and of which models."""


def why_not_recordable(spec: ModelSpec) -> str | None:
    """The reason in words for an operator; None: its decode steps have no size that depends on what it computes."""
    return next((reason for reason, applies in _NOT_RECORDED if applies(spec)), None)
