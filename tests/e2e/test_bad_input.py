"""Bad input gets its dialect's own error before anything is reserved or sent to a worker."""

import http.client
import json
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]

HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


def chat(**fields):
    return {"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields}


def message(**fields):
    return {"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields}


OPENAI_BAD = {
    "no model": ({"messages": HELLO}, 400),
    "unknown model": (chat(model="gpt-17"), 404),
    "model of the wrong type": (chat(model=7), 400),
    "no messages": ({"model": MODEL}, 400),
    "empty messages": (chat(messages=[]), 400),
    "messages of the wrong type": (chat(messages="hi"), 400),
    "unknown role": (chat(messages=[{"role": "wizard", "content": "x"}]), 400),
    "no content": (chat(messages=[{"role": "user"}]), 400),
    "null content": (chat(messages=[{"role": "user", "content": None}]), 400),
    "an image": (chat(messages=[{"role": "user", "content": [IMAGE]}]), 400),
    "max_tokens 0": (chat(max_tokens=0), 400),
    "max_tokens negative": (chat(max_tokens=-3), 400),
    "max_tokens a fraction": (chat(max_tokens=1.5), 400),
    "max_tokens a word": (chat(max_tokens="many"), 400),
    "max_tokens above the limit": (chat(max_tokens=10_000_000), 400),
    "two different maxima": (chat(max_tokens=1, max_completion_tokens=4096), 400),
    "prompt over the context": (chat(messages=[{"role": "user", "content": "word " * 9000}]), 400),
    "temperature too high": (chat(temperature=2.5), 400),
    "top_p zero": (chat(top_p=0), 400),
    "n zero": (chat(n=0), 400),
    "five stop strings": (chat(stop=list("abcde")), 400),
    "an empty stop string": (chat(stop=[""]), 400),
    "stream_options without stream": (chat(stream_options={"include_usage": True}), 400),
    "a tool's name": (chat(tools=[{"type": "function", "function": {"name": "f g"}}]), 400),
    "a choice without tools": (chat(tool_choice="required"), 400),
    "a response format": (chat(response_format={"type": "xml"}), 400),
    "a schema that cannot be held to": (
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "string", "pattern": "("}},
            }
        ),
        400,
    ),
    "an unknown field": (chat(frobnicate=True), 400),
}

ANTHROPIC_BAD = {
    "no max_tokens": ({"model": MODEL, "messages": HELLO}, 400),
    "unknown model": (message(model="claude-17"), 404),
    "empty messages": (message(messages=[]), 400),
    "empty content": (message(messages=[{"role": "user", "content": ""}]), 400),
    "system as a role": (message(messages=[{"role": "system", "content": "x"}]), 400),
    "assistant first": (message(messages=[{"role": "assistant", "content": "x"}]), 400),
    "an image": (message(messages=[{"role": "user", "content": [PICTURE]}]), 400),
    "max_tokens 0": (message(max_tokens=0), 400),
    "max_tokens negative": (message(max_tokens=-1), 400),
    "max_tokens above the limit": (message(max_tokens=10_000_000), 400),
    "prompt over the context": (
        message(messages=[{"role": "user", "content": "word " * 9000}]),
        400,
    ),
    "temperature too high": (message(temperature=1.5), 400),
    "a tool's schema": (message(tools=[{"name": "f", "input_schema": {"type": "string"}}]), 400),
    "a choice without tools": (message(tool_choice={"type": "any"}), 400),
    "an unknown field": (message(frobnicate=True), 400),
}

RAW_BAD = {
    "not JSON": (b"{", 400),
    "empty": (b"", 400),
    "a list": (b"[]", 400),
    "invalid UTF-8": (b'{"model":"\xff\xfe","messages":[]}', 400),
    "a lone surrogate": (b'{"model":"\\ud800","messages":[]}', 400),
    "very deep": (b"[" * 100_000, 400),
    "33 MB": (b" " * (33 * 1024 * 1024), 413),
}


@pytest.fixture(autouse=True)
def nothing_is_reserved(stack):
    """No usage row more than before, and the system stays clean."""
    before = len(stack.usage())
    yield
    assert len(stack.usage()) == before


