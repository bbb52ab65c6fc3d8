"""The playground: a question passed on to a gateway with a tenant's key, and its stream back.

It is a request like any other of that tenant's: counted, limited, screened and billed there.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.enums import MediaType
from litestar.response import Stream

from control_plane.auth import require_proof
from control_plane.services import Services
from control_plane.ui.console import Asked, Console
from core.errors import Code, refuse

KEY_HEADER = "x-playground-key"
CONNECT_S, SILENCE_S = 2.0, 120.0
OK = 200


@post("/playground/chat", status_code=200)
async def chat(
    request: Asked, console: NamedDependency[Console], services: NamedDependency[Services]
) -> Response[Any] | Stream:
    """What the gateway answers, as it comes. 503 when there is none."""
    await _require_page(request, console, services.settings.public_url)
    key = request.headers.get(KEY_HEADER, "")
    if not key.isascii():
        raise refuse(Code.UNPROCESSABLE, "a key has no such characters", param="key")
    url = f"{services.settings.gateway_url.rstrip('/')}/v1/chat/completions"
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with AsyncExitStack() as opened:
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        client = await opened.enter_async_context(
            httpx.AsyncClient(timeout=timeout, trust_env=False)
        )
        asked = client.build_request("POST", url, content=await request.body(), headers=headers)
        try:
            answer = await client.send(asked, stream=True)
            if answer.status_code != OK:
                body = await answer.aread()
                return Response(body, status_code=answer.status_code, media_type=MediaType.JSON)
        except httpx.TransportError as error:
            raise refuse(Code.UNAVAILABLE, "no gateway answers the playground") from error
        return Stream(_passed_on(opened.pop_all(), answer), media_type="text/event-stream")


async def _require_page(request: Asked, console: Console, public_url: str) -> None:
    """For those who are signed in, from a page of ours: the API is only asked who they are."""
    me = await console.api.get(request, "/me")
    if not me.ok:
        raise refuse(Code.FORBIDDEN if me.is_forbidden else Code.UNAVAILABLE, me.message)
    if me.data["csrf"] is not None:
        require_proof(request, me.data["csrf"], public_url)


async def _passed_on(opened: AsyncExitStack, answer: httpx.Response) -> AsyncIterator[bytes]:
    """Until the gateway ends or the person leaves: the connection's end cancels the request."""
    async with opened:
        try:
            with suppress(httpx.TransportError):
                async for chunk in answer.aiter_raw():
                    yield chunk
        finally:
            await answer.aclose()
