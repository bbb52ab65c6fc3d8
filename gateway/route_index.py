"""Which names there are, for whom, and what they lead to: a routing view, ready to be asked.

The one way from a public name to anything: whoever looks a model up, to use it, to list it or
to count for it, passes the allow-lists here. A name that is not allowed is as absent as one
that does not exist.
"""

from collections.abc import Iterator, Mapping

import msgspec

from core.errors import Code, Refusal
from core.providers import ProviderView
from core.registry import ProviderModel, RoutingView, ServedModel, TargetModel
from core.route_table import ALIAS_HOPS_MAX, EVERYBODY, FallbackCause, RouteTable, Target
from core.tenancy import KeyRecord, Tenant


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A target of a table that is there, in this region."""

    target: Target
    model: TargetModel

    @property
    def name(self) -> str:
        """Its target's."""
        return self.target.name

    @property
    def images(self) -> bool:
        """Whether it takes any; the models that are served here read text alone."""
        return isinstance(self.model, ProviderModel) and self.model.images


class Spare(msgspec.Struct, frozen=True, kw_only=True):
    """A fallback that is there."""

    on: tuple[FallbackCause, ...]
    option: Option


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What a public name leads to here: an alias, or options and what is spared for trouble."""

    name: str
    alias: str = ""
    options: tuple[Option, ...] = ()
    spares: tuple[Spare, ...] = ()
    created_ms: int = 0

    @property
    def all_options(self) -> Iterator[Option]:
        """Those at first, then the spare ones."""
        yield from self.options
        yield from (spare.option for spare in self.spares)

    @property
    def counts(self) -> bool:
        """Whether choosing among them takes the prompt's length."""
        return any(option.target.when.counts for option in self.all_options)

    @property
    def measure(self) -> ServedModel | None:
        """By whose text rules a prompt is counted before its target is known: our first."""
        models = (option.model for option in self.all_options)
        return next((model for model in models if isinstance(model, ServedModel)), None)

    @property
    def widest(self) -> TargetModel:
        """The model with the longest context, which is what a name is listed with."""
        return max((option.model for option in self.options), key=lambda m: m.context_tokens)


class RouteIndex:
    """Made for each view that differs in more than replicas.

    A table is made a route when somebody first asks for it: there may be one for each of very
    many tenants, and whoever makes this has requests waiting.
    """

    def __init__(self, view: RoutingView) -> None:
        self._view = view
        self._served = {(model.model, model.deployment): model for model in view.models}
        self._providers = {provider.name: provider for provider in view.providers}
        self._tables = {(table.tenant, table.model): table for table in view.tables}
        self._routes: dict[tuple[str, str], Route] = {}

    def find(self, name: str, tenant: Tenant, key: KeyRecord) -> Route | Refusal:
        """What this caller's name leads to, aliases followed; exactly the name, case included."""
        if not is_allowed(name, tenant, key):
            return not_found(name)
        leads = name
        for _ in range(ALIAS_HOPS_MAX + 1):
            route = self._route(tenant.id, leads) or self._route(EVERYBODY, leads)
            if route is None:
                break
            if not route.alias:
                return route if route.options else not_found(name)
            leads = route.alias
        return not_found(name)

    def names(self, tenant: Tenant, key: KeyRecord) -> Iterator[tuple[str, Route]]:
        """Every name that leads this caller somewhere, with the route it leads to."""
        known = {name for owner, name in self._tables if owner in {EVERYBODY, tenant.id}}
        for name in sorted(known):
            route = self.find(name, tenant, key)
            if isinstance(route, Route):
                yield name, route

    def _route(self, owner: str, name: str) -> Route | None:
        route = self._routes.get((owner, name))
        if route is None:
            table = self._tables.get((owner, name))
            if table is not None:
                route = _route(self._view, table, self._served, self._providers)
                self._routes[owner, name] = route
        return route


def is_allowed(name: str, tenant: Tenant, key: KeyRecord) -> bool:
    """Whether both lists, where there are any, hold the name as it was asked for."""
    return all(allowed is None or name in allowed for allowed in (tenant.models, key.models))


def not_found(name: str) -> Refusal:
    """For a name that does not exist, and for one that is not the caller's to ask for."""
    return Refusal(
        code=Code.MODEL_NOT_FOUND,
        message=f"The model `{name}` does not exist or you do not have access to it.",
        param="model",
    )


def _route(
    view: RoutingView,
    table: RouteTable,
    served: Mapping[tuple[str, str], ServedModel],
    providers: Mapping[str, ProviderView],
) -> Route:
    def option(target: Target) -> Option | None:
        model: TargetModel | None
        if target.deployment:
            found = served.get((table.model, target.deployment))
            model = found and msgspec.structs.replace(
                found, max_output_tokens=table.max_output_tokens
            )
        else:
            model = _provider_model(view, table, target, providers)
        return None if model is None else Option(target=target, model=model)

    options = map(option, table.targets)
    spares = ((fallback.on, option(fallback.target)) for fallback in table.fallbacks)
    return Route(
        name=table.model,
        alias=table.alias,
        options=tuple(option for option in options if option is not None),
        spares=tuple(Spare(on=on, option=option) for on, option in spares if option is not None),
        created_ms=table.created_ms,
    )


def _provider_model(
    view: RoutingView, table: RouteTable, target: Target, providers: Mapping[str, ProviderView]
) -> ProviderModel | None:
    provider = providers.get(target.provider)
    if provider is None:
        return None
    limits = [limit for limit in (target.max_output_tokens, table.max_output_tokens) if limit]
    return ProviderModel(
        model=table.model,
        provider=target.provider,
        upstream=target.model,
        dialect=provider.dialect,
        context_tokens=target.context_tokens,
        max_output_tokens=min(limits, default=0),
        created_ms=table.created_ms,
        route_version=view.version,
        images=provider.settings.images != "none",
    )
