"""Models, deployments, routes and prices through the admin API."""

import secrets
import time

import msgspec
import pytest

from artifacts.manifest import Contents, FileEntry, manifest_of
from core.pricing import Terms
from store.routing_view import routing_view
from tests.support.control_plane import assert_refused
from tests.support.registry import a_register

pytestmark = [pytest.mark.services, pytest.mark.anyio]


def a_manifest(**changes):
    contents = Contents(
        format="gguf",
        family="llama",
        context_tokens=64,
        weight_dtype="f32",
        compute_dtype="float32",
        files=(FileEntry(path="model.gguf", sha256=secrets.token_hex(32), bytes=5),),
        tokenizer_sha256="cd" * 32,
        template_sha256="ef" * 32,
    )
    contents = msgspec.structs.replace(contents, **changes)
    name = f"tiny-{secrets.token_hex(4)}"
    manifest = manifest_of(contents, name=name, source="test", created_ms=1)
    return msgspec.json.decode(msgspec.json.encode(manifest))


async def a_model(plane, **body):
    return await plane.made("/models", {"manifest": a_manifest(), **body})


async def a_deployment(plane, **changes):
    model = await a_model(plane)
    body = {"name": model["model"], "version": model["version"], "region": "local"} | changes
    return await plane.made("/deployments", body)


async def test_a_model_is_registered_once_however_often_it_is_sent(plane):
    manifest = a_manifest()
    first = await plane.admin("POST", "/models", {"manifest": manifest})
    second = await plane.admin("POST", "/models", {"manifest": manifest})
    assert (first.status_code, second.status_code) == (201, 200)
    made = first.json()
    assert made == second.json()
    assert (made["version"], made["state"]) == (manifest["version"], "ready")
    assert made["manifest"] == manifest
    assert (await plane.admin("GET", f"/models/{made['version']}")).json() == made
    listed = (await plane.admin("GET", "/models", model=manifest["name"])).json()
    assert listed == {"models": [made], "after": None}


async def test_the_same_content_under_another_name_is_the_version_it_was(plane):
    made = await a_model(plane)
    renamed = made["manifest"] | {"name": "another-name", "source": "elsewhere"}
    answer = await plane.admin("POST", "/models", {"manifest": renamed})
    assert (answer.status_code, answer.json()) == (200, made)


async def test_content_under_another_hash_is_refused(plane):
    manifest = a_manifest() | {"weight_dtype": "q8_0"}
    answer = await plane.admin("POST", "/models", {"manifest": manifest})
    assert_refused(answer, 422, "unprocessable", "manifest.version")


async def test_what_is_not_a_manifest_is_refused_by_its_field(plane):
    for changes, param in [
        ({"extra": 1}, "manifest.extra"),
        ({"format": "onnx"}, "manifest.format"),
        ({"files": "none"}, "manifest.files"),
        ({"context_tokens": "64"}, "manifest.context_tokens"),
    ]:
        answer = await plane.admin("POST", "/models", {"manifest": a_manifest() | changes})
        assert_refused(answer, 422, "unprocessable", param)


async def test_a_model_has_one_family(plane):
    first = a_manifest()
    await plane.made("/models", {"manifest": first})
    other = a_manifest(family="other") | {"name": first["name"]}
    answer = await plane.admin("POST", "/models", {"manifest": other})
    assert_refused(answer, 409, "conflict", "manifest.family")


async def test_unknown_models_and_states_are_refused(plane):
    made = await a_model(plane)
    assert_refused(await plane.admin("GET", "/models/0"), 404, "not_found")
    assert_refused(await plane.admin("PATCH", "/models/0", {"state": "ready"}), 404, "not_found")
    answer = await plane.admin("PATCH", f"/models/{made['version']}", {"state": "gone"})
    assert_refused(answer, 422, "unprocessable", "state")


async def test_only_a_ready_version_is_deployed(plane):
    staged = await a_model(plane, state="staged")
    body = {"name": staged["model"], "version": staged["version"], "region": "local"}
    assert_refused(await plane.admin("POST", "/deployments", body), 409, "conflict", "version")
    path = f"/models/{staged['version']}"
    assert (await plane.admin("PATCH", path, {"state": "ready"})).json()["state"] == "ready"
    assert (await plane.admin("POST", "/deployments", body)).status_code == 201


async def test_a_version_that_a_route_leads_to_is_not_retired(plane):
    made = await a_deployment(plane)
    await plane.admin("PUT", f"/routes/{made['name']}", {"deployment": made["name"]})
    path = f"/models/{made['version']}"
    answer = await plane.admin("PATCH", path, {"state": "retired"})
    assert_refused(answer, 409, "conflict", "state")
    await plane.admin("DELETE", f"/routes/{made['name']}")
    assert (await plane.admin("PATCH", path, {"state": "retired"})).status_code == 200


async def test_a_deployment_is_made_once(plane):
    made = await a_deployment(plane)
    assert made["desired_state"] == "running"
    assert (await plane.admin("GET", f"/deployments/{made['name']}")).json() == made
    body = {name: made[name] for name in ("name", "version", "region")}
    answer = await plane.admin("POST", "/deployments", body)
    assert_refused(answer, 409, "conflict", "name")
    assert answer.json()["error"]["existing_id"] == made["name"]
    page = (await plane.admin("GET", "/deployments", limit=1000)).json()
    assert made in page["deployments"]


