"""What a public model name leads to: weighted targets, and where to go when one fails.

    name ─► alias of another name
        └─► targets    those whose conditions hold, by weight
            fallbacks  in their order, each for the causes it names

Operators write tables, gateways decide by them; both hold them to `fault`. A tenant may have
a table of its own for a name, which stands in for everybody's.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from core.protocol import ServiceClass

FallbackCause = Literal[
    "capacity", "error", "timeout", "context_window", "content_policy", "images"
]
CAUSES: tuple[FallbackCause, ...] = get_args(FallbackCause)

EVERYBODY = ""  # as a table's tenant
TARGETS_MAX = 32
FALLBACKS_MAX = 16
ALIAS_HOPS_MAX = 8
WEIGHT_MAX = 1_000_000
TOKENS_MAX = 2**31 - 1
CONTEXT_MIN = 2  # tokens: one of a prompt, one of an answer
FIRST_TOKEN_MS_MAX = 3_600_000

Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Condition(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What must be true of a request; all of what is said. `prompt_tokens_max` 0 is no bound.

    A tag holds if the request has it with this value. `tools` and `images` are whether the
    request wants any, None where it does not matter.
    """

    prompt_tokens_min: Count = 0
    prompt_tokens_max: Count = 0
    tiers: tuple[Text, ...] = ()  # any of them
    service_classes: tuple[ServiceClass, ...] = ()  # any of them
    tags: dict[Text, Text] = {}
    tools: bool | None = None
    images: bool | None = None

    @property
    def counts(self) -> bool:
        """Whether it can only be told once the prompt was counted."""
        return bool(self.prompt_tokens_min or self.prompt_tokens_max)


class Target(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A deployment of ours, or a `model` of an outside provider with its two sizes.

    One with `weight` 0 gets no new conversation and keeps those it has. `first_token_ms` is how
    long it may keep a request without a word before another is tried; 0 is to the deadline.
    `keeps_begun` gives it the conversations that have answers already and are bound to nobody:
    they began when it stood alone.
    """

    deployment: str = ""
    provider: str = ""
    model: Annotated[str, msgspec.Meta(max_length=256)] = ""  # as the provider calls it
    context_tokens: Count = 0
    max_output_tokens: Count = 0
    weight: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_MAX)] = 1
    first_token_ms: Annotated[int, msgspec.Meta(ge=0, le=FIRST_TOKEN_MS_MAX)] = 0
    keeps_begun: bool = False
    when: Condition = msgspec.field(default_factory=Condition)

    @property
    def name(self) -> str:
        """What it is known by in bindings, logs and reasons; a deployment's holds no slash."""
        return self.deployment or f"{self.provider}/{self.model}"


class Fallback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a request goes that a target failed for one of these causes."""

    on: tuple[FallbackCause, ...]
    target: Target


class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """One public name's, for everybody or for one tenant: an `alias`, or targets."""

    model: str
    tenant: str = EVERYBODY
    alias: str = ""
    targets: tuple[Target, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    max_output_tokens: int = 0  # of an answer under this name; 0 leaves it to the target
    version: int = 0
    created_ms: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether all it says is a deployment and an output limit."""
        return (
            not (self.alias or self.fallbacks)
            and len(self.targets) == 1
            and self.targets[0] == Target(deployment=self.targets[0].deployment)
        )


class Fault(NamedTuple):
    """Why a table cannot be: a sentence, and the field it is about."""

    message: str
    param: str


def placed_targets(table: RouteTable) -> Iterator[tuple[str, Target]]:
    """Every target with the path of its field."""
    for index, target in enumerate(table.targets):
        yield f"targets.{index}", target
    for index, fallback in enumerate(table.fallbacks):
        yield f"fallbacks.{index}.target", fallback.target


def fault(table: RouteTable) -> Fault | None:
    """The first reason against a table by itself; whether what it names exists is not asked."""
    if table.alias:
        return _first(_alias_faults(table))
    return (
        _first(_size_faults(table))
        or _first(_target_faults(table))
        or _first(_repetitions(table))
        or _first(_fallback_faults(table))
    )


def alias_loop(tables: Iterable[RouteTable]) -> tuple[str, ...] | None:
    """The names of an alias that leads back to itself for anybody, if there is one."""
    aliases = {(table.tenant, table.model): table.alias for table in tables}
    for tenant in sorted({tenant for tenant, _ in aliases} | {EVERYBODY}):
        for name in sorted({name for _, name in aliases}):
            names = _followed(aliases, tenant, name)
            if names[-1] in names[:-1] or len(names) > ALIAS_HOPS_MAX + 1:
                return names
    return None


def _followed(aliases: Mapping[tuple[str, str], str], tenant: str, name: str) -> tuple[str, ...]:
    """The names from this one on, up to one that is told again or too many."""
    names: tuple[str, ...] = (name,)
    while len(names) <= ALIAS_HOPS_MAX + 1:
        mine = aliases.get((tenant, names[-1]))
        leads = aliases.get((EVERYBODY, names[-1]), "") if mine is None else mine
        if not leads:
            break
        names = (*names, leads)
        if leads in names[:-1]:
            break
    return names


def _first(faults: Iterable[Fault]) -> Fault | None:
    return next(iter(faults), None)


def _alias_faults(table: RouteTable) -> Iterator[Fault]:
    if table.targets or table.fallbacks or table.max_output_tokens:
        yield Fault("an alias has nothing beside it", "alias")
    if table.alias == table.model:
        yield Fault("a name is no alias of itself", "alias")


def _size_faults(table: RouteTable) -> Iterator[Fault]:
    if not table.targets:
        yield Fault("a table has targets, or is an alias", "targets")
    if len(table.targets) > TARGETS_MAX:
        yield Fault(f"a table has at most {TARGETS_MAX} targets", "targets")
    if len(table.fallbacks) > FALLBACKS_MAX:
        yield Fault(f"a table has at most {FALLBACKS_MAX} fallbacks", "fallbacks")
    if not any(target.weight for target in table.targets):
        yield Fault("no target has a weight", "targets")


def _target_faults(table: RouteTable) -> Iterator[Fault]:
    for path, target in placed_targets(table):
        if bool(target.deployment) == bool(target.provider):
            yield Fault("a target is a deployment or a provider's model", path)
        elif target.deployment and (target.model or target.context_tokens):
            yield Fault("a deployment's model and context are its own", path)
        elif target.deployment and target.max_output_tokens:
            yield Fault("a deployment's answers are limited by the table", path)
        elif target.provider and not target.model:
            yield Fault("a provider's target names its model", f"{path}.model")
        elif target.provider and target.context_tokens < CONTEXT_MIN:
            yield Fault("a provider's target says its context", f"{path}.context_tokens")
        most = target.when.prompt_tokens_max
        if most and most < target.when.prompt_tokens_min:
            yield Fault("no prompt is so long and so short", f"{path}.when.prompt_tokens_max")


def _repetitions(table: RouteTable) -> Iterator[Fault]:
    for index, target in enumerate(table.targets):
        for earlier in table.targets[:index]:
            if (earlier.name, earlier.when) == (target.name, target.when):
                yield Fault(f"{target.name} is a target twice", f"targets.{index}")


def _fallback_faults(table: RouteTable) -> Iterator[Fault]:
    for index, fallback in enumerate(table.fallbacks):
        if not fallback.on:
            yield Fault("a fallback names its causes", f"fallbacks.{index}.on")
        elif len(set(fallback.on)) < len(fallback.on):
            yield Fault("a cause is named twice", f"fallbacks.{index}.on")
