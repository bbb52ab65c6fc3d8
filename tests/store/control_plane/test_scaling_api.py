"""Scaling policies as operators write them: what is taken, refused, and would be decided."""

import secrets

import pytest

from store import scaling
from tests.support.control_plane import assert_refused
from tests.support.registry import a_deployment, a_version

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def model(plane):
    """A model of the test's own, with a version of the same name."""
    name = f"m-{secrets.token_hex(4)}"
    async with plane.services.postgres.transaction() as conn:
        await a_version(conn, name, name)
    return name


async def a_place(plane, model: str) -> str:
    name = f"d-{secrets.token_hex(4)}"
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn, name, version=model)
    return name


async def test_a_policy_is_put_told_changed_and_deleted(plane, model):
    place = await a_place(plane, model)
    target = f"deployment:{place}"
    made = await plane.admin("PUT", f"/scaling-policies/{target}", {"max_replicas": 3})
    assert made.status_code == 200, made.text
    assert (made.json()["version"], made.json()["dry_run"]) == (1, False)
    again = await plane.admin("PUT", f"/scaling-policies/{target}", {"max_replicas": 4})
    read = await plane.admin("GET", f"/scaling-policies/{target}")
    assert (again.json()["version"], read.json()["version"]) == (2, 2)
    assert read.json()["policy"]["max_replicas"] == 4
    assert read.json()["policy"]["deployment"] == place
    listed = await plane.admin("GET", "/scaling-policies", limit=1000)
    assert read.json() in listed.json()["policies"]
    gone = await plane.admin("DELETE", f"/scaling-policies/{target}")
    assert gone.status_code == 200, gone.text
    assert_refused(await plane.admin("GET", f"/scaling-policies/{target}"), 404, "not_found")
    assert_refused(await plane.admin("DELETE", f"/scaling-policies/{target}"), 404, "not_found")
    log = await plane.admin("GET", "/audit-log", subject=target)
    actions = [line["action"] for line in log.json()["records"]]
    assert actions == ["scaling.delete", "scaling.put", "scaling.put"]


async def test_a_dry_run_says_what_would_be_decided_and_writes_nothing(plane, model):
    place = await a_place(plane, model)
    path = f"/scaling-policies/model:{model}"
    answer = await plane.admin("PUT", path, {"min_replicas": 2, "max_replicas": 3}, dry_run="true")
    assert answer.status_code == 200, answer.text
    (proposal,) = answer.json()["proposals"]
    assert (proposal["deployment"], proposal["before"]) == (place, None)
    assert (proposal["desired"], proposal["start"]) == (2, 2)
    assert proposal["reasons"]
    assert_refused(await plane.admin("GET", path), 404, "not_found")
    async with plane.services.postgres.connection() as conn:
        assert await scaling.decisions_page(conn, deployment=place, limit=1) == []
        row = await (
            await conn.execute("SELECT replicas_desired FROM deployments WHERE name = %s", (place,))
        ).fetchone()
    assert row == (None,)


async def test_two_policies_on_one_target_are_refused(plane, model):
    """AIBrix #617 and its kin: two scalers on one target fight for ever."""
    one, other = await a_place(plane, model), await a_place(plane, model)
    body = {"max_replicas": 3}
    for first, rival in (
        (f"model:{model}", f"deployment:{one}"),
        (f"deployment:{one}", f"model:{model}"),
    ):
        await plane.admin("PUT", f"/scaling-policies/{first}", body)
        refused = await plane.admin("PUT", f"/scaling-policies/{rival}", body)
        assert_refused(refused, 409, "conflict")
        assert first in refused.json()["error"]["message"]
        await plane.admin("DELETE", f"/scaling-policies/{first}")
    for place in (one, other):  # of two deployments each may have its own
        answer = await plane.admin("PUT", f"/scaling-policies/deployment:{place}", body)
        assert answer.status_code == 200, answer.text


async def test_what_is_no_policy_is_refused_by_its_field(plane, model):
    path = f"/scaling-policies/deployment:{await a_place(plane, model)}"
    for body, field in (
        ({"max_replicas": 0}, "max_replicas"),
        ({"max_replicas": 2, "min_replicas": 3}, "min_replicas"),
        ({"max_replicas": 2, "budget_hour_micro": 5}, "replica_hour_micro"),
        ({"max_replicas": 2, "gpu_utilisation": 80}, "gpu_utilisation"),
        ({"max_replicas": 2, "model": "another"}, "model"),
        ({}, "max_replicas"),
    ):
        assert_refused(await plane.admin("PUT", path, body), 422, "unprocessable", field)
    for target in ("deployment:nobody", "model:nobody", "nothing", "model:"):
        answer = await plane.admin("PUT", f"/scaling-policies/{target}", {"max_replicas": 2})
        assert_refused(answer, 404, "not_found")
