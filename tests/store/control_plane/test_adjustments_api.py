"""Credits, refunds, adjustments and repricings: one effect each, and every refusal explained."""

import asyncio
import secrets

import pytest

from tests.support.control_plane import assert_refused
from tests.support.ledger_commands import ODD_PRICE, PRICE, a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def tenant(plane):
    return await a_tenant(plane.services.postgres)


async def billed_50(plane, tenant, price=PRICE):
    """An ended request: ten tokens read, twenty written."""
    request_id = f"req_{secrets.token_hex(8)}"
    asked = a_reserve(request_id, tenant_id=tenant, price_id=price.id)
    await plane.services.ledger.reserve(asked)
    await plane.services.ledger.settle(a_settle(request_id, tenant_id=tenant))
    return request_id


def an_id():
    return f"adj-{secrets.token_hex(8)}"


def a_body(**fields):
    return {"id": an_id(), "reason": "because"} | fields


async def balances(plane, tenant):
    seen = (await plane.admin("GET", f"/tenants/{tenant}/account")).json()
    return seen["posted_micro"], seen["credit_micro"], seen["entries"]


async def test_each_correction_is_an_entry_with_its_reason_and_author(plane, tenant):
    request_id = await billed_50(plane, tenant)
    odd = 5 + (10 * 333_333 + 20 * 1_499_999 + 500_000) // 1_000_000
    posted, credit = 50, 0
    for path, fields, kind, d_posted, d_credit in [
        ("credits", {"amount_micro": 900}, "credit", 0, 900),
        ("credits", {"amount_micro": -100}, "credit", 0, -100),
        ("adjustments", {"amount_micro": 30}, "adjustment", 30, 0),
        ("adjustments", {"amount_micro": -35}, "adjustment", -35, 0),
        ("refunds", {"amount_micro": 7, "request_id": request_id}, "refund", -7, 0),
        (
            "reprices",
            {"price_id": ODD_PRICE.id, "request_id": request_id},
            "reprice",
            odd - 43,
            0,
        ),
    ]:
        body = a_body(**fields)
        answer = await plane.admin("POST", f"/tenants/{tenant}/{path}", body)
        assert answer.status_code == 201, answer.text
        entry = answer.json()
        posted, credit = posted + d_posted, credit + d_credit
        assert (entry["kind"], entry["adjustment_id"]) == (kind, body["id"])
        assert (entry["reason"], entry["author"]) == ("because", "admin")
        assert (entry["posted_delta_micro"], entry["posted_micro"]) == (d_posted, posted)
        assert (entry["credit_delta_micro"], entry["credit_micro"]) == (d_credit, credit)
        assert entry["request_id"] == fields.get("request_id", "")
    assert await balances(plane, tenant) == (posted, credit, 8)


async def test_the_same_words_again_have_no_effect_and_the_same_answer(plane, tenant):
    request_id = await billed_50(plane, tenant)
    for kind, fields, other in [
        ("credits", {"amount_micro": 5}, {"amount_micro": 6}),
        ("adjustments", {"amount_micro": 5}, {"reason": "another"}),
        ("refunds", {"amount_micro": 5, "request_id": request_id}, {"amount_micro": 6}),
        (
            "reprices",
            {"price_id": ODD_PRICE.id, "request_id": request_id},
            {"price_id": PRICE.id},
        ),
    ]:
        body, path = a_body(**fields), f"/tenants/{tenant}/{kind}"
        first = await plane.admin("POST", path, body)
        before = await balances(plane, tenant)
        again = await plane.admin("POST", path, body)
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json() == again.json()
        assert_refused(await plane.admin("POST", path, body | other), 409, "conflict", "id")
        assert await balances(plane, tenant) == before


async def test_an_id_is_one_corrections_whoever_elses_it_would_be(plane, tenant):
    other = await a_tenant(plane.services.postgres)
    body = a_body(amount_micro=5)
    await plane.made(f"/tenants/{tenant}/credits", body)
    answer = await plane.admin("POST", f"/tenants/{other}/credits", body)
    assert_refused(answer, 409, "conflict", "id")
    answer = await plane.admin("POST", f"/tenants/{tenant}/adjustments", body)
    assert_refused(answer, 409, "conflict", "id")


async def test_of_two_tenants_at_once_one_has_the_id(plane, tenant):
    other, body = await a_tenant(plane.services.postgres), a_body(amount_micro=5)
    answers = await asyncio.gather(
        *(plane.admin("POST", f"/tenants/{name}/credits", body) for name in (tenant, other))
    )
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    given = [(await balances(plane, name))[1] for name in (tenant, other)]
    assert sorted(given) == [0, 5]