async def test_what_is_not_a_deployment_is_refused_by_its_field(plane):
    for changes, status, param in [
        ({"version": "0"}, 404, "version"),
        ({"name": "no@where"}, 422, "name"),
        ({"name": ""}, 422, "name"),
        ({"region": "Not A Region"}, 422, "region"),
        ({"replicas": 3}, 422, "replicas"),
    ]:
        model = await a_model(plane)
        body = {"name": "x", "version": model["version"], "region": "local"} | changes
        code = "not_found" if status == 404 else "unprocessable"
        assert_refused(await plane.admin("POST", "/deployments", body), status, code, param)


async def test_a_deployment_is_drained_and_its_replicas_hear_of_it(plane):
    made = await a_deployment(plane)
    message = a_register(
        deployment=made["name"], version=made["version"], replica_id=f"rep-{made['name']}"
    )
    assert (await plane.says("/register", message)).status_code == 200
    path = f"/deployments/{made['name']}"
    answer = await plane.admin("PATCH", path, {"desired_state": "draining"})
    assert answer.json()["desired_state"] == "draining"
    answer = await plane.admin("PATCH", path, {"desired_state": "stopped"})
    assert_refused(answer, 422, "unprocessable", "desired_state")
    missing = await plane.admin("PATCH", "/deployments/none", {"desired_state": "draining"})
    assert_refused(missing, 404, "not_found")
    assert_refused(await plane.admin("GET", "/deployments/none"), 404, "not_found")


async def test_a_route_is_moved_in_one_write_and_priced_when_it_has_a_price(plane):
    first, second = await a_deployment(plane), await a_deployment(plane)
    public = f"org/{first['name']}"
    versions = []
    for made in (first, second):
        body = {"deployment": made["name"], "max_output_tokens": 32}
        answer = await plane.admin("PUT", f"/routes/{public}", body)
        assert answer.status_code == 200
        assert answer.json()["model"] == public
        versions.append(answer.json()["version"])
    assert versions == sorted(set(versions))
    listed = (await plane.admin("GET", "/routes", limit=1000)).json()["routes"]
    assert [r["deployment"] for r in listed if r["model"] == public] == [second["name"]]

    async def served():
        async with plane.services.postgres.connection() as conn:
            view = await routing_view(conn, "local")
        return [model.deployment for model in view.models if model.model == public], (
            view.prices.resolve(Terms(), public, service_class="batch", at_ms=2**52)
        )

    assert await served() == ([second["name"]], None)
    price = {"model": public, "input_micro": 1, "cached_input_micro": 1, "output_micro": 1}
    made = await plane.made("/prices", price)
    deployments, found = await served()
    assert (deployments, found.id) == ([second["name"]], made["id"])
    deleted = await plane.admin("DELETE", f"/routes/{public}")
    assert deleted.json()["version"] > versions[-1]
    assert await served() == ([], None)
    assert_refused(await plane.admin("DELETE", f"/routes/{public}"), 404, "not_found")


async def test_what_is_not_a_route_is_refused_by_its_field(plane):
    for body, status, param in [
        ({"deployment": "none"}, 404, "deployment"),
        ({"deployment": "x", "weight": 5}, 422, "weight"),
        ({"deployment": "x", "max_output_tokens": -1}, 422, "max_output_tokens"),
        ({}, 422, "deployment"),
    ]:
        code = "not_found" if status == 404 else "unprocessable"
        assert_refused(await plane.admin("PUT", "/routes/some", body), status, code, param)


async def test_a_public_name_has_a_shape(plane):
    made = await a_deployment(plane)
    answer = await plane.admin("PUT", "/routes/no%20spaces", {"deployment": made["name"]})
    assert_refused(answer, 422, "unprocessable", "model")


async def test_price_versions_are_added_and_never_replaced(plane):
    model = f"priced-{secrets.token_hex(4)}"
    body = {"model": model, "input_micro": 100, "cached_input_micro": 50, "output_micro": 400}
    made = await plane.made("/prices", body | {"effective_ms": 7})
    assert (made["currency"], made["request_micro"], made["effective_ms"]) == ("USD", 0, 7)
    again = await plane.admin("POST", "/prices", body | {"effective_ms": 7, "output_micro": 9})
    assert_refused(again, 409, "conflict", "effective_ms")
    assert again.json()["error"]["existing_id"] == made["id"]
    now = await plane.made("/prices", body)
    assert abs(now["effective_ms"] - time.time_ns() // 1_000_000) < 60_000
    listed = (await plane.admin("GET", "/prices")).json()["prices"]
    assert [price for price in listed if price["model"] == model] == [made, now]


async def test_what_is_not_a_price_is_refused_by_its_field(plane):
    in_usd = {"model": "m", "input_micro": 1, "cached_input_micro": 1, "output_micro": 1}
    await plane.made("/prices", in_usd | {"effective_ms": 3})
    for changes, param in [
        ({"input_micro": -1}, "input_micro"),
        ({"output_micro": 0.5}, "output_micro"),
        ({"currency": "dollars"}, "currency"),
        ({"currency": "EUR"}, "currency"),  # the others are in USD
        ({"effective_ms": -1}, "effective_ms"),
        ({"id": "mine"}, "id"),
    ]:
        body = {"model": "m", "input_micro": 1, "cached_input_micro": 1, "output_micro": 1}
        answer = await plane.admin("POST", "/prices", body | changes)
        assert_refused(answer, 422, "unprocessable", param)
