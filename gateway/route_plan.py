"""Where one request goes, and where next when that fails: decided before anything is sent.

    options that can, whose conditions hold ─► kept where its conversation is bound, else by weight
    spares that can, whose conditions hold  ─► in their order, each for the causes it names

The draw comes from the conversation's name, so that without a memory of bindings every gateway
makes the same choice. A plan goes through its spares once, forward: it ends.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from core.errors import Code, Refusal
from core.protocol import ServiceClass
from core.route_table import Condition, FallbackCause
from gateway.images import takes_none
from gateway.route_index import Option, Route, not_found

DRAWS = 2**64  # a draw is one of so many, all equally likely
FIRST = -1  # a step's place before all spares


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What conditions ask of a request. `prompt_tokens` 0: nobody asked for it.

    `image` is the field of its first image, for a refusal to name.
    """

    prompt_tokens: int = 0
    tier: str = ""
    service_class: ServiceClass = "standard"
    tags: Mapping[str, str] = {}
    tools: bool = False
    images: bool = False
    image: str = ""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One target to try, and why this one."""

    at: int
    option: Option
    reason: str  # only | weight | bound | a fallback's cause


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`first` None: no target takes so long a prompt, or images: `lacks`, a cause to fall back for.

    `open` are the names among which a binding decides; one name or none is nothing to bind.
    """

    route: Route
    facts: Facts
    first: Step | None
    candidates: tuple[Option, ...]
    lacks: FallbackCause = "context_window"

    @property
    def refusal(self) -> Refusal:
        """When neither a target nor a fallback takes it."""
        if self.lacks == "images":
            return takes_none(self.route.name, self.facts.image).refusal
        return too_long(self.facts)

    @property
    def open(self) -> tuple[str, ...]:
        """In the order of the table."""
        return tuple(dict.fromkeys(option.name for option in self.candidates))

    @property
    def keeper(self) -> str | None:
        """The one whose conversations are those that began before anybody bound them."""
        keepers = (option.name for option in self.candidates if option.target.keeps_begun)
        return next(keepers, None)

    def bound(self, name: str) -> "Plan":
        """The same with its conversation's target, if that is still one of the candidates."""
        for option in self.candidates:
            if option.name == name:
                step = Step(at=FIRST, option=option, reason="bound")
                return msgspec.structs.replace(self, first=step)
        return self

    def after(self, at: int, cause: FallbackCause, tried: Collection[str] = ()) -> Step | None:
        """The next spare, behind place `at`, for this cause and not tried yet."""
        for place, spare in enumerate(self.route.spares):
            if (
                place > at
                and cause in spare.on
                and spare.option.name not in tried
                and _takes(spare.option, self.facts)
            ):
                return Step(at=place, option=spare.option, reason=cause)
        return None


def plan(route: Route, facts: Facts, draw: int) -> Plan | Refusal:
    """Refused as a name that does not exist: no target is meant for such a request."""
    assert 0 <= draw < DRAWS
    candidates = tuple(option for option in route.options if _takes(option, facts))
    drawn = pick(candidates, draw)
    if drawn is not None:
        reason = "weight" if len(candidates) > 1 else "only"
        first = Step(at=FIRST, option=drawn, reason=reason)
        return Plan(route=route, facts=facts, first=first, candidates=candidates)
    meant = [
        option
        for option in route.options
        if option.target.weight and _holds_at_some_length(option.target.when, facts)
    ]
    if not meant:
        return not_found(route.name)
    # One that would hold for another length does not hold for this one.
    able = not facts.images or any(option.images for option in meant)
    lacks: FallbackCause = "context_window" if able else "images"
    return Plan(route=route, facts=facts, first=None, candidates=(), lacks=lacks)


def too_long(facts: Facts) -> Refusal:
    """When neither a target nor a fallback takes a prompt of this length."""
    return Refusal(
        code=Code.CONTEXT_LENGTH,
        message=f"No target of this model takes a prompt of {facts.prompt_tokens} tokens.",
        param="messages",
    )


def pick(options: Sequence[Option], draw: int, draws: int = DRAWS) -> Option | None:
    """Each has of all draws the share of its weight. None: none has any weight."""
    total = sum(option.target.weight for option in options)
    at = draw * total // draws
    for option in options:
        at -= option.target.weight
        if at < 0:
            return option
    return None


def holds(condition: Condition, facts: Facts) -> bool:
    """Whether all that it says is true of a request."""
    return _holds_at_some_length(condition, facts) and (
        condition.prompt_tokens_min <= facts.prompt_tokens
        and facts.prompt_tokens <= (condition.prompt_tokens_max or facts.prompt_tokens)
    )


def _takes(option: Option, facts: Facts) -> bool:
    return holds(option.target.when, facts) and (option.images or not facts.images)


def _holds_at_some_length(condition: Condition, facts: Facts) -> bool:
    return (
        _among(facts.tier, condition.tiers)
        and _among(facts.service_class, condition.service_classes)
        and all(facts.tags.get(tag) == value for tag, value in condition.tags.items())
        and condition.tools in {None, facts.tools}
        and condition.images in {None, facts.images}
    )


def _among(value: str, values: Iterable[str]) -> bool:
    return not values or value in values
