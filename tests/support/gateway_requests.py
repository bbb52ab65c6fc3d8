"""Requests as tests send them: bodies with defaults, headers of either dialect."""

from typing import Any

import httpx

from tests.support.gateway_world import MODEL, Caller, World

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
PATHS = (CHAT, COMPLETIONS, MESSAGES)


def a_body(path: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 50}
    if path == COMPLETIONS:
        body["prompt"] = "Once upon a time"
    else:
        body["messages"] = [{"role": "user", "content": "Tell me a story."}]
    return {name: value for name, value in (body | fields).items() if value is not None}


def headers_of(caller: Caller, path: str = CHAT) -> dict[str, str]:
    if path.startswith(MESSAGES):
        return {"x-api-key": caller.key, "anthropic-version": "2023-06-01"}
    return {"authorization": f"Bearer {caller.key}"}


async def post(
    world: World, caller: Caller, path: str = CHAT, *, gateway: int = 0, **fields: Any
) -> httpx.Response:
    """The whole response, streamed or not."""
    async with httpx.AsyncClient(base_url=world.url_of(gateway), timeout=30) as client:
        return await client.post(
            path, json=a_body(path, **fields), headers=headers_of(caller, path)
        )


def text_of(path: str, response: httpx.Response) -> str:
    """What a whole answer says."""
    body = response.json()
    if path == MESSAGES:
        return "".join(block["text"] for block in body["content"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of either dialect."""
    error: dict[str, Any] = response.json()["error"]
    return error
