"""The playground: a question passed on to a gateway with a tenant's key, and its stream back.

It is a request like any other of that tenant's: counted, limited, screened and billed there.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.enums import MediaType
from litestar.response import Stream

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
    await console.api.get(request, "/me")  # for those who are signed in
    key = request.headers.get(KEY_HEADER, "")
    client = httpx.AsyncClient(timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S))
    asked = client.build_request(
        "POST",
        f"{services.settings.gateway_url.rstrip('/')}/v1/chat/completions",
        content=await request.body(),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    try:
        answer = await client.send(asked, stream=True)
    except httpx.TransportError as error:
        await client.aclose()
        raise refuse(Code.UNAVAILABLE, "no gateway answers the playground") from error
    if answer.status_code != OK:
        body = await answer.aread()
        await client.aclose()
        return Response(body, status_code=answer.status_code, media_type=MediaType.JSON)
    return Stream(_passed_on(client, answer), media_type="text/event-stream")


async def _passed_on(client: httpx.AsyncClient, answer: httpx.Response) -> AsyncIterator[bytes]:
    """Until the gateway ends or the person leaves: the connection's end cancels the request."""
    try:
        with suppress(httpx.TransportError):
            async for chunk in answer.aiter_raw():
                yield chunk
    finally:
        await answer.aclose()
        await client.aclose()
