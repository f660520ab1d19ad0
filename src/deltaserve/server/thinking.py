"""Fields by which a chat says whether its model reasons, and for how long: the names of vLLM, SGLang, Qwen, OpenRouter
and Anthropic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from deltaserve.server.api_errors import excerpt, invalid, unsupported
from deltaserve.server.body_fields import Body, BodyPart

NO_LIMIT = -1
"""A budget that is none, as Qwen's and Gemini's clients write it."""
Budget = Annotated[int, Field(ge=NO_LIMIT)]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    BeforeValidator(lambda value: None if value == "" else value),
]
"""How much is to be reasoned, in the words of OpenAI's API and of templates that know more of them. A template's own
word goes into `chat_template_kwargs`."""


_SWITCHES = ("enable_thinking", "thinking")
"""What templates of hybrid models call it."""


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """Most tokens of reasoning, and the field that asks for them."""

    param: str
    tokens: int


class ThinkingOptions(BodyPart):
    """Anthropic's: whether the model thinks first, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class ReasoningFields(BodyPart):
    """OpenRouter's."""

    effort: Effort = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether reasoning is left out of the answer."""


class CustomParams(BodyPart):
    """SGLang's, for logit processors: of those there is one."""

    thinking_budget: Budget | None = None


class ThinkingFields(Body):
    """Chat completions: how much the model reasons."""

    reasoning_effort: Effort = None
    reasoning: ReasoningFields | None = None
    thinking: ThinkingOptions | None = None
    thinking_token_budget: Budget | None = None
    """vLLM's."""
    thinking_budget: Budget | None = None
    """Qwen's API."""
    enable_thinking: bool | None = None
    """Qwen's API, too."""
    custom_params: CustomParams | None = None


def asked_limit(fields: ThinkingFields, options: Mapping[str, object]) -> ReasoningLimit | None:
    """`options`: of the template, which may show the budget to the model. Raises ApiError 400 where two differ."""
    others = fields.custom_params.model_extra if fields.custom_params else None
    if others:
        raise unsupported(f"custom_params.{next(iter(others))}"[:80])
    shown = options.get("thinking_budget")
    custom = fields.custom_params.thinking_budget if fields.custom_params else None
    return limit_of(
        {
            "thinking_token_budget": fields.thinking_token_budget,
            "thinking_budget": fields.thinking_budget,
            "reasoning.max_tokens": fields.reasoning.max_tokens if fields.reasoning else None,
            "thinking.budget_tokens": fields.thinking.budget_tokens if fields.thinking else None,
            "custom_params.thinking_budget": custom,
            "chat_template_kwargs.thinking_budget": shown if type(shown) is int else None,
        }
    )


def limit_of(asked: Mapping[str, int | None]) -> ReasoningLimit | None:
    """Field |-> its budget. None: there is no limit. Raises ApiError 400 where two differ."""
    given = [ReasoningLimit(param, tokens) for param, tokens in asked.items() if tokens is not None]
    other = next((each for each in given if each.tokens != given[0].tokens), None)
    if other is not None:
        raise invalid(other.param, f"{given[0].param} and {other.param} differ: give one of them")
    return given[0] if given and given[0].tokens != NO_LIMIT else None


def asked_effort(fields: ThinkingFields) -> str | None:
    """How much is to be reasoned, in the words of the model's template. Raises ApiError 400 where two differ."""
    inner = None if fields.reasoning is None else fields.reasoning.effort
    if inner and fields.reasoning_effort not in (None, inner):
        raise invalid("reasoning.effort", f"it is {excerpt(inner)}, and reasoning_effort differs: give one of them")
    if inner or fields.reasoning_effort:
        return inner or fields.reasoning_effort
    return "none" if fields.reasoning is not None and fields.reasoning.enabled is False else None


def check_switches(fields: ThinkingFields, options: Mapping[str, object]) -> None:
    """`options`: of the template. A budget is no switch: where the model does not think it bounds nothing.

    Raises ApiError 400 where one field says that the model thinks, and another one that it does not.
    """
    reasoning, thinking = fields.reasoning, fields.thinking
    kind = None if thinking is None or thinking.type == "adaptive" else thinking.type
    said = {
        "reasoning_effort": _thinks_at(fields.reasoning_effort),
        "reasoning.effort": _thinks_at(reasoning.effort if reasoning else None),
        "reasoning.enabled": reasoning.enabled if reasoning else None,
        "enable_thinking": fields.enable_thinking,
        "thinking.type": None if kind is None else kind == "enabled",
        **{f"chat_template_kwargs.{name}": value for name, value in options.items() if name in _SWITCHES},
    }
    on = next((param for param, thinks in said.items() if thinks is True), None)
    off = next((param for param, thinks in said.items() if thinks is False), None)
    if on is not None and off is not None:
        raise invalid(off, f"{on} says that the model thinks, and {off} that it does not: give one of them")


def _thinks_at(effort: str | None) -> bool | None:
    return None if effort is None else effort != "none"


def thinking_options(asked: ThinkingOptions | None) -> Mapping[str, object]:
    """The switches that templates of hybrid models have. What is not asked for is the template's."""
    if asked is None or asked.type == "adaptive":
        return {}
    return dict.fromkeys(_SWITCHES, asked.type == "enabled")


def thinking_switches(fields: ThinkingFields) -> Mapping[str, object]:
    """The same of fields of which no two differ, as `check_switches` sees to."""
    if fields.enable_thinking is not None:
        return dict.fromkeys(_SWITCHES, fields.enable_thinking)
    return thinking_options(fields.thinking)
