"""Names: for whom there are any, what they lead to, and what is as absent as what is not there."""

from typing import Any

import msgspec
import pytest

from core.errors import Code, Refusal
from core.ids import KeyId, TenantId
from core.pricing import PriceTable
from core.providers import ProviderView
from core.registry import ProviderModel, RoutingView, ServedModel
from core.route_table import ALIAS_HOPS_MAX, Condition, Fallback, RouteTable, Target
from core.tenancy import KeyRecord, Tenant
from core.tickets import Limits
from gateway.route_index import Route, RouteIndex

FAR = ProviderView(name="far", dialect="anthropic")
OUTSIDE = Target(provider="far", model="far-m", context_tokens=500, max_output_tokens=7)


def a_tenant(identity: str = "ten_1", models: tuple[str, ...] | None = None) -> Tenant:
    return Tenant(
        id=TenantId(identity),
        name="t",
        salt=bytes(16),
        limits=Limits(),
        weight=1,
        hard_cap_micro=None,
        models=models,
        disabled=False,
        version=1,
    )


def a_key(models: tuple[str, ...] | None = None) -> KeyRecord:
    return KeyRecord(
        id=KeyId("key_1"),
        tenant_id=TenantId("ten_1"),
        name="k",
        revoked=False,
        models=models,
        version=1,
    )


def served(model: str, deployment: str, context_tokens: int = 100) -> ServedModel:
    return ServedModel(
        model=model,
        version=f"v-{deployment}",
        deployment=deployment,
        pool=f"{deployment}@local",
        family="llama",
        context_tokens=context_tokens,
        max_output_tokens=0,
        created_ms=0,
        route_version=9,
    )


def a_table(model: str, *targets: Target | str, **fields: Any) -> RouteTable:
    made = tuple(Target(deployment=t) if isinstance(t, str) else t for t in targets)
    return RouteTable(model=model, targets=made, **fields)


def an_index(*tables: RouteTable, models: tuple[ServedModel, ...] = ()) -> RouteIndex:
    known = {
        (table.model, target.deployment): served(table.model, target.deployment)
        for table in tables
        for target in (*table.targets, *(fallback.target for fallback in table.fallbacks))
        if target.deployment and target.deployment != "elsewhere"
    }
    known |= {(model.model, model.deployment): model for model in models}
    view = RoutingView(
        region="local",
        version=9,
        models=tuple(known.values()),
        prices=PriceTable(()),
        replicas={},
        tables=tables,
        providers=(FAR,),
    )
    return RouteIndex(view)


def found(index: RouteIndex, name: str, tenant: Tenant | None = None) -> Route:
    route = index.find(name, tenant or a_tenant(), a_key())
    assert isinstance(route, Route)
    return route


def is_absent(
    index: RouteIndex, name: str, tenant: Tenant | None = None, key: KeyRecord | None = None
) -> bool:
    refused = index.find(name, tenant or a_tenant(), key or a_key())
    if isinstance(refused, Route):
        return False
    assert refused == Refusal(
        code=Code.MODEL_NOT_FOUND,
        message=f"The model `{name}` does not exist or you do not have access to it.",
        param="model",
    )
    return True


def test_names_are_exact() -> None:
    index = an_index(a_table("Big", "a"))
    assert found(index, "Big").name == "Big"
    for name in ("big", "Big ", "", "Bigger"):
        assert is_absent(index, name)


def test_an_alias_leads_to_what_its_name_leads_to() -> None:
    index = an_index(a_table("m", "a"), a_table("fast", alias="m"), a_table("old", alias="fast"))
    assert found(index, "old") == found(index, "m")
    assert is_absent(an_index(a_table("fast", alias="gone")), "fast")


