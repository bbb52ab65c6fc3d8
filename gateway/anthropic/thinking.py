"""How much a message's model is to think, and blocks of what one thought before."""

from gateway.fields import Fields, bad, missing
from gateway.thinking import BUDGET_MIN, EFFORTS, Display, Effort, Thinking, Thought

_EFFORTS = tuple(effort for effort in EFFORTS if effort != "minimal")
_MODES = ("enabled", "adaptive", "between_tools", "disabled")


def read_thinking(
    fields: Fields, effort: Effort | None, *, max_tokens: int | None
) -> Thinking | None:
    """Take `thinking`; `effort` is that of `output_config`. Raises RefusedError."""
    told = fields.nested("thinking")
    asked = ("output_config.effort",) if effort is not None else ()
    if told is None:
        return None if effort is None else Thinking(effort=effort, asked=asked)
    kind = told.choice("type", *_MODES)
    if kind is None:
        raise missing(told.at("type"))
    thinking = Thinking(effort=effort, mode="off", asked=asked)
    if kind != "disabled":
        thinking = _wanted(told, kind, effort, (fields.at("thinking"), *asked), max_tokens)
    name = told.first_left()
    if name is not None:
        raise bad(told.at(name), "Extra inputs are not permitted")
    return thinking


def read_effort(config: Fields) -> Effort | None:
    """Take `effort`. Raises RefusedError."""
    told = config.choice("effort", *_EFFORTS)
    return next((each for each in EFFORTS if each == told), None)


def read_thought(fields: Fields) -> Thought:
    """A `thinking` block. Raises RefusedError."""
    text, signature = fields.text("thinking"), fields.text("signature")
    if text is None:
        raise missing(fields.at("thinking"))
    if signature is None:
        raise missing(fields.at("signature"))
    fields.neutral("cache_control")
    return Thought(text=text, signature=signature)


def read_redacted(fields: Fields) -> Thought:
    """A `redacted_thinking` block. Raises RefusedError."""
    fields.neutral("cache_control")
    return Thought(redacted=fields.required_text("data"))


def _wanted(
    told: Fields,
    kind: str,
    effort: Effort | None,
    asked: tuple[str, ...],
    max_tokens: int | None,
) -> Thinking:
    if kind == "between_tools":
        return Thinking(mode="between_tools", effort=effort, asked=asked)
    display: Display | None = None
    match told.choice("display", "summarized", "omitted"):
        case "summarized":
            display = "summarized"
        case "omitted":
            display = "omitted"
        case _:
            pass
    if kind == "adaptive":
        return Thinking(mode="adaptive", effort=effort, display=display, asked=asked)
    path = told.at("budget_tokens")
    budget = told.integer("budget_tokens", BUDGET_MIN)
    if budget is None:
        raise missing(path)
    if max_tokens is not None and budget >= max_tokens:
        raise bad(path, f"must be less than max_tokens, which is {max_tokens}")
    return Thinking(
        mode="budget", effort=effort, budget_tokens=budget, display=display, asked=asked
    )
