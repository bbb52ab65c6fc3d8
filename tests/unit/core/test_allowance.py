"""Whose word on limits holds, and what of it binds one request."""

from hypothesis import given
from hypothesis import strategies as st

from core.allowance import (
    FIELDS,
    NOTHING_SAID,
    UNBOUNDED,
    Allowance,
    Bounds,
    SaidRow,
    layered,
    said_by,
)
from core.ids import KeyId, TenantId
from core.scopes import bounds_of, own_scopes, scope_kind, scope_words, scopes_of
from core.tenancy import KeyRecord, Tenant
from core.tickets import Limits, Scope

allowances = st.builds(Allowance, **{name: st.sampled_from([None, 0, 1, 7]) for name in FIELDS})
by_model = st.dictionaries(st.sampled_from(["", "m", "n"]), allowances)


def a_tenant(**changes: object) -> Tenant:
    fields: dict[str, object] = {
        "id": TenantId("ten"),
        "name": "t",
        "salt": b"",
        "limits": Limits(),
        "weight": 1,
        "hard_cap_micro": None,
        "disabled": False,
        "version": 1,
    }
    return Tenant(**(fields | changes))


def a_key(**changes: object) -> KeyRecord:
    fields: dict[str, object] = {
        "id": KeyId("k"),
        "tenant_id": TenantId("ten"),
        "name": "k",
        "revoked": False,
        "version": 1,
    }
    return KeyRecord(**(fields | changes))


@given(first=allowances, second=allowances)
def test_what_is_said_first_wins_number_by_number_and_zero_is_said(first, second):
    both = first.over(second)
    for name in FIELDS:
        ours, theirs = getattr(first, name), getattr(second, name)
        assert getattr(both, name) == (theirs if ours is None else ours)


@given(first=by_model, second=by_model)
def test_layers_hold_every_model_that_either_speaks_of(first, second):
    both = layered(first, second)
    assert set(both) == {"", *first, *second}
    for name, allowance in both.items():
        mine, other = first.get(name, NOTHING_SAID), second.get(name, NOTHING_SAID)
        assert allowance == mine.over(other)


def test_rows_are_told_apart_by_who_speaks():
    rows = [
        SaidRow(subject="tenant", model="", allowance=Allowance(concurrency=1)),
        SaidRow(subject="tier", model="m", allowance=Allowance(concurrency=2)),
    ]
    assert said_by(rows, "tenant") == {"": Allowance(concurrency=1)}
    assert said_by(rows, "tier") == {"m": Allowance(concurrency=2)}
    assert said_by(rows, "key") == {}


def test_a_request_counts_in_each_scope_that_limits_something():
    tenant = a_tenant(
        key_allowance=Allowance(requests_per_min=5),
        model_allowances={
            "m": Allowance(input_tokens_per_min=9),
            "n": Allowance(output_tokens_max=4),
        },
    )
    key = a_key(
        allowance=Allowance(concurrency=2), model_allowances={"m": Allowance(requests_per_min=1)}
    )
    assert scopes_of(tenant, key, "m") == (
        Scope(name="key:k", limits=Limits(requests_per_min=5, concurrency=2)),
        Scope(name="model:m", limits=Limits(input_tokens_per_min=9)),
        Scope(name="key:k model:m", limits=Limits(requests_per_min=1)),
    )
    assert [scope.name for scope in scopes_of(tenant, key, "n")] == ["key:k"]
    assert scopes_of(a_tenant(), a_key(), "m") == ()
    lifted = a_key(allowance=Allowance(requests_per_min=0))
    assert scopes_of(a_tenant(key_allowance=Allowance(requests_per_min=5)), lifted, "m") == ()


def test_of_each_bound_the_smallest_holds():
    tenant = a_tenant(
        bounds=Bounds(prompt_tokens_max=100, deadline_ms_max=9),
        model_allowances={"m": Allowance(prompt_tokens_max=50, output_tokens_max=0)},
    )
    key = a_key(allowance=Allowance(prompt_tokens_max=70, deadline_ms_max=20))
    assert bounds_of(tenant, key, "m") == Bounds(prompt_tokens_max=50, deadline_ms_max=9)
    assert bounds_of(tenant, key, "n") == Bounds(prompt_tokens_max=70, deadline_ms_max=9)
    assert bounds_of(a_tenant(), a_key(), "m") is UNBOUNDED


def test_a_scope_is_told_in_words():
    assert scope_words("tenant") == ("Your account", "")
    assert scope_words("key:key_1") == ("This API key", "")
    assert scope_words("model:a/b:c") == ("Your account", " for the model `a/b:c`")
    named_so = scope_words("key:key_1 model:model:x")
    assert named_so == ("This API key", " for the model `model:x`")
    assert scope_words("model:key:x") == ("Your account", " for the model `key:x`")


def test_a_scope_s_kind_tells_nobody_whose_it_is() -> None:
    names = ("tenant", "key:key_1", "model:key:odd", "key:key_1 model:m")
    assert [scope_kind(name) for name in names] == ["tenant", "key", "model", "key_model"]


def test_a_caller_s_own_scopes_are_those_its_requests_may_count_in() -> None:
    one = Allowance(concurrency=1)
    tenant = a_tenant(key_allowance=Allowance(prompt_tokens_max=9), model_allowances={"b": one})
    key = a_key(model_allowances={"a": one, "b": one})
    own = own_scopes(tenant, key)
    assert [(each.kind, each.model) for each in own] == [
        ("tenant", ""),
        ("key", ""),
        ("key_model", "a"),
        ("model", "b"),
        ("key_model", "b"),
    ]
    assert own[1].bounds.prompt_tokens_max == 9
    for model in ("a", "b", "c"):
        counted = {scope.name for scope in scopes_of(tenant, key, model)}
        assert counted <= {each.scope.name for each in own}
    assert [each.kind for each in own_scopes(a_tenant(), a_key())] == ["tenant"]