async def test_twenty_at_once_with_the_same_words_have_one_effect(plane, tenant):
    body = a_body(amount_micro=5)
    path = f"/tenants/{tenant}/credits"
    answers = await asyncio.gather(*(plane.admin("POST", path, body) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert len({answer.text for answer in answers}) == 1
    assert await balances(plane, tenant) == (0, 5, 1)
    records = (await plane.admin("GET", "/audit-log", subject=tenant)).json()["records"]
    assert len(records) == 1


async def test_a_prepaid_account_keeps_what_it_has_used(plane, tenant):
    await plane.made(f"/tenants/{tenant}/credits", a_body(amount_micro=100))
    terms = {"prepaid": True, "hard_cap_micro": None}
    await plane.admin("PUT", f"/tenants/{tenant}/account", terms)
    await billed_50(plane, tenant)
    await plane.services.ledger.reserve(
        a_reserve(f"req_{an_id()}", tenant_id=tenant, amount_micro=20)
    )
    answer = await plane.admin("POST", f"/tenants/{tenant}/credits", a_body(amount_micro=-31))
    assert_refused(answer, 409, "conflict", "amount_micro")
    message = answer.json()["error"]["message"]
    for sums in ("is 100 micro-units", "50 are spent", "20 reserved", "at most 30 can be"):
        assert sums in message
    answer = await plane.admin("POST", f"/tenants/{tenant}/credits", a_body(amount_micro=-30))
    assert answer.status_code == 201


async def test_nothing_is_charged_over_a_hard_limit(plane, tenant):
    request_id = await billed_50(plane, tenant)
    await plane.admin("PUT", f"/tenants/{tenant}/account", {"prepaid": False, "hard_cap_micro": 60})
    path = f"/tenants/{tenant}/adjustments"
    answer = await plane.admin("POST", path, a_body(amount_micro=11))
    assert_refused(answer, 409, "conflict", "amount_micro")
    message = answer.json()["error"]["message"]
    for sums in ("'account.total' is 60", "50 are spent", "0 reserved", "at most 10 more"):
        assert sums in message
    assert (await plane.admin("POST", path, a_body(amount_micro=10))).status_code == 201
    await plane.made(
        f"/tenants/{tenant}/reprices", a_body(request_id=request_id, price_id=ODD_PRICE.id)
    )
    await plane.made(path, a_body(amount_micro=8))
    back = a_body(request_id=request_id, price_id=PRICE.id)
    answer = await plane.admin("POST", f"/tenants/{tenant}/reprices", back)
    assert_refused(answer, 409, "conflict", "price_id")


async def test_no_more_is_given_back_than_a_request_costs(plane, tenant):
    request_id = await billed_50(plane, tenant)
    path = f"/tenants/{tenant}/refunds"
    await plane.made(path, a_body(request_id=request_id, amount_micro=20))
    answer = await plane.admin("POST", path, a_body(request_id=request_id, amount_micro=31))
    assert_refused(answer, 409, "conflict", "amount_micro")
    assert "costs 30 micro-units" in answer.json()["error"]["message"]
    answer = await plane.admin("POST", path, a_body(request_id=request_id, amount_micro=30))
    assert answer.status_code == 201


async def test_what_is_corrected_is_there_and_has_ended(plane, tenant):
    other = await billed_50(plane, await a_tenant(plane.services.postgres))
    still_open = f"req_{an_id()}"
    await plane.services.ledger.reserve(a_reserve(still_open, tenant_id=tenant))
    for request_id in ("req_none", other, still_open):
        body = a_body(request_id=request_id, amount_micro=1)
        answer = await plane.admin("POST", f"/tenants/{tenant}/refunds", body)
        assert_refused(answer, 404, "not_found", "request_id")
        body = a_body(request_id=request_id, price_id=PRICE.id)
        answer = await plane.admin("POST", f"/tenants/{tenant}/reprices", body)
        assert_refused(answer, 404, "not_found", "request_id")
    body = a_body(request_id=await billed_50(plane, tenant), price_id="none")
    answer = await plane.admin("POST", f"/tenants/{tenant}/reprices", body)
    assert_refused(answer, 404, "not_found", "price_id")
    answer = await plane.admin("POST", "/tenants/ten_0/credits", a_body(amount_micro=1))
    assert_refused(answer, 404, "not_found")


async def test_what_is_not_a_correction_is_refused_by_its_field(plane, tenant):
    whole = {
        "credits": a_body(amount_micro=1),
        "adjustments": a_body(amount_micro=1),
        "refunds": a_body(amount_micro=1, request_id="req_1"),
        "reprices": a_body(price_id="p", request_id="req_1"),
    }
    wrong = {
        "id": ["", "a b", "x" * 101, 7],
        "reason": ["", "  ", "x" * 501, None],
        "amount_micro": [0, 1.5, "1", 2**60, None],
        "request_id": ["", 5],
        "price_id": ["", 5],
    }
    for path, body in whole.items():
        url = f"/tenants/{tenant}/{path}"
        for field, values in wrong.items():
            if field not in body:
                assert_refused(
                    await plane.admin("POST", url, body | {field: "x"}),
                    422,
                    "unprocessable",
                    field,
                )
                continue
            without = {name: value for name, value in body.items() if name != field}
            assert_refused(await plane.admin("POST", url, without), 422, "unprocessable", field)
            for value in values:
                answer = await plane.admin("POST", url, body | {field: value})
                assert_refused(answer, 422, "unprocessable", field)
    answer = await plane.admin(
        "POST", f"/tenants/{tenant}/refunds", whole["refunds"] | {"amount_micro": -1}
    )
    assert_refused(answer, 422, "unprocessable", "amount_micro")
    assert await balances(plane, tenant) == (0, 0, 0)


async def test_a_correction_is_in_the_audit_log_with_its_entry(plane, tenant):
    body = a_body(amount_micro=5)
    entry = await plane.made(f"/tenants/{tenant}/credits", body)
    await plane.admin("POST", f"/tenants/{tenant}/credits", body)
    (seen,) = (await plane.admin("GET", "/audit-log", subject=tenant)).json()["records"]
    assert (seen["action"], seen["actor"]) == ("account.credit", "admin")
    assert seen["detail"] == body | {"entry": entry["seq"], "delta_micro": 5}