def assert_openai_error(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert error["code"] is None or isinstance(error["code"], str)
    assert response.headers["x-request-id"].startswith("req_")


def assert_anthropic_error(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error"
    assert set(body["error"]) >= {"type", "message"}
    assert body["request_id"] == response.headers["request-id"]


def send(stack, path, *, headers=None, **body):
    key = {"authorization": f"Bearer {stack.key}"} if headers is None else headers
    return httpx.post(stack.gateway_url + path, headers=key, timeout=30, **body)


def test_openai_bad_requests(stack):
    for name, (body, status) in OPENAI_BAD.items():
        for stream in (False, True):
            asked = body | {"stream": stream} if stream else body
            if name == "stream_options without stream" and stream:
                continue
            try:
                assert_openai_error(send(stack, "/v1/chat/completions", json=asked), status)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_anthropic_bad_requests(stack):
    for name, (body, status) in ANTHROPIC_BAD.items():
        try:
            assert_anthropic_error(send(stack, "/v1/messages", json=body), status)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("name", RAW_BAD)
def test_bodies_that_are_not_requests(stack, name):
    body, status = RAW_BAD[name]
    assert_openai_error(send(stack, "/v1/chat/completions", content=body), status)
    assert_openai_error(send(stack, "/v1/completions", content=body), status)
    assert_anthropic_error(send(stack, "/v1/messages", content=body), status)


def test_a_body_without_a_length_is_bounded_too(stack):
    def endless():
        for _ in range(34):
            yield b" " * 1024 * 1024

    try:
        response = send(stack, "/v1/messages", content=endless())
    except httpx.WriteError:
        return  # refused before we had finished writing
    assert_anthropic_error(response, 413)


BAD_KEYS = {
    "none": {},
    "malformed": {"authorization": "Bearer sk-not-ours"},
    "not a bearer": {"authorization": "Basic aGk6aGk="},
    "well formed but unknown": {
        "authorization": "Bearer hw_aaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa_2cf2ee"
    },
    "empty": {"x-api-key": ""},
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_keys(stack, name):
    headers = BAD_KEYS[name]
    assert_openai_error(send(stack, "/v1/chat/completions", headers=headers, json=chat()), 401)
    assert_anthropic_error(send(stack, "/v1/messages", headers=headers, json=message()), 401)


def test_a_revoked_key_dies_everywhere_within_a_second(stack):
    with stack.admin() as admin:
        (tenant,) = admin.get("/admin/tenants", params={"name": "demo"}).json()["tenants"]
        made = admin.post(f"/admin/tenants/{tenant['id']}/keys", json={"name": "short-lived"})
        assert made.status_code == 201, made.text
        key, key_id = made.json()["key"], made.json()["id"]
        bearer = {"authorization": f"Bearer {key}"}
        for url in stack.gateway_urls:
            assert httpx.get(f"{url}/v1/models", headers=bearer).status_code == 200
        assert admin.delete(f"/admin/keys/{key_id}").status_code in (200, 204)
    import time  # noqa: PLC0415 - only here

    time.sleep(1.2)
    for url in stack.gateway_urls:
        assert httpx.get(f"{url}/v1/models", headers=bearer).status_code == 401


def test_unknown_paths_and_methods_answer_in_the_dialect(stack):
    assert_openai_error(send(stack, "/v1/frobnicate", json={}), 404)
    response = httpx.get(f"{stack.gateway_url}/v1/chat/completions")
    assert_openai_error(response, 405)
    response = httpx.get(
        f"{stack.gateway_url}/v1/messages", headers={"anthropic-version": "2023-06-01"}
    )
    assert_anthropic_error(response, 405)


def test_the_admin_api_refuses_unknown_fields_and_tokens(stack):
    with stack.admin() as admin:
        refused = admin.post("/admin/tenants", json={"name": "x", "frobnicate": 1})
        assert refused.status_code == 422
        assert "frobnicate" in refused.text
        admin.headers["authorization"] = "Bearer hwa_wrong"
        assert admin.get("/admin/tenants").status_code == 401


def test_half_a_request_is_forgotten(stack):
    parts = urlsplit(stack.gateway_url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("authorization", f"Bearer {stack.key}")
    connection.putheader("content-length", "1000")
    connection.endheaders()
    connection.send(json.dumps(chat())[:20].encode())
    connection.close()