def test_aliases_in_a_circle_lead_nowhere() -> None:
    # The control plane refuses them; a gateway that meets one all the same must not hang.
    assert is_absent(an_index(a_table("a", alias="b"), a_table("b", alias="a")), "a")
    chain = [a_table(f"n{at}", alias=f"n{at + 1}") for at in range(ALIAS_HOPS_MAX + 1)]
    end = a_table(f"n{ALIAS_HOPS_MAX + 1}", "a")
    assert is_absent(an_index(*chain, end), "n0")
    assert found(an_index(*chain, end), "n1").name == end.model


def test_a_tenants_own_table_stands_in_for_everybodys() -> None:
    index = an_index(
        a_table("m", "a"), a_table("m", "b", tenant="ten_1"), a_table("fast", alias="m")
    )
    for name in ("m", "fast"):
        assert [o.name for o in found(index, name).options] == ["b"]
        assert [o.name for o in found(index, name, a_tenant("ten_2")).options] == ["a"]
    mine = an_index(a_table("mine", "a", tenant="ten_1"))
    assert is_absent(mine, "mine", a_tenant("ten_2"))
    assert [name for name, _ in mine.names(a_tenant("ten_2"), a_key())] == []
    assert [name for name, _ in mine.names(a_tenant(), a_key())] == ["mine"]


@pytest.mark.parametrize(
    ("tenants", "keys"), [(("n",), None), (None, ("n",)), (("m",), ("n",)), ((), None), (None, ())]
)
def test_what_is_not_allowed_is_as_absent_as_what_is_not_there(
    tenants: tuple[str, ...] | None, keys: tuple[str, ...] | None
) -> None:
    index = an_index(a_table("m", "a"))
    tenant, key = a_tenant(models=tenants), a_key(keys)
    assert is_absent(index, "m", tenant, key)
    assert list(index.names(tenant, key)) == []


def test_a_list_allows_the_name_that_is_asked_for_and_no_other_way_to_it() -> None:
    index = an_index(a_table("m", "a"), a_table("fast", alias="m"))
    for allowed, other in (("m", "fast"), ("fast", "m")):
        key = a_key((allowed,))
        assert not is_absent(index, allowed, key=key)
        assert is_absent(index, other, key=key)
        assert [name for name, _ in index.names(a_tenant(), key)] == [allowed]


def test_targets_of_another_region_and_of_unknown_providers_are_left_out() -> None:
    unknown = msgspec.structs.replace(OUTSIDE, provider="unknown")
    spare = Fallback(on=("error",), target=unknown)
    index = an_index(
        a_table("m", "a", "elsewhere", unknown, fallbacks=(spare,)), a_table("n", "elsewhere")
    )
    assert [option.name for option in found(index, "m").options] == ["a"]
    assert found(index, "m").spares == ()
    assert is_absent(index, "n")


def test_what_a_target_knows_of_itself_and_what_the_table_adds() -> None:
    table = a_table("m", "a", OUTSIDE, max_output_tokens=5)
    own, outside = (option.model for option in found(an_index(table), "m").options)
    assert own == msgspec.structs.replace(served("m", "a"), max_output_tokens=5)
    assert isinstance(outside, ProviderModel)
    assert (outside.model, outside.upstream, outside.dialect) == ("m", "far-m", "anthropic")
    assert (outside.context_tokens, outside.max_output_tokens) == (500, 5)
    assert (outside.version, outside.route_version) == ("far/far-m", 9)
    wide = a_table("m", OUTSIDE)
    (option,) = found(an_index(wide), "m").options
    assert option.model.max_output_tokens == 7


def test_what_a_route_is_measured_by_and_listed_with() -> None:
    long = served("m", "long", context_tokens=900)
    table = a_table(
        "m", OUTSIDE, "a", fallbacks=(Fallback(on=("error",), target=Target(deployment="long")),)
    )
    route = found(an_index(table, models=(long,)), "m")
    assert route.measure is not None
    assert route.measure.deployment == "a"
    assert route.widest.context_tokens == 500
    assert not route.counts
    assert found(an_index(a_table("m", OUTSIDE)), "m").measure is None
    short = Target(deployment="a", when=Condition(prompt_tokens_max=9))
    assert found(an_index(a_table("m", short)), "m").counts
